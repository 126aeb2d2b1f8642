"""Measures what the parent costs per row: reading, tokenizing, detokenizing and writing.

The engine around which this runs does nothing.

    python scripts/bench_pipeline.py                         # each stage alone, then all together
    python scripts/bench_pipeline.py --memory 10000 1000000  # peak memory, from a generator that writes as it is read

The tokenizer is the built-in model's unless `--model FOLDER` names another. The engine answers every request at
once with 8 tokens, or so many a second (`--rate`); it lives in this process, and encodes requests as the real one's
client does. `starved` is the share of the time in which it had nothing to do. The tokenizer's threads are as many as
there are cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from benchmark import Case, Figures, measure_in_child, peak_mebibytes, run_benchmark
from nvcli.core.config import RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import EngineReady, pack
from nvcli.core.weight_changes import WeightsChange
from nvcli.demo import demo_path
from nvcli.engine.protocol import AddRequests
from nvcli.engine.request import EngineStats, Request, RequestOutput
from nvcli.job.input.reader import RowReader
from nvcli.job.job import Choice, JobResult, Usage
from nvcli.job.output.writer import ResultWriter, Sink
from nvcli.job.progress.display import Progress
from nvcli.job.progress.summary import Summary
from nvcli.job.rows.parser import RowParser
from nvcli.job.run.generate import generate
from nvcli.job.run.resolve import resolve_job
from nvcli.job.text.chat_renderer import ChatRenderer
from nvcli.job.text.model_limits import ModelLimits
from nvcli.job.text.prepare import PreparedRow, Preparer
from nvcli.job.text.tokenizer import Tokenizer
from nvcli.models.config import load_model_config

ANSWER = pack(range(20, 28))
FORMS = ("prompt", "chat", "no-id", "huge", "nested")
HUGE_BYTES = 50_000_000
NESTED_BYTES = 100_000_000


class NullEngine:
    """Answers all it holds at once, or `rate` requests a second, every few milliseconds, from a thread of its own."""

    def __init__(self, config: EngineConfig, rate: float = 0) -> None:
        self.stats = EngineStats(num_blocks=1)
        self.starved_seconds = 0.0
        """Time between two requests in which it had nothing to do."""
        self._rate = rate
        self._empty_since: float | None = None
        self._held: deque[int] = deque()
        self._done: list[int] = []
        self._encoder = msgspec.msgpack.Encoder()
        self._event = os.eventfd(1, os.EFD_NONBLOCK)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        if rate:
            self._thread.start()

    def fileno(self) -> int:
        return self._event

    def wait_ready(self, timeout: float | None = None) -> EngineReady:
        self._clear_event()
        return EngineReady(
            num_blocks=1,
            block_size=64,
            kv_cache_bytes=0,
            kv_cache_tokens=64,
            weight_bytes=0,
            attention_backend="none",
            seconds={},
        )

    def add(self, requests: list[Request]) -> None:
        self._encoder.encode(AddRequests(requests))
        if self._empty_since is not None:
            self.starved_seconds += time.perf_counter() - self._empty_since
            self._empty_since = None
        self._held += [sample.request_id for request in requests for sample in request.samples()]
        if not self._rate:
            self._finish(len(self._held))

    def abort(self, request_ids: Sequence[int]) -> None:
        pass

    def poll(self, timeout: float) -> list[RequestOutput]:
        self._clear_event()
        done, self._done = self._done, []
        return [RequestOutput(request_id=number, token_ids=ANSWER, finish_reason="length") for number in done]

    def change_weights(self, change: WeightsChange) -> None:
        raise AssertionError("it has no weights")

    def take_changed(self) -> None:
        return None

    def take_notes(self) -> list[str]:
        return []

    def _clear_event(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it may be asked when nothing has happened
            os.eventfd_read(self._event)

    def close(self) -> None:
        self._closed.set()
        if self._rate:
            self._thread.join()
        os.close(self._event)

    def _finish(self, count: int) -> None:
        for _ in range(count):
            self._done.append(self._held.popleft())
        if not self._held:
            self._empty_since = time.perf_counter()
        if count:
            os.eventfd_write(self._event, 1)

    def _run(self) -> None:
        last = time.perf_counter()
        due = 0.0
        while not self._closed.wait(0.002):
            now = time.perf_counter()
            due += (now - last) * self._rate
            last = now
            if not self._held:
                due = 0.0
            count = min(int(due), len(self._held))
            due -= count
            if count:
                self._finish(count)


class Silent(Progress):
    def note(self, line: str) -> None:
        pass

    warn = note


def lines(num_rows: int, form: str) -> Iterator[bytes]:
    """Short questions, all different; `huge`: with 50 MB of text each, by turns to be answered and to be handed on;
    `nested`: with 100 MB of empty objects each to be handed on."""
    nested = b"{}," * (NESTED_BYTES // 3) if form == "nested" else b""
    filler = "x" * HUGE_BYTES if form == "huge" else ""
    for number in range(num_rows):
        text = f"What is {number} + {number % 977}? Answer with a number."
        row: dict[str, Any] = {} if form == "no-id" else {"id": f"row-{number}"}
        if form == "chat":
            row["messages"] = [{"role": "user", "content": text}]
        else:
            row["prompt"] = text + filler * (number % 2)
            if form == "huge":
                row["document"] = filler * (1 - number % 2)
        line = json.dumps(row).encode()
        yield line[:-1] + b',"kept":[' + nested + b"0]}\n" if nested else line + b"\n"


def run_all(
    inputs: Sequence[str], model: Path, output: str, max_num_seqs: int, rate: float = 0
) -> tuple[Summary, NullEngine]:
    engines: list[NullEngine] = []

    def start(config: EngineConfig) -> NullEngine:
        engines.append(NullEngine(config, rate))
        return engines[-1]

    run = RunConfig(
        model=str(model), device="cpu", sampling={"max_tokens": 8, "temperature": 0}, max_num_seqs=max_num_seqs
    )
    job = resolve_job(run, inputs=inputs, output=output, overwrite=True)
    summary = generate(job, progress=Silent(sys.stderr), start=start)
    return summary, engines[0]


class Stages:
    """The parent's stages, each of which works on what the stage before has made."""

    def __init__(self, path: Path, options: argparse.Namespace) -> None:
        self._path, self._options = path, options
        self._tokenizer = Tokenizer.load(options.model)
        facts = load_model_config(options.model)
        limits = ModelLimits(max_model_len=2048, vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids)
        self._renderer = ChatRenderer(options.model)
        self._preparer = Preparer(self._tokenizer, limits, self._renderer.render)

    def close(self) -> None:
        self._renderer.close()

    def read(self) -> Figures:
        reader = RowReader([str(self._path)], RowParser({"max_tokens": 8, "temperature": 0}))
        self._batches = list(reader.batches())
        return {}

    def tokenize(self) -> Figures:
        prepared = [row for rows in self._batches for row in self._preparer.prepare(rows)]
        self._rows = [row for row in prepared if isinstance(row, PreparedRow)]
        assert len(self._rows) == self._options.rows
        return {"tokens a row": sum(row.num_prompt_tokens for row in self._rows) / len(self._rows)}

    def detokenize(self) -> Figures:
        answers = [list(range(20, 28)) for _ in self._rows]
        self._texts = [
            text for at in range(0, len(answers), 512) for text in self._tokenizer.decode(answers[at : at + 512])
        ]
        return {}

    def write(self) -> Figures:
        writer = ResultWriter(Sink(os.open(os.devnull, os.O_WRONLY), "null"))
        for at in range(0, len(self._rows), 512):
            writer.write(
                JobResult(
                    context=row.context,
                    choices=[Choice(index=0, text=text, finish_reason="length")],
                    usage=Usage(prompt_tokens=row.num_prompt_tokens, completion_tokens=8),
                )
                for row, text in zip(self._rows[at : at + 512], self._texts[at : at + 512], strict=True)
            )
        writer.close()
        return {}

    def all(self) -> Figures:
        options = self._options
        summary, engine = run_all([str(self._path)], options.model, os.devnull, options.running, options.rate)
        assert summary.rows == options.rows
        assert not summary.errors, summary.errors
        seconds = summary.times.generating
        return {
            "generating, rows/s": summary.rows / seconds,
            "engine starved, %": 100 * engine.starved_seconds / seconds,
        }


def measure_stage(stage: Callable[[], Figures], num_rows: int, number: int) -> Figures:
    started, cpu = time.perf_counter(), time.process_time()
    figures = stage()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {"rows/s": num_rows / seconds, "core µs a row": cpu / num_rows * 1e6, **figures}


def measure_memory(num_rows: int, options: argparse.Namespace, number: int) -> Figures:
    """Measure in a process of its own, which reads a pipe."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.jsonl"
        arguments = ["--child", str(output), "--model", str(options.model), "--running", str(options.running)]
        figures = measure_in_child(__file__, arguments, lines(num_rows, options.form))
        return {**figures, "output MiB": output.stat().st_size / 2**20}


def run_child(output: str, options: argparse.Namespace) -> None:
    Tokenizer.load(options.model)  # what is imported counts as before the first row
    ready = peak_mebibytes()
    summary, _ = run_all(["-"], options.model, output, options.running)
    rate = summary.rows / summary.times.generating
    print(json.dumps({"rows/s": rate, "MiB before the first row": ready, "peak MiB": peak_mebibytes()}))


def cases(options: argparse.Namespace, stack: ExitStack) -> Iterator[Case]:
    if options.child:
        run_child(options.child, options)
        return
    if options.memory:
        for num_rows in options.memory:
            yield Case(f"{num_rows:,} rows", partial(measure_memory, num_rows, options))
        return
    path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "in.jsonl"
    with path.open("wb") as file:
        file.writelines(lines(options.rows, options.form))
    stages = stack.enter_context(contextlib.closing(Stages(path, options)))
    for stage in (stages.read, stages.tokenize, stages.detokenize, stages.write, stages.all):
        yield Case(stage.__name__, partial(measure_stage, stage, options.rows))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--form", choices=FORMS, default="prompt")
    parser.add_argument("--model", type=Path, default=demo_path())
    parser.add_argument("--running", type=int, default=256, help="max_num_seqs")
    parser.add_argument("--rate", type=float, default=0, help="rows/s that the engine answers; 0: as they come")
    parser.add_argument("--memory", type=int, nargs="+", metavar="ROWS", help="measure peak memory instead")
    parser.add_argument("--child", help=argparse.SUPPRESS)


if __name__ == "__main__":
    run_benchmark(__doc__, cases, add_options)
