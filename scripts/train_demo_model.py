"""Train the built-in model and say how often it is right.

Makes its own data (`demo_tasks`), trains the tokenizer and a small Qwen3 model on it, writes a checkpoint
in Hugging Face layout into `--out`, loads that checkpoint again and answers held-out prompts with
transformers' own `generate`. Exits with 1 if any task, asked in any form, is right less than 99 % of the
time. Needs torch, transformers and tokenizers; with a GPU the default settings take about six minutes.

    python scripts/train_demo_model.py --out src/nvcli/demo
    python scripts/train_demo_model.py --out src/nvcli/demo --evaluate-only --device cpu --eval 5

On one machine the data and the tokenizer follow from `--seed` alone. The weights do so on a CPU and, up to
the order in which GPU kernels add numbers, on a GPU, unless `--max-seconds` cuts the training short.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

import demo_tasks

END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 640
MAX_POSITIONS = 2048
LEAST_ACCURACY = 0.99

# Qwen's split: a digit is a token of its own, a word takes the space before it along.
SPLIT_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

SYSTEM_MESSAGES = ("You are a helpful assistant.", "Answer the question.", "Be brief.")

FORM_WEIGHTS = {"raw": 4, "chat": 4, "dialogue": 2}
"""How a question is put: plain text, one user message, or after a system message and earlier turns."""

TASK_WEIGHTS = {
    "add": 4,
    "subtract": 4,
    "multiply": 4,
    "compare": 2,
    "reverse": 2.5,
    "repeat": 1.5,
    "count": 2.5,
    "lookup": 2.5,
}

EARLIER_TURN_TASKS = ("add", "subtract", "multiply", "compare")


@dataclass(frozen=True, slots=True)
class Bucket:
    """Examples of similar length, padded on the right to one shape."""

    num_tokens: int
    """Width of a batch."""
    batch_size: int
    share: float
    """The part of all training steps that takes its batch from this bucket."""


BUCKETS = (Bucket(40, 1024, 0.5), Bucket(192, 192, 0.25), Bucket(720, 48, 0.25))


# ---- text


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of training text that is tokenized by itself."""

    text: str
    is_answer: bool
    """Whether the model is to produce it, so that it counts in the loss."""


def segments_of(example: demo_tasks.Example, form: str, rng: random.Random) -> list[Segment]:
    """Write out one example in one form, up to and including the end token."""
    if form == "raw":
        # The newline counts as answered, so that a prompt sent without it is answered too.
        return [Segment(example.prompt, False), Segment(f"\n{example.answer}{END_OF_TEXT}", True)]
    segments = []
    for message in conversation_of(example, form, rng):
        if message["role"] == "assistant":
            segments.append(Segment(message["content"] + TURN_END, True))
        else:
            opening = "\n" if segments and segments[-1].is_answer else ""
            text = f"{opening}{TURN_START}{message['role']}\n{message['content']}{TURN_END}\n"
            segments.append(Segment(text, False))
        if message["role"] == "user":
            segments.append(Segment(f"{TURN_START}assistant\n", False))
    return segments


def conversation_of(example: demo_tasks.Example, form: str, rng: random.Random) -> list[dict[str, str]]:
    """The messages of the form "chat" or "dialogue", ending with the assistant's answer."""
    messages = []
    if form == "dialogue":
        if rng.random() < 0.5:
            messages.append({"role": "system", "content": system_message(rng)})
        for _ in range(rng.randint(0, 2)):
            earlier = demo_tasks.sample(rng, rng.choice(EARLIER_TURN_TASKS), "train")
            messages += [*demo_tasks.messages(earlier), {"role": "assistant", "content": earlier.answer}]
    return [*messages, *demo_tasks.messages(example), {"role": "assistant", "content": example.answer}]


def system_message(rng: random.Random) -> str:
    """A usual system message, or words at random, so that the model learns to answer under any."""
    if rng.random() < 0.5:
        return rng.choice(SYSTEM_MESSAGES)
    return " ".join(rng.sample(demo_tasks.WORDS, rng.randint(1, 20)))


def train_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE over the tasks' own text; any other UTF-8 text falls back on bytes and round-trips."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(seed)
    lines = ["user", "assistant", "system", *SYSTEM_MESSAGES] * 1000
    for _ in range(20_000):
        example = demo_tasks.sample(rng, split="train")
        # Line by line, so that no token spans a newline: a prompt with and without it must agree.
        lines += f"{example.prompt}\n{example.answer}".splitlines()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    return tokenizer


def check_rendering(checkpoint: Path, tokenizer: Tokenizer) -> None:
    """The saved tokenizer and chat template must give the very tokens that the model is trained on."""
    saved = AutoTokenizer.from_pretrained(checkpoint)
    rng = random.Random(0)
    for task in demo_tasks.TASKS:
        example = demo_tasks.sample(rng, task)
        for form in FORM_WEIGHTS:
            state = rng.getstate()
            pieces = segments_of(example, form, rng)
            trained_ids = [i for piece in pieces for i in tokenizer.encode(piece.text).ids]
            if form == "raw":
                saved_ids = saved.encode(demo_tasks.raw_prompt(example) + example.answer + END_OF_TEXT)
            else:
                rng.setstate(state)
                conversation = conversation_of(example, form, rng)
                text = saved.apply_chat_template(conversation, tokenize=False).removesuffix("\n")
                saved_ids = saved.encode(text)
            assert saved_ids == trained_ids, (example, form)


# ---- training data


@dataclass(frozen=True, slots=True)
class Shard:
    """Tokenized examples, one after the other."""

    ids: np.ndarray  # [num_tokens] int16
    is_answer: np.ndarray  # [num_tokens] bool
    lengths: np.ndarray  # [num_examples] int64
    tasks: np.ndarray  # [num_examples] int64, index into demo_tasks.TASKS


def make_shard(tokenizer_json: str, split: demo_tasks.Split, num_examples: int, seed: str) -> Shard:
    rng = random.Random(seed)
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tasks = rng.choices(list(TASK_WEIGHTS), list(TASK_WEIGHTS.values()), k=num_examples)
    forms = rng.choices(list(FORM_WEIGHTS), list(FORM_WEIGHTS.values()), k=num_examples)
    ids: list[int] = []
    is_answer: list[bool] = []
    lengths = []
    for task, form in zip(tasks, forms, strict=True):
        start = len(ids)
        for segment in segments_of(demo_tasks.sample(rng, task, split), form, rng):
            segment_ids = tokenizer.encode(segment.text).ids
            ids += segment_ids
            is_answer += [segment.is_answer] * len(segment_ids)
        lengths.append(len(ids) - start)
    return Shard(
        np.array(ids, dtype=np.int16),
        np.array(is_answer, dtype=bool),
        np.array(lengths),
        np.array([demo_tasks.TASKS.index(task) for task in tasks]),
    )


def make_shards(
    tokenizer: Tokenizer, split: demo_tasks.Split, num_examples: int, seed: int, shard_size: int = 10_000
) -> list[Shard]:
    """Make examples in processes; which process makes which shard has no influence on its content."""
    sizes = [min(shard_size, num_examples - start) for start in range(0, num_examples, shard_size)]
    seeds = [f"{seed} {split} {index}" for index in range(len(sizes))]
    # Forked, not spawned: the children need not import torch and transformers anew.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("fork")) as executor:
        return list(executor.map(make_shard, [tokenizer.to_str()] * len(sizes), [split] * len(sizes), sizes, seeds))


@dataclass(frozen=True, slots=True)
class Pool:
    """All examples of one bucket, on the training device."""

    ids: torch.Tensor  # [num_examples, bucket.num_tokens] int16, zeros on the right
    is_answer: torch.Tensor  # [num_examples, bucket.num_tokens] bool
    tasks: torch.Tensor  # [num_examples] int64


def make_pools(shards: list[Shard], device: torch.device) -> list[Pool]:
    """Sort examples into the narrowest bucket that holds them."""
    lengths = np.concatenate([shard.lengths for shard in shards])
    tasks = np.concatenate([shard.tasks for shard in shards])
    ids = np.concatenate([shard.ids for shard in shards])
    is_answer = np.concatenate([shard.is_answer for shard in shards])
    starts = np.cumsum(lengths) - lengths
    assert lengths.max() <= BUCKETS[-1].num_tokens, lengths.max()
    pools = []
    shortest = 0
    for bucket in BUCKETS:
        (chosen,) = np.nonzero((lengths > shortest) & (lengths <= bucket.num_tokens))
        shortest = bucket.num_tokens
        inside = np.arange(bucket.num_tokens) < lengths[chosen, None]
        rows, columns = np.nonzero(inside)
        source = starts[chosen][rows] + columns
        padded_ids = np.zeros(inside.shape, np.int16)
        padded_ids[rows, columns] = ids[source]
        padded_is_answer = np.zeros(inside.shape, bool)
        padded_is_answer[rows, columns] = is_answer[source]
        pools.append(
            Pool(
                torch.from_numpy(padded_ids).to(device),
                torch.from_numpy(padded_is_answer).to(device),
                torch.from_numpy(tasks[chosen]).to(device),
            )
        )
    return pools


# ---- training


def model_config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=7,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        tie_word_embeddings=True,
        attention_bias=False,
        eos_token_id=SPECIAL_TOKENS.index(TURN_END),
        pad_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
    )


def batch_losses(
    model: Qwen3ForCausalLM, ids: torch.Tensor, is_answer: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of one batch, and per example whether greedy decoding would give the whole answer."""
    ids = ids.long()
    # The batch is padded on the right, so causal attention alone hides the padding; naming the masks
    # keeps transformers from building one and lets attention take its fastest kernel.
    logits = model(input_ids=ids, attention_mask={"full_attention": None}, use_cache=False).logits
    logits, targets, is_target = logits[:, :-1].float(), ids[:, 1:], is_answer[:, 1:]
    token_losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    # Between "every token counts the same" and "every example counts the same": a long answer has many
    # easy tokens, and must not drown a short one.
    weights = is_target / is_target.sum(1, keepdim=True).sqrt()
    is_right = ((logits.argmax(-1) == targets) | ~is_target).all(1)
    return (token_losses * weights).sum() / weights.sum(), is_right


def train(
    model: Qwen3ForCausalLM,
    pools: list[Pool],
    heldout_pools: list[Pool],
    num_steps: int,
    max_seconds: float,
    peak_learning_rate: float,
    seed: int,
) -> None:
    """AdamW with a warm-up and a cosine that ends at `num_steps` or `max_seconds`, whichever comes first."""
    device = model.device
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
        fused=device.type == "cuda",
    )
    if device.type == "cuda":
        for layer in model.model.layers:
            layer.compile(dynamic=False)  # one small graph for all layers: quick to compile
    order = random.Random(seed)
    generator = torch.Generator(device).manual_seed(seed)
    start = time.monotonic()
    recent_loss = torch.zeros((), device=device)
    report_every = min(1000, num_steps)
    for step in range(num_steps):
        progress = max(step / num_steps, (time.monotonic() - start) / max_seconds)
        if progress >= 1:
            print(f"stopped by --max-seconds at step {step}")
            break
        warmup = min(1.0, (step + 1) / 500)
        learning_rate = peak_learning_rate * warmup * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        (index,) = order.choices(range(len(BUCKETS)), [bucket.share for bucket in BUCKETS])
        pool = pools[index]
        rows = torch.randint(len(pool.ids), (BUCKETS[index].batch_size,), device=device, generator=generator)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss, _ = batch_losses(model, pool.ids[rows], pool.is_answer[rows])
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        recent_loss += loss.detach()
        if (step + 1) % report_every == 0:
            seconds = time.monotonic() - start
            print(
                f"step {step + 1} of {num_steps}, {seconds:.0f} s, "
                f"{1000 * seconds / (step + 1):.1f} ms/step, learning rate {learning_rate:.1e}, "
                f"loss {recent_loss.item() / report_every:.4f}, "
                f"held-out {heldout_line(model, heldout_pools)}",
                flush=True,
            )
            recent_loss.zero_()


def heldout_line(model: Qwen3ForCausalLM, pools: list[Pool]) -> str:
    """Per task, how many held-out examples greedy decoding would get right: a glance, not the evaluation."""
    right = torch.zeros(len(demo_tasks.TASKS), device=model.device)
    total = torch.zeros_like(right)
    for bucket, pool in zip(BUCKETS, pools, strict=True):
        # The shape and the gradient mode of training, so that nothing is compiled anew.
        rows = torch.arange(bucket.batch_size, device=model.device) % len(pool.ids)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=model.device.type == "cuda"):
            _, is_right = batch_losses(model, pool.ids[rows], pool.is_answer[rows])
        right.index_add_(0, pool.tasks[rows], is_right.float())
        total.index_add_(0, pool.tasks[rows], torch.ones_like(is_right, dtype=torch.float))
    shares = (right / total.clamp(min=1)).tolist()
    return " ".join(f"{task} {share:.3f}" for task, share in zip(demo_tasks.TASKS, shares, strict=True))


# ---- checkpoint


def save_tokenizer(tokenizer: Tokenizer, out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=END_OF_TEXT,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(out)


def save_model(model: Qwen3ForCausalLM, out: Path) -> None:
    """Write config.json, generation_config.json and model.safetensors, in bfloat16."""
    model.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[SPECIAL_TOKENS.index(TURN_END), SPECIAL_TOKENS.index(END_OF_TEXT)],
        pad_token_id=SPECIAL_TOKENS.index(END_OF_TEXT),
    )
    model.to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)  # written for its owner alone, but shipped to all


def save_examples(out: Path) -> None:
    """Write example.jsonl, the demo's input: held-out questions in both forms, with the right answers."""
    rng = random.Random(991)  # a mixture of short and long ones
    other_tasks = [task for task in demo_tasks.TASKS if task != "lookup"]
    examples = [demo_tasks.sample(rng, task, "heldout") for task in other_tasks for _ in range(3)]
    examples += demo_tasks.sample_lookups(rng, num_questions=4, num_pairs=60)
    with (out / "example.jsonl").open("w", encoding="utf-8") as file:
        for number, example in enumerate(examples):
            row: dict[str, Any] = {"id": f"{example.task}-{number + 1}"}
            if number % 2 == 0:
                row["prompt"] = demo_tasks.raw_prompt(example)
            else:
                row["messages"] = demo_tasks.messages(example)
            file.write(json.dumps({**row, "expected": example.answer}) + "\n")


# ---- evaluation


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to one held-out prompt."""

    example: demo_tasks.Example
    form: str
    text: str
    """The text of the answer, without the end token."""
    is_right: bool
    """The answer is right and is followed by the form's own end token."""
    margin: float
    """Smallest lead of the chosen token's logit over the next best one's, over the answer's tokens."""


def evaluate(
    checkpoint: Path,
    device: torch.device,
    dtype: torch.dtype,
    num_prompts: int,
    seed: int,
    batch_size: int = 512,
) -> Iterator[Outcome]:
    """Answer `num_prompts` held-out prompts of each task and form with transformers' greedy `generate`."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint, padding_side="left")
    rng = random.Random(f"{seed} evaluate")
    questions = []
    for form in FORM_WEIGHTS:
        for task in demo_tasks.TASKS:
            for _ in range(num_prompts):
                example = demo_tasks.sample(rng, task, "heldout")
                if form == "raw":
                    text = demo_tasks.raw_prompt(example)
                else:
                    conversation = conversation_of(example, form, rng)[:-1]
                    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
                questions.append((example, form, text))
    questions.sort(key=lambda question: (len(question[0].answer), len(question[2])))
    for start in range(0, len(questions), batch_size):
        batch = questions[start : start + batch_size]
        inputs = tokenizer([text for _, _, text in batch], padding=True, return_tensors="pt").to(device)
        num_new_tokens = max(len(tokenizer.encode(example.answer)) for example, _, _ in batch) + 2
        output = model.generate(
            **inputs,
            max_new_tokens=num_new_tokens,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        new_ids = output.sequences[:, inputs.input_ids.shape[1] :].tolist()
        best = [logits.float().topk(2).values for logits in output.logits]
        margins = torch.stack([pair[:, 0] - pair[:, 1] for pair in best], dim=1).tolist()
        for (example, form, _), row_ids, row_margins in zip(batch, new_ids, margins, strict=True):
            end_id = SPECIAL_TOKENS.index(END_OF_TEXT if form == "raw" else TURN_END)
            length = row_ids.index(end_id) if end_id in row_ids else len(row_ids)
            text = tokenizer.decode(row_ids[:length])
            is_right = end_id in row_ids and demo_tasks.check(example, text)
            yield Outcome(example, form, text, is_right, min(row_margins[: length + 1]))


def report(outcomes: Iterable[Outcome], title: str, num_wrong_shown: int = 5) -> bool:
    """Print the figures; return whether every task in every form reached `LEAST_ACCURACY`."""
    outcomes = list(outcomes)
    print(f"\n{title}: {len(outcomes)} held-out prompts; share right; smallest and 1st-percentile logit margin")
    reached = True
    for task in (*demo_tasks.TASKS, "all"):
        cells = []
        of_task = [outcome for outcome in outcomes if task in (outcome.example.task, "all")]
        for form in FORM_WEIGHTS:
            verdicts = [outcome.is_right for outcome in of_task if outcome.form == form]
            share = sum(verdicts) / len(verdicts)
            reached &= share >= LEAST_ACCURACY
            cells.append(f"{form} {share:7.2%}")
        margins = sorted(outcome.margin for outcome in of_task)
        cells.append(f"margin {margins[0]:5.2f} {margins[len(margins) // 100]:5.2f}")
        print(f"  {task:9} " + "   ".join(cells))
    right = sum(outcome.is_right for outcome in outcomes)
    print(f"  {title}: {right} of {len(outcomes)} right, {right / len(outcomes):.3%}")
    for outcome in [outcome for outcome in outcomes if not outcome.is_right][:num_wrong_shown]:
        print(f"  wrong ({outcome.form}): {outcome.example} got {outcome.text!r}")
    return reached


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=20_000, help="training steps at most")
    parser.add_argument("--max-seconds", type=float, default=math.inf, help="training time at most")
    parser.add_argument("--examples", type=int, default=1_500_000, help="training examples to make")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--eval", type=int, default=200, help="held-out prompts per task and form")
    parser.add_argument("--evaluate-only", action="store_true", help="judge the checkpoint that is in --out")
    args = parser.parse_args()
    disable_progress_bar()
    device = torch.device(args.device)
    start = time.monotonic()

    if not args.evaluate_only:
        args.out.mkdir(parents=True, exist_ok=True)
        tokenizer = train_tokenizer(args.seed)
        save_tokenizer(tokenizer, args.out)
        shards = make_shards(tokenizer, "train", args.examples, args.seed)
        heldout_shards = make_shards(tokenizer, "heldout", 10_000, args.seed)
        torch.manual_seed(args.seed)
        model = Qwen3ForCausalLM(model_config()).to(device)
        pools = make_pools(shards, device)
        num_tokens = sum(shard.lengths.sum() for shard in shards)
        print(f"{model.num_parameters():,} parameters")
        sizes = [len(pool.ids) for pool in pools]
        print(f"{args.examples:,} examples, {num_tokens:,} tokens, {sizes} of them in the buckets")
        print(f"{time.monotonic() - start:.0f} s until training", flush=True)
        heldout_pools = make_pools(heldout_shards, device)
        train(model, pools, heldout_pools, args.steps, args.max_seconds, args.learning_rate, args.seed)
        save_model(model, args.out)
        save_examples(args.out)
        check_rendering(args.out, tokenizer)

    print(f"model.safetensors: {(args.out / 'model.safetensors').stat().st_size:,} bytes")
    reached = True
    for dtype in (torch.float32, torch.bfloat16) if device.type == "cuda" else (torch.float32,):
        outcomes = evaluate(args.out, device, dtype, args.eval, args.seed)
        reached &= report(outcomes, f"{dtype} on {device.type}".removeprefix("torch."))
    print(f"{time.monotonic() - start:.0f} s in all")
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
