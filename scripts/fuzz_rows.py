"""Answers jobs of mutated rows, and compares each output row with what the format's documentation asks for.

    python scripts/fuzz_rows.py --rows 100000             # in this process, with an engine that does nothing
    python scripts/fuzz_rows.py --rows 2000 --command     # with the real command and the built-in model on a CPU

Rows are made as structures (native and OpenAI rows, good and bad) and then mutated: keys and values, spellings of the
JSON, and bytes. Jobs differ in their settings, some are cut short and continued, and of some the input is changed and
the output updated. `row_oracle.py` says what must become
of each row. A difference, an exception, a job that takes longer than `--timeout` seconds, or memory that grows ends the
loop, with the row in question. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from bench_pipeline import NullEngine, Silent
from fuzzing import make_parser, print_counts
from nvcli.core.config import JobConfig, RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import PromptQueryResult, TokenLogprobs, pack, unpack
from nvcli.demo import demo_path
from nvcli.engine.request import PromptScoring, Request, RequestOutput
from nvcli.job.compression import Unpacker, compression_of
from nvcli.job.run.generate import generate
from nvcli.job.run.resolve import resolve_job
from row_maker import VOCAB_SIZE, RowMaker
from row_oracle import JobFacts, Oracle, check, error_of, index_of

MAX_GROWTH_BYTES = 16 * 1024 * 1024
"""Memory may grow by so much after the first fifth of the rows: the allocators' own play."""


class CheckingEngine(NullEngine):
    """Answers at once, and checks that what reaches it fits the model."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._config = config
        self._requests: dict[int, Request] = {}

    def add(self, requests: list[Request]) -> None:
        for request in requests:
            ids = unpack(request.prompt_ids)
            assert 1 <= len(ids) <= len(ids) + request.max_tokens - 1 < self._config.max_model_len
            assert all(0 <= token < VOCAB_SIZE for token in ids)
            self._requests.update({sample.request_id: sample for sample in request.samples()})
        super().add(requests)

    def poll(self, timeout: float) -> list[RequestOutput]:
        return [self._with_logprobs(output) for output in super().poll(timeout)]

    def _with_logprobs(self, output: RequestOutput) -> RequestOutput:
        request = self._requests.pop(output.request_id)
        if isinstance(request.read, PromptScoring):
            count = len(unpack(request.prompt_ids)) - request.read.first
            num_top = count * request.read.num_top
            reading = PromptQueryResult(
                logprobs=_logprobs(count),
                best_ids=pack([7] * count),
                top_ids=pack([7] * num_top),
                top_logprobs=_logprobs(num_top),
            )
            output = msgspec.structs.replace(output, query_results=[reading])
        if request.sampling.logprobs is None:
            return output
        each = TokenLogprobs(logprob=-0.5, top_ids=[7], top_logprobs=[-0.5])
        return msgspec.structs.replace(output, logprobs=[each] * len(unpack(output.token_ids)))


def _logprobs(count: int) -> bytes:
    return array("f", [-0.5] * count).tobytes()


def run_here(source: Path, output: Path, facts: JobFacts, order: str, update: bool) -> None:
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
            messages_field=None if facts.messages_key == "messages" else facts.messages_key,
            id_field=facts.id_key,
            check_columns=False,
            prompt_template=facts.prompt_template,
            system=facts.system,
            chat="never",  # the oracle counts the tokens of prompts
        ),
    )
    job = resolve_job(run, inputs=[str(source)], output=str(output))
    generate(job, progress=Silent(sys.stderr), update=update, start=CheckingEngine)


def run_command(source: Path, output: Path, facts: JobFacts, order: str, update: bool) -> None:
    """Answer the rows with the command as a user types it."""
    settings = {
        "device": "cpu",
        "max_model_len": facts.max_model_len,
        "sampling.max_tokens": "null" if facts.max_tokens is None else facts.max_tokens,
        "job.on_too_long": facts.on_too_long,
        "job.check_columns": "false",
        "job.prompt_field": facts.prompt_key,
        "job.messages_field": "null" if facts.messages_key == "messages" else facts.messages_key,
        "job.id_field": facts.id_key,
        "job.prompt_template": "null" if facts.prompt_template is None else f'"{facts.prompt_template}"',
        "job.chat": "never",
        "job.system": "null" if facts.system is None else f'"{facts.system}"',
    }
    command = [sys.executable, "-m", "nvcli", "generate", str(source), "-o", str(output), "-m", "demo"]
    command += ["--order", order, "--progress", "none", *(["--update"] if update else [])]
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
        run: Callable[[Path, Path, JobFacts, str, bool], None],
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
        self.num_updated = 0
        self.errors: Counter[str] = Counter()

    def job(self, num_lines: int) -> None:
        """Run one job and check it. Raises AssertionError that shows the first row that is not as it must be."""
        rng = self._rng
        facts = JobFacts(
            max_model_len=rng.choice(self._lengths),
            vocab_size=VOCAB_SIZE,
            on_too_long=rng.choice(("error", "error", "truncate-left", "truncate-right")),
            max_tokens=rng.choice(self._max_tokens),
            **rng.choice(({}, {}, {}, {"system": "Add."}, {"prompt_template": "{topic}: {prompt}"})),
            **rng.choice(({}, {}, {"prompt_key": "question", "messages_key": "chat", "id_key": "key"})),
        )
        order = rng.choice(("input", "completion"))
        source, output = self._folder / "in.jsonl", self._folder / f"out.jsonl{rng.choice(('', '', '.gz', '.zst'))}"
        maker = RowMaker(rng, facts)
        data = b"\n".join(maker.lines(num_lines))
        source.write_bytes(rng.choice((b"", b"\xef\xbb\xbf")) + data + rng.choice((b"", b"\n")))
        self._run(source, output, facts, order, False)
        if rng.random() < 0.3:
            os.truncate(output, rng.randrange(output.stat().st_size + 1))
            self.num_continued += 1
            self._run(source, output, facts, order, False)
        self._check(source, output, facts, is_ordered=order == "input")
        if rng.random() < 0.3:
            source.write_bytes(b"\n".join(changed_lines(rng, data.split(b"\n"), maker)))
            self.num_updated += 1
            self._run(source, output, facts, order, True)
            self._check(source, output, facts, is_ordered=order == "input")
        for path in self._folder.iterdir():
            path.unlink()

    def _check(self, source: Path, output: Path, facts: JobFacts, *, is_ordered: bool) -> None:
        data = source.read_bytes()
        expected = list(Oracle(facts, demo_path() / "tokenizer.json").expect(data))
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


def changed_lines(rng: random.Random, lines: list[bytes], maker: RowMaker) -> list[bytes]:
    """Return the lines of an input in which some were replaced, removed and added, and maybe moved."""
    others = [line for line in lines if rng.random() > 0.05]
    for index in range(len(others)):
        if rng.random() < 0.05:
            others[index] = rng.choice(lines)
    if rng.random() < 0.3:
        rng.shuffle(others)
    for line in b"\n".join(maker.lines(rng.randrange(20))).split(b"\n"):
        others.insert(rng.choice((len(others), rng.randrange(len(others) + 1))), line)
    return others


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
    gc.unfreeze()  # a job freezes what it has imported, with its garbage; a command has one job, and this loop many
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = make_parser(__doc__, "--rows", 100_000)
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
                f"{fuzzer.num_rows:,} rows in {num_jobs} jobs ({fuzzer.num_continued} continued, "
                f"{fuzzer.num_updated} updated), "
                f"{fuzzer.errors.total():,} error rows, {resident >> 20} MiB, {time.monotonic() - started:.0f} s",
                flush=True,
            )
            assert growth < MAX_GROWTH_BYTES, f"memory grew by {growth:,} bytes"
    print_counts(fuzzer.errors, started)


if __name__ == "__main__":
    main()
