"""Train an EAGLE-3 head for the built-in model, and say how many tokens a step it gives.

The questions are those that the built-in model was trained on (`demo_tasks`, split "train"), and the answers its own:
an answer counts where the model itself, given all before, puts each of its tokens first. The head learns by the
published recipe (training-time test): several passes, each over the state of the one before, towards the model's own
probabilities. Then it drafts for held-out questions, at temperature 0 and at others, with the model's own noise and
with noise of its own. Needs torch, transformers and tokenizers. On a GPU two minutes are enough; a CPU takes several
times as long.

    python scripts/train_demo_head.py --out tests/demo_head --max-seconds 125 --examples 20000
    python scripts/train_demo_head.py --out tests/demo_head --evaluate-only
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.func import functional_call
from transformers import DynamicCache, Qwen3ForCausalLM

import demo_tasks
from eagle3_head import Eagle3Head, HeadShape, Keys
from train_demo_model import segments_of

TARGET = Path(__file__).parents[1] / "src" / "nvcli" / "demo"
STATE_LAYERS = (2, 4, 6)
"""Layers of the model after which the head reads hidden states, counted from 1."""
DRAFT_VOCAB_SIZE = 256
NUM_PASSES = 4
"""Passes of the training, and drafts of a step in the evaluation."""
PASS_DECAY = 0.85
"""The weight of each pass's loss next to that of the one before."""
MAX_TOKENS = 256
"""Longer rows are left out of the training."""
TOKENS_PER_BATCH, BATCHES = 300, 3
"""On a CPU, a step has so many batches of so many tokens, each of rows of about one length, which wastes little on
padding."""
ROWS_PER_BATCH = 96
"""On a GPU, which has time for padding, a step has one batch of so many rows of all lengths."""
TASK_WEIGHTS = {
    "add": 1,
    "subtract": 1,
    "multiply": 1,
    "compare": 0.5,
    "reverse": 2,
    "repeat": 1.5,
    "count": 1.5,
    "lookup": 0.4,
}
"""How many examples each task has next to the others."""


@dataclass(frozen=True, slots=True)
class Row:
    """An example's tokens: the prompt's, then the answer's."""

    ids: list[int]
    num_prompt: int

    @property
    def sizes(self) -> tuple[int, int]:
        """The numbers of all tokens and of the prompt's."""
        return len(self.ids), self.num_prompt

    @property
    def kind(self) -> tuple[int, int]:
        """Rows of one kind are about as long as each other: their answers first, then their prompts."""
        return round(2 * math.log2(len(self.ids) - self.num_prompt)), self.num_prompt


def make_rows(tokenizer: Tokenizer, count: int, seed: int) -> list[Row]:
    """Make examples of the split "train", in order of their kinds."""
    rng = random.Random(seed)
    rows = []
    for task in rng.choices(list(TASK_WEIGHTS), list(TASK_WEIGHTS.values()), k=count):
        pieces = segments_of(demo_tasks.sample(rng, task, "train"), rng.choice(("raw", "chat")), rng)
        prompt = "".join(piece.text for piece in pieces if not piece.is_answer)
        encoded = [tokenizer.encode(text).ids for text in (prompt, pieces[-1].text)]
        rows.append(Row(encoded[0] + encoded[1], len(encoded[0])))
    return sorted((row for row in rows if len(row.ids) <= MAX_TOKENS), key=lambda row: row.kind)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows with what the target says about them."""

    ids: Tensor  # [B, T] int64
    is_answer: Tensor  # [B, T] bool: the target itself gives this token
    states: Tensor  # [B, T, states × H]
    logits: Tensor  # [B, T, vocabulary], of the token after each


def head_shape(target: Qwen3ForCausalLM) -> HeadShape:
    config = target.config
    return HeadShape(
        hidden_size=config.hidden_size,
        target_hidden_size=config.hidden_size,
        num_states=len(STATE_LAYERS),
        intermediate_size=256,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        draft_vocab_size=DRAFT_VOCAB_SIZE,
        rope_theta=config.rope_parameters["rope_theta"],
        eps=config.rms_norm_eps,
    )


@torch.no_grad()
def ask_target(target: Qwen3ForCausalLM, ids: Tensor, is_answer: Tensor) -> Batch:
    """Run the target over whole rows, padded on the right."""
    output = target(input_ids=ids, attention_mask={"full_attention": None}, use_cache=False, output_hidden_states=True)
    states = torch.cat([output.hidden_states[number] for number in STATE_LAYERS], -1)
    is_own = torch.zeros_like(is_answer)
    is_own[:, 1:] = is_answer[:, 1:] & (output.logits[:, :-1].argmax(-1) == ids[:, 1:])
    return Batch(ids, is_own, states, output.logits)


def choose_vocabulary(rows: list[Row]) -> Tensor:
    """Return the ids that answers have most often, sorted: [DRAFT_VOCAB_SIZE] int64."""
    counts = Counter(token for row in rows for token in row.ids[row.num_prompt :])
    ids = [token for token, _ in counts.most_common(DRAFT_VOCAB_SIZE)]
    ids += [token for token in range(DRAFT_VOCAB_SIZE * 2) if token not in counts][: DRAFT_VOCAB_SIZE - len(ids)]
    return torch.tensor(sorted(ids))


def batches(rows: list[Row], target: Qwen3ForCausalLM, order: random.Random) -> Iterator[list[Batch]]:
    """Draw the batches of training steps without end."""
    while True:
        if target.device.type == "cuda":
            drawn = [order.sample(rows, ROWS_PER_BATCH)]
        else:
            drawn = [neighbours(rows, order.randrange(len(rows))) for _ in range(BATCHES)]
        yield [ask_target(target, *(part.to(target.device) for part in padded(part))) for part in drawn]


def neighbours(rows: list[Row], first: int) -> list[Row]:
    """Return rows from the first one on, as many as a batch has room for."""
    last, length = first + 1, len(rows[first].ids)
    while last < len(rows) and max(length, len(rows[last].ids)) * (last - first + 1) <= TOKENS_PER_BATCH:
        length = max(length, len(rows[last].ids))
        last += 1
    return rows[first:last]


def padded(rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Return the rows' tokens [B, T], padded on the right, and which are of answers [B, T]."""
    lengths, prompts = (np.array([[n] for n in column]) for column in zip(*(row.sizes for row in rows), strict=True))
    places = np.arange(lengths.max())
    ids = np.zeros((len(rows), len(places)), dtype=np.int64)
    ids[places < lengths] = np.concatenate([row.ids for row in rows])
    return torch.from_numpy(ids), torch.from_numpy((places >= prompts) & (places < lengths))


class Loss(nn.Module):
    """The loss of a head, as a module so that other weights can take the place of its own for a moment."""

    def __init__(self, head: Eagle3Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, batch: Batch, vocabulary: Tensor) -> tuple[Tensor, list[Tensor]]:
        return loss_of(self.head, batch, vocabulary)


def loss_of(head: Eagle3Head, batch: Batch, vocabulary: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return the loss of all passes, and the share of tokens that each pass guesses right where the target's own are
    given before. Guesses are about tokens of answers alone, and only they are computed."""
    num_tokens = batch.is_answer.sum(1)
    ends = batch.is_answer.shape[1] - batch.is_answer.flip(1).int().argmax(1)
    device = batch.ids.device
    offsets = torch.arange(int(num_tokens.max()), device=device)
    # A guess from place p is about the token at p + 2 + the number of the pass; the first one knows one answer token.
    places = (ends - num_tokens - 1)[:, None].clamp(min=0) + offsets
    places = places.clamp(max=batch.ids.shape[1] - 2)
    positions = torch.arange(batch.ids.shape[1] - 1, device=device).expand(len(batch.ids), -1)
    state, earlier = head.combine(batch.states[:, :-1]), list[Keys]()
    total, shares = torch.zeros((), device=device), list[Tensor]()
    ids = batch.ids[:, 1:]
    for number in range(NUM_PASSES):
        logits, state, keys = head(ids, state, positions, earlier, places)
        earlier.append(keys)
        targets = places + 2 + number
        counts = targets < ends[:, None]
        targets = targets.clamp(max=batch.ids.shape[1] - 1)
        counts &= batch.is_answer.take_along_dim(targets, 1)
        wanted = batch.logits.take_along_dim((targets - 1)[..., None], 1)[..., vocabulary].float().softmax(-1)
        losses = -(wanted * logits.float().log_softmax(-1)).sum(-1)
        weights = counts / counts.sum(1, keepdim=True).clamp(min=1).sqrt()
        total = total + PASS_DECAY**number * (losses * weights).sum() / weights.sum().clamp(min=1)
        right = batch.ids.take_along_dim(targets, 1)
        is_right = (vocabulary[logits.argmax(-1)] == right) & counts
        shares.append(is_right.sum() / counts.sum())
        ids, positions = right, places + 1 + number
    return total, shares


def train(
    head: Eagle3Head, target: Qwen3ForCausalLM, rows: list[Row], vocabulary: Tensor, args: argparse.Namespace
) -> None:
    """Train a head, but for its embeddings."""
    parameters = [p for name, p in head.named_parameters() if name != "embed_tokens.weight"]

    def losses_of(drawn: list[Batch]) -> list[tuple[Tensor, list[Tensor]]]:
        # In bfloat16, in which CPUs with units for it are several times as fast; the weights stay in float32.
        rounded = {f"head.{name}": p.to(torch.bfloat16) for name, p in head.named_parameters()}
        return [functional_call(Loss(head), rounded, (batch, vocabulary)) for batch in drawn]

    descend(parameters, target, rows, losses_of, args, warm_up_steps=50, steps_per_line=200)


def descend(
    parameters: list[nn.Parameter],
    target: Qwen3ForCausalLM,
    rows: list[Row],
    losses_of: Callable[[list[Batch]], list[tuple[Tensor, list[Tensor]]]],
    args: argparse.Namespace,
    *,
    warm_up_steps: int,
    steps_per_line: int,
) -> None:
    """AdamW with a warm-up and a cosine that ends at `--max-seconds`. `losses_of` computes the loss of each batch of a
    step, and shares of tokens that were right, which are printed now and then."""
    optimizer = torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.01)
    start, recent = time.monotonic(), list[Tensor]()
    drawn = batches(rows, copy.deepcopy(target).to(torch.bfloat16), random.Random(args.seed))
    for step in count():
        progress = (time.monotonic() - start) / args.max_seconds
        if progress >= 1:
            break
        rate = args.learning_rate * min(1.0, (step + 1) / warm_up_steps) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        losses = losses_of(next(drawn))
        torch.autograd.backward(torch.stack([loss for loss, _ in losses]).mean())
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent += [torch.stack([loss.detach(), *shares]) for loss, shares in losses]
        if (step + 1) % steps_per_line == 0:
            loss_now, *now = torch.stack(recent).nanmean(0).tolist()
            recent.clear()
            right = " ".join(f"{share:.3f}" for share in now)
            seconds = f"{time.monotonic() - start:.0f} s, {time.process_time():.0f} s of a CPU"
            print(f"step {step + 1}, {seconds}, loss {loss_now:.3f}, right {right}", flush=True)


# ---- evaluation


def noise_of(row: int, length: int, vocab_size: int, kind: str) -> Tensor:
    """Gumbel noise of a row at each position, [length, vocabulary]."""
    generator = torch.Generator().manual_seed(1000 * row + len(kind))
    return -torch.log(-torch.log(torch.rand(length, vocab_size, generator=generator).clamp(1e-9, 1 - 1e-7)))


@torch.no_grad()
def answer(target: Qwen3ForCausalLM, prompt: list[int], temperature: float, noise: Tensor, most: int) -> Row:
    """Answer one prompt, token by token; at a temperature above 0 by the largest of logits / temperature + noise."""
    ids, cache = list(prompt), DynamicCache(config=target.config)
    given = torch.tensor([prompt])
    while len(ids) < len(prompt) + most:
        logits = target(input_ids=given, past_key_values=cache, use_cache=True).logits[0, -1]
        if temperature > 0:
            logits = logits / temperature + noise[len(ids)]
        ids.append(int(logits.argmax()))
        if ids[-1] in target.generation_config.eos_token_id:
            break
        given = torch.tensor([[ids[-1]]])
    return Row(ids, len(prompt))


@torch.no_grad()
def tokens_and_steps(
    head: Eagle3Head, target: Qwen3ForCausalLM, one: Row, vocabulary: Tensor, temperature: float, noise: Tensor
) -> tuple[int, int]:
    """Draft along an answer: → its tokens after the first, and the steps that they take."""
    ids = torch.tensor([one.ids])
    batch = ask_target(target, ids, torch.ones_like(ids, dtype=torch.bool))
    length = ids.shape[1]
    state, earlier, given = head.combine(batch.states[:, :-1]), list[Keys](), ids[:, 1:]
    drafts = []
    for number in range(NUM_PASSES):
        logits, state, keys = head(given, state, torch.arange(length - 1)[None] + number, earlier)
        earlier.append(keys)
        if temperature > 0:
            places = (torch.arange(length - 1) + 2 + number).clamp(max=len(noise) - 1)
            logits = logits / temperature + noise[places][:, vocabulary]
        given = vocabulary[logits.argmax(-1)]
        drafts.append(given[0])
    guesses = torch.stack(drafts, 1).tolist()
    place, steps = one.num_prompt, 0  # the last token that is known
    while place < length - 1:
        right = 0
        while right < NUM_PASSES and place + 1 + right < length:
            if guesses[place - 1][right] != one.ids[place + 1 + right]:
                break
            right += 1
        place += right + 1
        steps += 1
    return length - 1 - one.num_prompt, steps


def evaluate(
    head: Eagle3Head, target: Qwen3ForCausalLM, vocabulary: Tensor, tokenizer: Tokenizer, num_questions: int
) -> float:
    """Print the tokens a step on held-out questions, by task. Return the least of the means over tasks."""
    rng = random.Random("held out")
    questions = []
    for task in demo_tasks.TASKS:
        for number in range(num_questions):
            example = demo_tasks.sample(rng, task, "heldout")
            *before, _ = segments_of(example, "chat" if number % 2 else "raw", rng)
            text = "".join(piece.text for piece in before) + ("" if number % 2 else "\n")
            questions.append((task, tokenizer.encode(text).ids))
    least = math.inf
    for temperature, coupled in ((0.0, True), (1.0, True), (1.0, False), (3.0, True), (3.0, False)):
        found: dict[str, list[int]] = {task: [0, 0] for task in demo_tasks.TASKS}
        for row, (task, prompt) in enumerate(questions):
            noise = noise_of(row, len(prompt) + 420, target.config.vocab_size, "own")
            given = answer(target, prompt, temperature, noise, 48 if temperature > 1 else 400)
            drafted = noise if coupled else noise_of(row, len(noise), target.config.vocab_size, "other")
            tokens, steps = tokens_and_steps(head, target, given, vocabulary, temperature, drafted)
            found[task][0] += tokens
            found[task][1] += steps
        by_task = {task: tokens / max(1, steps) for task, (tokens, steps) in found.items()}
        tokens, steps = (sum(column) for column in zip(*found.values(), strict=True))
        kind = "" if temperature == 0 else ", the model's own noise" if coupled else ", noise of its own"
        shown = ", ".join(f"{task} {value:.2f}" for task, value in by_task.items())
        print(f"temperature {temperature:g}{kind}: {tokens / steps:.2f} tokens a step ({shown})", flush=True)
        if temperature <= 1 and coupled:
            least = min(least, tokens / steps)
    return least


# ---- checkpoint


def save_head(head: Eagle3Head, vocabulary: Tensor, out: Path) -> None:
    """Write config.json and model.safetensors as SafeAILab's checkpoints have them, in bfloat16, without the embedding,
    which is the target's."""
    shape = head.shape
    tensors = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in head.named_parameters()
        if name != "embed_tokens.weight"
    }
    is_drafted = torch.zeros(shape.vocab_size, dtype=torch.bool)
    is_drafted[vocabulary] = True
    tensors |= {"t2d": is_drafted, "d2t": vocabulary - torch.arange(len(vocabulary))}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **shape.layer_config(),
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "draft_vocab_size": shape.draft_vocab_size,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        # Layers are counted from 0 here.
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [number - 1 for number in STATE_LAYERS]},
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, out / "model.safetensors")
    (out / "model.safetensors").chmod(0o644)


def load_head(head: Eagle3Head, out: Path) -> Tensor:
    """Read back what `save_head` wrote. Returns the vocabulary."""
    tensors = load_file(out / "model.safetensors")
    del tensors["t2d"]
    offsets = tensors.pop("d2t")
    head.load_state_dict(tensors, strict=False)
    return offsets + torch.arange(len(offsets))


def training_options(description: str, *, out: str, num_examples: int, learning_rate: float) -> argparse.ArgumentParser:
    """Return the options of a training. `out` says what the folder is for; the rest are defaults."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help=out)
    parser.add_argument("--max-seconds", type=float, default=480, help="training time")
    parser.add_argument("--examples", type=int, default=num_examples, help="training examples to make")
    parser.add_argument("--learning-rate", type=float, default=learning_rate, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser


def main() -> int:
    parser = training_options(__doc__, out="folder of the head", num_examples=40_000, learning_rate=1.5e-3)
    parser.add_argument("--eval", type=int, default=8, help="held-out questions per task")
    parser.add_argument("--evaluate-only", action="store_true", help="judge the head that is in --out")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    target = Qwen3ForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    head = Eagle3Head(head_shape(target))
    head.embed_tokens.weight.data.copy_(target.get_input_embeddings().weight)
    head.fc.weight.data[:, -head.shape.hidden_size :].add_(torch.eye(head.shape.hidden_size))
    if not args.evaluate_only:
        rows = make_rows(tokenizer, args.examples, args.seed)
        vocabulary = choose_vocabulary(rows)
        head.lm_head.weight.data.copy_(target.get_output_embeddings().weight[vocabulary])
        print(f"{sum(p.numel() for p in head.parameters()) - head.embed_tokens.weight.numel():,} parameters")
        train(head.to(args.device), target.to(args.device), rows, vocabulary.to(args.device), args)
        head, target = head.cpu(), target.cpu()
        save_head(head, vocabulary, args.out)
    vocabulary = load_head(head, args.out)
    print(f"model.safetensors: {(args.out / 'model.safetensors').stat().st_size:,} bytes")
    return 0 if evaluate(head, target, vocabulary, tokenizer, args.eval) >= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
