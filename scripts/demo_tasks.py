"""The tasks of the built-in model: questions with one right answer each.

Owns the task generators, the train/held-out split and the check. Everything is a function of the
`random.Random` that the caller hands in, so a seed fixes the examples. A prompt belongs to exactly one
split, decided by a hash of its first line: the training script draws from "train" only, so a held-out
prompt is one that the model has never seen. Knows no tokenizer, no model and no torch; tests import it
by path.

A prompt is put to the model in one of two forms, answered with the same text:

- raw: `raw_prompt(example)`, the question and a newline; the answer ends with `<|endoftext|>`;
- chat: `messages(example)`, one user message; the answer ends with `<|im_end|>`.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "heldout"]

HELDOUT_ONE_IN = 10  # one prompt in ten is held out

_WORD_LIST = (
    "apple arm bag ball band bank barn bath bean bear bed bell bird boat book box boy bread bus cake camp "
    "car card cat chair city clay coat corn cow cup desk dog door duck egg farm fish flag fork fox frog "
    "game gate girl goat gold hat hill home horn king kite lake lamp leaf lion map milk moon mouse mud "
    "nail nest net oak pan park pen pig pipe plum pond queen rain rice ring road rock rope rose sand seed "
    "ship shoe shop silk sink snow soap song star sun tent tree wall wheel wind wolf wood"
)
WORDS = tuple(_WORD_LIST.split())


@dataclass(frozen=True, slots=True)
class Example:
    """One question and its only right answer."""

    task: str
    """A name from `TASKS`."""
    prompt: str
    """The question as a human would type it, without the trailing newline of the raw form."""
    answer: str
    """The answer alone, without white space around it or an end token."""


def split_of(prompt: str) -> Split:
    """The split of this prompt: the same on every machine, and for all questions about one list."""
    first_line = prompt.partition("\n")[0]
    return "heldout" if zlib.crc32(first_line.encode()) % HELDOUT_ONE_IN == 0 else "train"


def sample(rng: random.Random, task: str | None = None, split: Split = "train") -> Example:
    """Draw one example of `split`; of any task, each as likely as the next, where `task` is None."""
    generate = _GENERATORS[rng.choice(TASKS) if task is None else task]
    while True:
        example = generate(rng)
        if split_of(example.prompt) == split:
            return example


def sample_lookups(rng: random.Random, num_questions: int, num_pairs: int, split: Split = "heldout") -> list[Example]:
    """Draw several `lookup` examples about one list, so that their prompts share all but the last words.

    `num_questions` different keys are asked; at most `num_pairs`, itself at most `len(WORDS)`.
    """
    if not 0 < num_questions <= num_pairs <= len(WORDS):
        raise ValueError(f"need 0 < num_questions <= num_pairs <= {len(WORDS)}")
    while True:
        pairs = _lookup_pairs(rng, num_pairs)
        examples = [_lookup(pairs, key) for key in rng.sample(list(pairs), num_questions)]
        if split_of(examples[0].prompt) == split:
            return examples


def raw_prompt(example: Example) -> str:
    """The prompt to continue, without a chat template."""
    return example.prompt + "\n"


def messages(example: Example) -> list[dict[str, str]]:
    """The prompt as a conversation, for the chat template."""
    return [{"role": "user", "content": example.prompt}]


def check(example: Example, text: str) -> bool:
    """Whether `text`, as generated without its end token, is the right answer; outer white space is free."""
    return text.strip() == example.answer


def _number(rng: random.Random) -> int:
    """A number up to three digits, the longer ones more often because there are more of them."""
    return rng.randint(0, rng.choice((9, 99, 99, 999, 999, 999)))


def _add(rng: random.Random) -> Example:
    left, right = _number(rng), _number(rng)
    return Example("add", f"What is {left} + {right}?", str(left + right))


def _subtract(rng: random.Random) -> Example:
    right, left = sorted((_number(rng), _number(rng)))
    return Example("subtract", f"What is {left} - {right}?", str(left - right))


def _multiply(rng: random.Random) -> Example:
    factors = [rng.randint(2, 9), rng.randint(2, 99)]
    rng.shuffle(factors)
    prompt = f"What is {factors[0]} {rng.choice(('*', 'times'))} {factors[1]}?"
    return Example("multiply", prompt, str(factors[0] * factors[1]))


def _compare(rng: random.Random) -> Example:
    left, right = _number(rng), _number(rng)
    while right == left:
        right = _number(rng)
    word, answer = rng.choice((("larger", max(left, right)), ("smaller", min(left, right))))
    return Example("compare", f"Which is {word}, {left} or {right}?", str(answer))


def _reverse(rng: random.Random) -> Example:
    words = rng.sample(WORDS, rng.randint(3, 12))
    return Example("reverse", f"Reverse these words: {' '.join(words)}", " ".join(reversed(words)))


def _repeat(rng: random.Random) -> Example:
    words = " ".join(rng.sample(WORDS, rng.randint(5, 90)))
    return Example("repeat", f"Repeat these words: {words}", words)


def _count(rng: random.Random) -> Example:
    low = rng.randint(0, rng.choice((99, 900)))
    high = low + rng.randint(3, 99)
    start, end = rng.choice(((low, high), (low, high), (high, low)))
    step = 1 if end > start else -1
    numbers = " ".join(str(number) for number in range(start, end + step, step))
    return Example("count", f"Count from {start} to {end}.", numbers)


def _lookup_pairs(rng: random.Random, num_pairs: int) -> dict[str, int]:
    return {word: rng.randint(1, 999) for word in rng.sample(WORDS, num_pairs)}


def _lookup(pairs: dict[str, int], key: str) -> Example:
    listing = "; ".join(f"{word}={value}" for word, value in pairs.items())
    return Example("lookup", f"{listing}\nWhat is {key}?", str(pairs[key]))


def _random_lookup(rng: random.Random) -> Example:
    pairs = _lookup_pairs(rng, rng.randint(6, len(WORDS)))
    return _lookup(pairs, rng.choice(list(pairs)))


_GENERATORS: dict[str, Callable[[random.Random], Example]] = {
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "compare": _compare,
    "reverse": _reverse,
    "repeat": _repeat,
    "count": _count,
    "lookup": _random_lookup,
}

TASKS = tuple(_GENERATORS)
