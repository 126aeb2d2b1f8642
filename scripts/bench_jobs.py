"""Rows a second and peak memory of the job layer: reader, parser and writer, without tokenizer and engine.

    python scripts/bench_jobs.py --rows 1000000

The rows come through a pipe as they are read, so that there is no file to hold. Each figure is of a process of its own:
`stream` answers every row, `scan` reads that output, and `resume` scans an output that lacks the last row, passes over
the others and answers it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from benchmark import Case, measure_in_child, peak_mebibytes, run_benchmark
from nvcli.job.input.reader import RowReader
from nvcli.job.job import Choice, Job, JobResult, Usage
from nvcli.job.output.job_output import OutputOptions, open_output
from nvcli.job.output.manifest import Manifest
from nvcli.job.output.output_scan import scan_output
from nvcli.job.output.writer import ResultWriter
from nvcli.job.rows.parser import RowParser

JOB = Manifest(created=0, model="m", facts={}, inputs=[])
ROW = '{"id": "request-%d", "prompt": "What is %d + %d, and why? Answer in one sentence.", "topic": "sums"}\n'


def lines(num_rows: int) -> Iterator[bytes]:
    for start in range(0, num_rows, 1000):
        yield "".join(ROW % (i, i, 7 * i) for i in range(start, min(start + 1000, num_rows))).encode()


def answer(output: Path, limit: int) -> int:
    """Answer each row of standard input with a fixed text, and return the number of rows read."""
    opened = open_output(str(output), JOB, OutputOptions())
    reader = RowReader(["-"], RowParser({}), limit=limit, answered=opened.answered)
    writer = ResultWriter(opened.sink, opened.form)
    choice = Choice(index=0, text="That is a sum, and I have added it up for you.", finish_reason="stop")
    for batch in reader.batches():
        writer.write(
            JobResult(context=row.context, choices=[choice], usage=Usage(prompt_tokens=20, completion_tokens=12))
            if isinstance(row, Job)
            else row
            for row in batch
        )
        writer.tick()
    writer.close()
    opened.close()
    return reader.rows_read


def run_child(mode: str, output: Path, num_rows: int) -> None:
    """Measure in this process, whose standard input has the rows."""
    started = time.perf_counter()
    rows = scan_output(output).num_rows if mode == "scan" else answer(output, num_rows)
    seconds = time.perf_counter() - started
    print(json.dumps({"rows": rows, "rows/s": rows / seconds, "seconds": seconds, "peak MiB": peak_mebibytes()}))


def cases(options: argparse.Namespace, stack: ExitStack) -> Iterator[Case]:
    if options.child:
        mode, output = options.child
        run_child(mode, Path(output), options.rows)
        return
    output = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "out.jsonl"

    def measure(mode: str, number: int) -> dict[str, float]:
        if mode == "stream":
            output.unlink(missing_ok=True)
        elif mode == "resume":
            os.truncate(output, output.stat().st_size - 1)
        arguments = ["--rows", str(options.rows), "--child", mode, str(output)]
        return measure_in_child(__file__, arguments, lines(0 if mode == "scan" else options.rows))

    for mode in ("stream", "scan", "resume"):
        yield Case(mode, partial(measure, mode))


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)


if __name__ == "__main__":
    run_benchmark(__doc__, cases, add_options)
