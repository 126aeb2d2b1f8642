"""Train a small model that drafts for the built-in one.

It learns the built-in model's own probabilities, on the questions that that was trained on and its own answers, as
`train_demo_head.py` has them. Needs torch, transformers and tokenizers. On a GPU two minutes are enough.

    python scripts/train_demo_draft.py --out tests/demo_draft --max-seconds 95
"""

from __future__ import annotations

import argparse
import sys

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from train_demo_head import TARGET, Batch, Row, descend, make_rows, training_options

HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_LAYERS, HEAD_DIM = 96, 256, 2, 32


def make_model(target: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """Make the small model, with random weights."""
    settings = target.config.to_dict()
    settings |= {
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "max_window_layers": NUM_LAYERS,
        "layer_types": ["full_attention"] * NUM_LAYERS,
        "head_dim": HEAD_DIM,
    }
    return Qwen3ForCausalLM(Qwen3Config(**settings))


def loss_of(model: Qwen3ForCausalLM, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Return how far a model's probabilities of answers are from the target's, and the share of tokens that it puts
    first as the target does."""
    logits = model(input_ids=batch.ids, attention_mask={"full_attention": None}, use_cache=False).logits[:, :-1]
    counts, wanted = batch.is_answer[:, 1:], batch.logits[:, :-1].float()
    weights = counts / counts.sum(1, keepdim=True).clamp(min=1).sqrt()
    losses = -(wanted.softmax(-1) * logits.float().log_softmax(-1)).sum(-1)
    is_right = (logits.argmax(-1) == wanted.argmax(-1)) & counts
    return (losses * weights).sum() / weights.sum().clamp(min=1), [is_right.sum() / counts.sum()]


def train(model: Qwen3ForCausalLM, target: Qwen3ForCausalLM, rows: list[Row], args: argparse.Namespace) -> None:
    """Train a model, in bfloat16 where that is exact enough."""

    def losses_of(drawn: list[Batch]) -> list[tuple[Tensor, list[Tensor]]]:
        with torch.autocast(args.device, torch.bfloat16):
            return [loss_of(model, batch) for batch in drawn]

    descend([*model.parameters()], target, rows, losses_of, args, warm_up_steps=100, steps_per_line=500)


def main() -> int:
    parser = training_options(__doc__, out="folder of the model", num_examples=20_000, learning_rate=3e-3)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    target = Qwen3ForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval().to(args.device)
    rows = make_rows(Tokenizer.from_file(str(TARGET / "tokenizer.json")), args.examples, args.seed)
    model = make_model(target).to(args.device)
    print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters", flush=True)
    train(model, target, rows, args)
    model.to(torch.bfloat16).cpu().save_pretrained(args.out)
    (args.out / "model.safetensors").chmod(0o644)
    print(f"model.safetensors: {(args.out / 'model.safetensors').stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
