"""Answers jobs of mutated rows, and compares each output row with what the format's documentation asks for.

    python scripts/fuzz_rows.py --rows 100000             # in this process, with an engine that does nothing
    python scripts/fuzz_rows.py --rows 2000 --command     # with the real command and the built-in model on a CPU

Rows are made as structures (native and OpenAI rows, good and bad) and then mutated: keys and values, spellings of the
JSON, and bytes. Jobs differ in their settings, some are cut short and continued. `row_oracle.py` says what must become
of each row. A difference, an exception, a job that takes longer than `--timeout` seconds, or memory that grows ends the
loop, with the row in question. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench_pipeline import NullEngine, Silent
from nvcli.config import EngineConfig, JobConfig, RunConfig
from nvcli.demo import demo_path
from nvcli.engine.request import Request, RequestOutput
from nvcli.job_run.generate import generate
from nvcli.jobs.compression import Unpacker, compression_of
from nvcli.messages import TokenLogprobs, unpack
from nvcli.sampling_params import SamplingParams
from row_oracle import CHAT, COMPLETION, JobFacts, Oracle, check, error_of, index_of

VOCAB_SIZE = 640
"""Of the built-in model."""
MAX_GROWTH_BYTES = 64 * 1024 * 1024
"""Memory may grow by so much after the first fifth of the rows: the allocators' own play."""


class Verbatim(str):
    """JSON text that stands for itself."""


TEXTS = ("", "a", "What is 2 + 2?", "ü😀\u2028", "<|im_end|>", "\\u0041", "x" * 300, "\x7f\x80", '"}{[', "NaN", "user")
NUMBERS = (0, 1, -1, 2, 7, 639, 640, 1024, 1025, 0.5, 1.5, -0.5, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 10**30)
SPELLED = ("1e999", "-1e999", "9" * 500, "9" * 5000, "1.0", "1e2", "-0", "-0.0", "0.1e-400", "1.10", "1E+2", "[ ]")
WRONG = (
    "NaN",
    "Infinity",
    "01",
    "1.",
    "+1",
    "'a'",
    '"\\ud800"',
    '"\\udc00\\ud800"',
    '"\t"',
    '"\\x"',
    "tru",
    "",
    "[1,]",
)
LARGE = ("[" + "{}," * 10_000 + "{}]", '"' + "y" * 100_000 + '"', '"' + "\\n[" * 3000 + '"')
SAMPLING: dict[str, tuple[Any, ...]] = {
    "max_tokens": (None, 1, 8, 40, 0, -1, 100000, "8", True, 8.0),
    "temperature": (0, 0.7, 1, 100, 100.5, -0.1, "1", True, None),
    "top_p": (1, 0.5, 0, 1.01, None),
    "top_k": (-1, 0, 5, -2, 1.0, 2**63),
    "min_p": (0, 0.1, 1, 1.5),
    "seed": (0, 7, 2**63 - 1, -1, 2**63, None, True),
    "n": (1, 2, 3, 0, 1025, 1.0, None),
    "stop": ("x", ["x", "yz"], [], "", ["x", ""], [1], None, {}),
    "stop_token_ids": ([], [3], [640], [-1], ["3"], 3),
    "min_tokens": (0, 1, 5, 2000, -1),
    "ignore_eos": (True, False, 1, "true"),
    "presence_penalty": (-2, 2, 0.5, 2.5, "0"),
    "frequency_penalty": (-2, 2, 0.5, -2.5),
    "repetition_penalty": (1, 1.2, 100, 0, 101),
    "logit_bias": ({}, {"5": 1}, {"5": -100, "6": 100.0}, {"5": 101}, {"x": 1}, {"640": 1}, {"-1": 1}, {"5": None}, []),
    "logprobs": (None, 0, 3, 20, 21, True),
    "return_token_ids": (True, False, 1),
}


class RowMaker:
    """Makes mutated rows. What they mean is for the oracle to say."""

    def __init__(self, rng: random.Random, facts: JobFacts) -> None:
        self._rng = rng
        self._facts = facts

    def lines(self, count: int) -> Iterator[bytes]:
        """Yield so many lines, some of them blank."""
        rng = self._rng
        for number in range(count):
            if rng.random() < 0.03:
                yield rng.choice(
                    [b"", b" \t", b"\r", b"\xef\xbb\xbf", b"null", b"[]", b'"text"', b"3", b"{}", b"[[1]]"]
                )
                continue
            line = self._spell(self._row(number)).encode(errors="surrogatepass")
            if rng.random() < 0.04:
                line = self._mutate_bytes(line)
            yield line + rng.choice([b"", b"", b"", b"\r", b"  "])

    def _row(self, number: int) -> Any:
        rng = self._rng
        pairs = self._openai(number) if rng.random() < 0.35 else self._native(number)
        for _ in range(rng.choice((0, 0, 0, 0, 0, 1, 1, 2))):
            self._mutate(pairs)
        return pairs

    def _native(self, number: int) -> list[tuple[str, Any]]:
        rng, facts = self._rng, self._facts
        kind = rng.randrange(5)
        pairs: list[tuple[str, Any]] = []
        if kind < 2:
            pairs.append((facts.prompt_key, self._prompt()))
        elif kind < 4:
            pairs.append((facts.messages_key, self._messages()))
        else:
            pairs.append(
                ("prompt_token_ids", [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((1, 3, 30, 90, 300)))])
            )
        if rng.random() < 0.7:
            pairs.append((facts.id_key, self._id(number)))
        if rng.random() < 0.5:
            pairs.append(("sampling", self._sampling([*SAMPLING])))
        if rng.random() < 0.3:
            pairs.append((rng.choice(("topic", "topic", "", "ü", "url", "body", "custom_id")), self._value()))
        rng.shuffle(pairs)
        return pairs

    def _openai(self, number: int) -> list[tuple[str, Any]]:
        rng = self._rng
        url = rng.choice((CHAT, COMPLETION))
        names = [name for name in SAMPLING if name not in ("return_token_ids", "logprobs")]
        body: list[tuple[str, Any]] = [*self._sampling(names)] if rng.random() < 0.7 else []
        body.append(("model", "m"))
        if url == CHAT:
            body.append(("messages", self._messages()))
            if rng.random() < 0.2:
                body += [("logprobs", rng.choice((True, False, 1))), ("top_logprobs", rng.choice((None, 0, 3, 20, 21)))]
            if rng.random() < 0.2:
                body.append(("max_completion_tokens", rng.choice((8, 3, None, 0))))
        else:
            odd = ([1, 2, 3], [self._prompt()], [[4, 5]], ["a", "b"], [], [[]])
            prompt = self._prompt() if rng.random() < 0.7 else rng.choice(odd)
            body.append(("prompt", prompt))
        if rng.random() < 0.1:
            extra = rng.choice(("user", "metadata", "store", "stream", "tools", "response_format", "echoes", "audio"))
            body.append((extra, rng.choice((None, False, [], {"type": "text"}, True, [{}], "x"))))
        pairs: list[tuple[str, Any]] = [("custom_id", f"c{number}" if rng.random() < 0.9 else self._id(number))]
        pairs += [("method", "POST"), ("url", url), ("body", body)]
        return pairs

    def _prompt(self) -> str:
        rng = self._rng
        if rng.random() < 0.5:
            return f"What is {rng.randrange(50)} + {rng.randrange(50)}?"
        return rng.choice(TEXTS) * rng.choice((1, 1, 1, 5))

    def _messages(self) -> list[Any]:
        rng = self._rng
        messages: list[Any] = [{"role": rng.choice(("user", "system", "")), "content": self._prompt()}]
        if rng.random() < 0.2:
            odd = (
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": self._prompt()}]},
                {"role": "user", "content": [], "name": "n"},
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "assistant", "content": None},
                {"role": 1, "content": "a"},
                {"content": "a"},
                {"role": "user", "content": [{"type": "image_url"}]},
                {"role": "user", "content": 3},
                "a",
            )
            messages.append(rng.choice(odd))
        return messages

    def _sampling(self, names: Sequence[str]) -> list[tuple[str, Any]]:
        rng = self._rng
        chosen = rng.sample(names, rng.choice((0, 1, 1, 2, 3, 6)))
        # The first values of each key are sound ones.
        return [(name, SAMPLING[name][int(len(SAMPLING[name]) * rng.random() ** 4)]) for name in chosen]

    def _id(self, number: int) -> Any:
        rng = self._rng
        if rng.random() < 0.85:
            return f"r{number}"
        return rng.choice((f"r{rng.randrange(100)}", number + 1, rng.randrange(500), self._value()))

    def _value(self, depth: int = 0) -> Any:
        """Any JSON; now and then it is deep, large, or no JSON at all."""
        rng = self._rng
        kind = rng.random()
        if kind < 0.25:
            return rng.choice(TEXTS)
        if kind < 0.5:
            return rng.choice(NUMBERS)
        if kind < 0.65:
            return rng.choice((None, True, False))
        if kind < 0.75:
            return Verbatim(rng.choice(SPELLED))
        if kind < 0.76:
            return Verbatim(rng.choice(WRONG))
        if kind < 0.77:
            levels = rng.choice((3, 398, 399, 400, 401, 5000))
            return Verbatim(rng.choice(("[" * levels + "]" * levels, '{"[":' * levels + "1" + "}" * levels)))
        if kind < 0.773:
            return Verbatim(rng.choice(LARGE))
        if depth > 3:
            return []
        if kind < 0.9:
            return [self._value(depth + 1) for _ in range(rng.randrange(4))]
        return [(rng.choice(TEXTS), self._value(depth + 1)) for _ in range(rng.randrange(1, 4))]

    def _mutate(self, pairs: list[tuple[str, Any]]) -> None:
        rng = self._rng
        at = rng.randrange(len(pairs)) if pairs else 0
        what = rng.randrange(7)
        facts = self._facts
        names = (
            *(facts.prompt_key, facts.messages_key, "prompt_token_ids", facts.id_key, "sampling"),
            *("custom_id", "url", "body", "method", "index", "choices", "error", "usage", "response", "id", "topic"),
        )
        if what == 0 and pairs:
            del pairs[at]
        elif what == 1 and pairs:
            pairs[at] = rng.choice(names), pairs[at][1]
        elif what == 2 and pairs:
            pairs[at] = pairs[at][0], self._value()
        elif what == 3 and pairs:
            pairs.append((pairs[at][0], self._value()))  # the last of equal keys counts
        elif (
            what == 4
            and pairs
            and isinstance(pairs[at][1], list)
            and pairs[at][1]
            and isinstance(pairs[at][1][0], tuple)
        ):
            self._mutate(pairs[at][1])
        elif what == 5 and pairs and isinstance(pairs[at][1], list):
            items = pairs[at][1]
            if not _is_object(items):
                items.insert(rng.randrange(len(items) + 1), self._value())
        else:
            pairs.insert(at, (rng.choice(names), self._value()))

    def _spell(self, value: Any) -> str:
        """Write JSON with odd spaces and escapes. Lists of pairs are objects."""
        rng = self._rng
        if isinstance(value, Verbatim):
            return value
        if isinstance(value, str):
            return self._spell_text(value)
        if isinstance(value, dict):
            value = [*value.items()]
            if not value:
                return "{}"
        if isinstance(value, list):
            space = rng.choice(("", "", "", " ", "\t"))
            if _is_object(value):
                pairs = (f"{self._spell_text(key)}{space}:{space}{self._spell(inner)}" for key, inner in value)
                return "{" + f"{space},{space}".join(pairs) + space + "}"
            return "[" + f"{space},".join(map(self._spell, value)) + "]"
        return json.dumps(value)

    def _spell_text(self, text: str) -> str:
        rng = self._rng
        if len(text) < 40 and rng.random() < 0.1:
            units = memoryview(text.encode("utf-16-le")).cast("H")
            return '"' + "".join(f"\\u{unit:04x}" for unit in units) + '"'
        return json.dumps(text, ensure_ascii=rng.random() < 0.5)

    def _mutate_bytes(self, line: bytes) -> bytes:
        rng = self._rng
        data = bytearray(line[:2000])
        for _ in range(rng.choice((1, 1, 2, 5))):
            at = rng.randrange(len(data) + 1)
            what = rng.randrange(5)
            if what == 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            elif what == 1:
                data[at:at] = rng.choice(
                    (b"\xff", b"\0", b"\xed\xa0\x80", b'"', b"}", b"\n", b"\\", b"\xc0\xaf", b"\x0b")
                )
            elif what == 2:
                del data[at : at + rng.randrange(1, 9)]
            elif what == 3:
                del data[at:]
            else:
                data[at:at] = data[: rng.randrange(1, 40)]
        return bytes(data)


def _is_object(value: Any) -> bool:
    """Whether a value that was made stands for an object: a list of keys with values."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], tuple)


class CheckingEngine(NullEngine):
    """Answers at once, and checks that what reaches it fits the model."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._config = config
        self._samplings: dict[int, SamplingParams] = {}

    def add(self, requests: list[Request]) -> None:
        for request in requests:
            ids = unpack(request.prompt_ids)
            assert 1 <= len(ids) <= len(ids) + request.max_tokens - 1 < self._config.max_model_len
            assert all(0 <= token < VOCAB_SIZE for token in ids)
            self._samplings[request.request_id] = request.sampling
        super().add(requests)

    def poll(self, timeout: float) -> list[RequestOutput]:
        return [self._with_logprobs(output) for output in super().poll(timeout)]

    def _with_logprobs(self, output: RequestOutput) -> RequestOutput:
        if self._samplings.pop(output.request_id).logprobs is None:
            return output
        each = TokenLogprobs(logprob=-0.5, top_ids=[7], top_logprobs=[-0.5])
        return msgspec.structs.replace(output, logprobs=[each] * len(unpack(output.token_ids)))


def run_here(source: Path, output: Path, facts: JobFacts, order: str) -> None:
    """Answer the rows in this process."""
    run = RunConfig(
        model=str(demo_path()),
        device="cpu",
        max_model_len=facts.max_model_len,
        max_num_seqs=256,
        sampling={} if facts.max_tokens is None else {"max_tokens": facts.max_tokens},
        job=JobConfig(
            order=order,  # type: ignore[arg-type]
            on_too_long=facts.on_too_long,  # type: ignore[arg-type]
            prompt_field=facts.prompt_key,
            messages_field=facts.messages_key,
            id_field=facts.id_key,
        ),
    )
    generate(run, inputs=[str(source)], output=str(output), progress=Silent(sys.stderr), start=CheckingEngine)


def run_command(source: Path, output: Path, facts: JobFacts, order: str) -> None:
    """Answer the rows with the command as a user types it."""
    settings = {
        "device": "cpu",
        "max_model_len": facts.max_model_len,
        "sampling.max_tokens": "null" if facts.max_tokens is None else facts.max_tokens,
        "job.on_too_long": facts.on_too_long,
        "job.prompt_field": facts.prompt_key,
        "job.messages_field": facts.messages_key,
        "job.id_field": facts.id_key,
    }
    command = [sys.executable, "-m", "nvcli", "generate", str(source), "-o", str(output), "-m", "demo"]
    command += ["--order", order, "--progress", "none"]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode in (0, 1), f"exit code {done.returncode}:\n{done.stderr}"
    assert "Traceback" not in done.stderr, done.stderr


class Fuzzer:
    """Runs jobs one after the other and counts what came of their rows."""

    def __init__(
        self,
        folder: Path,
        rng: random.Random,
        run: Callable[[Path, Path, JobFacts, str], None],
        *,
        is_slow: bool = False,
    ) -> None:
        """`run` answers an input into an output. With `is_slow`, contexts and answers are short."""
        self._lengths: tuple[int, ...] = (64,) if is_slow else (64, 128, 512)
        self._max_tokens: tuple[int | None, ...] = (8,) if is_slow else (None, 8)
        self._folder = folder
        self._rng = rng
        self._run = run
        self.num_rows = 0
        self.num_continued = 0
        self.errors: Counter[str] = Counter()

    def job(self, num_lines: int) -> None:
        """Run one job and check it. Raises AssertionError that shows the first row that is not as it must be."""
        rng = self._rng
        facts = JobFacts(
            max_model_len=rng.choice(self._lengths),
            vocab_size=VOCAB_SIZE,
            on_too_long=rng.choice(("error", "error", "truncate-left", "truncate-right")),
            max_tokens=rng.choice(self._max_tokens),
            **rng.choice(({}, {}, {"prompt_key": "question", "messages_key": "chat", "id_key": "key"})),
        )
        order = rng.choice(("input", "completion"))
        source, output = self._folder / "in.jsonl", self._folder / f"out.jsonl{rng.choice(('', '', '.gz', '.zst'))}"
        data = b"\n".join(RowMaker(rng, facts).lines(num_lines))
        source.write_bytes(rng.choice((b"", b"\xef\xbb\xbf")) + data + rng.choice((b"", b"\n")))
        self._run(source, output, facts, order)
        if rng.random() < 0.3:
            os.truncate(output, rng.randrange(output.stat().st_size + 1))
            self.num_continued += 1
            self._run(source, output, facts, order)
        self._check(
            source.read_bytes(), output, Oracle(facts, demo_path() / "tokenizer.json"), is_ordered=order == "input"
        )
        for path in self._folder.iterdir():
            path.unlink()

    def _check(self, data: bytes, output: Path, oracle: Oracle, *, is_ordered: bool) -> None:
        expected = list(oracle.expect(data))
        rows = [line for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line and not line.isspace()]
        lines = _lines(output)
        indices = [index_of(line) for line in lines]
        assert sorted(indices) == list(range(len(expected))), "rows are missing or doubled"
        assert not is_ordered or indices == sorted(indices), "the rows are not in order"
        for index, line in zip(indices, lines, strict=True):
            wrong = check(line, expected[index])
            assert wrong is None, f"{wrong}\n  row: {rows[index][:3000]!r}\n  output: {line[:1000]!r}"
            if (error := error_of(line)) is not None:
                self.errors[error] += 1
        self.num_rows += len(lines)


def _lines(path: Path) -> list[bytes]:
    compression = compression_of(path.name)
    data = path.read_bytes()
    plain = b"".join(Unpacker(compression).feed(data)) if compression else data
    assert plain.endswith(b"\n") or not plain
    return plain.split(b"\n")[:-1]


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """End the block with an AssertionError when it takes longer."""

    def end(number: int, frame: object) -> None:
        raise AssertionError(f"a job took longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def resident_bytes() -> int:
    """Memory of this process that is in RAM, after what is free was given back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--lines", type=int, default=2000, help="lines of each job")
    parser.add_argument("--timeout", type=int, default=120, help="seconds that a job may take")
    parser.add_argument("--command", action="store_true", help="run the real command with the built-in model")
    options = parser.parse_args()
    started = time.monotonic()
    settled = 0
    with tempfile.TemporaryDirectory() as name:
        rng = random.Random(options.seed)
        run = run_command if options.command else run_here
        fuzzer = Fuzzer(Path(name), rng, run, is_slow=options.command)
        num_jobs = 0
        while fuzzer.num_rows < options.rows:
            with time_limit(options.timeout):
                fuzzer.job(min(options.lines, options.rows))
            num_jobs += 1
            if not settled and fuzzer.num_rows >= options.rows / 5:
                settled = resident_bytes()
            resident = resident_bytes()
            growth = max(0, resident - settled) if settled else 0
            print(
                f"{fuzzer.num_rows:,} rows in {num_jobs} jobs ({fuzzer.num_continued} continued), "
                f"{fuzzer.errors.total():,} error rows, {resident >> 20} MiB, {time.monotonic() - started:.0f} s",
                flush=True,
            )
            assert growth < MAX_GROWTH_BYTES, f"memory grew by {growth:,} bytes"
    for error, count in fuzzer.errors.most_common():
        print(f"  {error:<24} {count:>8,}")


if __name__ == "__main__":
    main()
