"""Train a small model that drafts for the built-in one.

It learns the built-in model's own probabilities, on the questions that that was trained on and its own answers, as
`train_demo_head.py` has them. Needs torch, transformers and tokenizers. On a GPU two minutes are enough.

    python scripts/train_demo_draft.py --out tests/demo_draft --max-seconds 95
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import sys
import time
from itertools import count
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from train_demo_head import TARGET, Batch, Row, batches, make_rows

HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_LAYERS, HEAD_DIM = 96, 256, 2, 32
WARM_UP_STEPS = 100


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


def loss_of(model: Qwen3ForCausalLM, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return how far a model's probabilities of answers are from the target's, and the share of tokens that it puts
    first as the target does."""
    logits = model(input_ids=batch.ids, attention_mask={"full_attention": None}, use_cache=False).logits[:, :-1]
    counts, wanted = batch.is_answer[:, 1:], batch.logits[:, :-1].float()
    weights = counts / counts.sum(1, keepdim=True).clamp(min=1).sqrt()
    losses = -(wanted.softmax(-1) * logits.float().log_softmax(-1)).sum(-1)
    is_right = (logits.argmax(-1) == wanted.argmax(-1)) & counts
    return (losses * weights).sum() / weights.sum().clamp(min=1), is_right.sum() / counts.sum()


def train(model: Qwen3ForCausalLM, target: Qwen3ForCausalLM, rows: list[Row], args: argparse.Namespace) -> None:
    """AdamW with a warm-up and a cosine that ends at `--max-seconds`."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    start, recent = time.monotonic(), list[Tensor]()
    drawn = batches(rows, copy.deepcopy(target).to(torch.bfloat16), random.Random(args.seed))
    for step in count():
        progress = (time.monotonic() - start) / args.max_seconds
        if progress >= 1:
            break
        rate = args.learning_rate * min(1.0, (step + 1) / WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(args.device, torch.bfloat16):
            results = [loss_of(model, batch) for batch in next(drawn)]
        torch.stack([loss for loss, _ in results]).mean().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent += [torch.stack([loss.detach(), share]) for loss, share in results]
        if (step + 1) % 500 == 0:
            loss_now, right = torch.stack(recent).nanmean(0).tolist()
            recent.clear()
            seconds = time.monotonic() - start
            print(f"step {step + 1}, {seconds:.0f} s, loss {loss_now:.3f}, right {right:.3f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--max-seconds", type=float, default=480, help="training time")
    parser.add_argument("--examples", type=int, default=20_000, help="training examples to make")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
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
