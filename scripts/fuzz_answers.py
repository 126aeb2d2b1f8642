"""Throws hostile texts at what takes answers apart: every format of tool calls and of thoughts.

    python scripts/fuzz_answers.py --texts 100000         # texts of each format

Texts are calls and thoughts of the format that are mutated (cut, doubled, mixed, nested and repeated twenty thousand
times), or put together from its marks, from JSON, Python and XML. Each is read as the answer to a conversation with
tools, through the tokens of a vocabulary that has every mark as a token. Nothing may be raised or take longer than five
seconds, the calls that are found must have arguments that are JSON, and the answer must become a line of the output.
The first text that breaks this ends the loop, with the text. What is printed for each format: the texts, the calls that
were found, the texts that were meant as calls and are none, those with a thought, and the time of the slowest.
"""

from __future__ import annotations

import json
import random
import time
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fuzzing import load_data, make_parser
from nvcli.job.job import Choice
from nvcli.job.text.answer_reader import AnswerFormat, AnswerReader, ParsedAnswer, tool_calls_of
from nvcli.job.text.call_grammars import HARMONY, TOOL_FORMATS
from nvcli.job.text.reasoning import REASONING_FORMATS, PromptState
from nvcli.job.text.tokenizer import Tokenizer
from row_maker import SPELLED, TEXTS

DATA = load_data("answers")
CALLS: dict[str, str] = DATA["calls"]
"""A text with calls of each format."""
THOUGHTS: tuple[str, ...] = (DATA["thought"],)
THOUGHTS += tuple(f"{form.start}so{form.end}yes" for form in REASONING_FORMATS.values() if form.start)
PARTS = (*DATA["parts"], "0x" + "f" * 5000, "9" * 5000)
STATES = (PromptState.OPEN, PromptState.LEFT, PromptState.CLOSED)
MOST_LEVELS = 20_000
MOST_SECONDS = 5.0
"""Processor time for one text: all other answers wait meanwhile."""

KINDS = {"at": "string", "far": "integer", "deep": "object", "sure": ["boolean", "string"], "odd": 5}
PARAMETERS = {"type": "object", "properties": {key: {"type": kind} for key, kind in KINDS.items()}}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "wait"}},
]


@dataclass(slots=True)
class Count:
    """The outcomes of the texts of one format."""

    texts: int = 0
    calls: int = 0
    problems: int = 0
    thoughts: int = 0
    slowest: float = 0.0


class TextMaker:
    """Makes hostile texts of one format."""

    def __init__(self, rng: random.Random, sample: str) -> None:
        """`sample` is a text as the format has it."""
        self._rng = rng
        self._samples = (sample, sample, *CALLS.values(), *THOUGHTS)
        self._parts = (*PARTS, *TEXTS, *SPELLED, *load_data("rows")["wrong"], *CALLS.values(), *THOUGHTS)
        self._parts += tuple(mark for mark in marks() if mark in sample) * 4

    def text(self) -> str:
        """Return the next text."""
        kind = self._rng.random()
        if kind < 0.02:
            return self._nested()
        if kind < 0.5:
            return self._mutated(self._rng.choice(self._samples[: 3 if kind < 0.3 else None]))
        return "".join(self._rng.choices(self._parts, k=self._rng.randrange(1, 15)))

    def _mutated(self, text: str) -> str:
        rng = self._rng
        for _ in range(rng.randrange(5)):
            at, end = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
            end = min(end, at + rng.choice((0, 1, 3, 1000)))
            middle = rng.choice(("", text[at:end] * 2, rng.choice(self._parts), chr(rng.randrange(0xD800))))
            text = text[:at] + middle + text[end:]
        return text

    def _nested(self) -> str:
        """Put one text many times into another."""
        rng = self._rng
        levels = rng.choice((50, 400, 990, 1000, 1100, 2000, 2000, MOST_LEVELS))
        opening = rng.choice(DATA["opening"])
        deep = opening * levels + rng.choice(("", "1", "}" * levels, "]" * levels, ")" * levels, "]})" * levels))
        text = rng.choice(self._samples[:3])
        for value in ("3", '"x"', "{}"):
            if value in text and rng.random() < 0.7:
                return text.replace(value, deep, 1)
        at = rng.randrange(len(text) + 1)
        return text[:at] + deep + text[at:]


def marks() -> Iterator[str]:
    """Yield the marks of all formats."""
    yield from DATA["marks"]
    yield from (mark for form in REASONING_FORMATS.values() for mark in (form.start, form.end) if mark)


def make_tokenizer() -> Tokenizer:
    """Make a tokenizer in which each byte is a token, and so is each mark; half of the marks do not show in text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.add_special_tokens([mark for mark in marks() if "|" in mark or "[" in mark])
    backend.add_tokens([*marks()])
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, chat_template="{{ messages }}"))


class Fuzzer:
    """Reads texts as answers in one format."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random, *, reasoning: str, tools: str) -> None:
        """`reasoning` and `tools` are the values of `job.reasoning_parser` and `job.tool_parser`."""
        self._tokenizer = tokenizer
        self._rng = rng
        self.reader = AnswerReader(tokenizer, reasoning_parser=reasoning, tool_parser=tools)
        form = REASONING_FORMATS.get(reasoning)
        thought = next(
            (each for each in THOUGHTS if form is not None and form.start and form.start in each), THOUGHTS[0]
        )
        self._maker = TextMaker(rng, CALLS.get(tools, thought))
        self.count = Count()

    def read_next(self) -> None:
        """Read one text. Raises AssertionError, with the text, where that raises or gives what is no answer."""
        text = self._maker.text()
        ids, ending = self.encode(text)
        reading = AnswerFormat(
            reader=self.reader, state=self._rng.choice(STATES), tools=self._rng.choice((TOOLS, TOOLS, ()))
        )
        shows = bool(len(ids) % 2)
        read = partial(self.reader.read, ids, reading, text_before_stop=ending, skip_special_tokens=not shows)
        started = time.perf_counter()
        try:
            self._check(read())
        except BaseException as error:
            raise AssertionError(
                f"{type(error).__name__}: {error}\n  state: {reading.state}\n  text: {text!r}"[:5000]
            ) from error
        self.count.texts += 1
        seconds = time.perf_counter() - started
        if seconds > MOST_SECONDS:  # or so busy was the machine
            started = time.process_time()
            read()
            seconds = time.process_time() - started
        assert seconds < MOST_SECONDS, f"{seconds:.1f} s\n  text: {text[:2000]!r}"
        self.count.slowest = max(self.count.slowest, seconds)

    def encode(self, text: str) -> tuple[array[int], str | None]:
        """Return the tokens of a text, some of them at random, and the text itself where a stop string has cut it."""
        (ids,) = self._tokenizer.encode([text], add_special_tokens=False)
        assert isinstance(ids, list)
        tokens = array("i", ids)
        if self._rng.random() < 0.1:  # bytes that are no text
            for _ in range(self._rng.randrange(5)):
                tokens.insert(self._rng.randrange(len(tokens) + 1), self._rng.randrange(256))
        if self._rng.random() < 0.9:
            return tokens, None
        whole = self._tokenizer.decode_one(tokens)
        return tokens, whole[: self._rng.randrange(len(whole) + 1)]

    def _check(self, answer: ParsedAnswer) -> None:
        calls = tool_calls_of(answer.calls, b"prompt", 0)
        for call in calls:
            assert isinstance(json.loads(call.function.arguments), dict), call
        choice = Choice(
            index=0,
            text=answer.text,
            finish_reason="stop",
            reasoning_content=answer.reasoning,
            tool_calls=calls,
            tool_call_error=answer.problem,
        )
        msgspec.json.encode(choice)
        self.count.calls += len(calls)
        self.count.problems += bool(answer.problem)
        self.count.thoughts += answer.reasoning is not None


def fuzz_all(num_texts: int, seed: int, only: Sequence[str] = ()) -> Iterator[tuple[str, Count]]:
    """Read so many texts in each format, and yield its name and what became of them."""
    tokenizer = make_tokenizer()
    pairs = [("none", name) for name in TOOL_FORMATS] + [(name, "none") for name in REASONING_FORMATS]
    for reasoning, tools in [*pairs, (HARMONY, HARMONY), ("think", "hermes")]:
        if only and not {reasoning, tools}.intersection(only):
            continue
        fuzzer = Fuzzer(tokenizer, random.Random(f"{seed} {reasoning} {tools}"), reasoning=reasoning, tools=tools)
        for _ in range(num_texts):
            fuzzer.read_next()
        yield f"{reasoning} {tools}", fuzzer.count


def main() -> None:
    parser = make_parser(__doc__, "--texts", 100_000)
    parser.add_argument("--only", nargs="+", metavar="FORMAT", default=[], help="formats of calls or of thoughts")
    options = parser.parse_args()
    started = time.monotonic()
    print(f"{'thoughts, calls':<22} {'texts':>9} {'calls':>9} {'no calls':>9} {'thoughts':>9} {'slowest':>9}")
    for name, count in fuzz_all(options.texts, options.seed, options.only):
        numbers = f"{count.texts:>9,} {count.calls:>9,} {count.problems:>9,} {count.thoughts:>9,}"
        print(f"{name:<22} {numbers} {1000 * count.slowest:>6.0f} ms", flush=True)
    print(f"nothing was raised; {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
