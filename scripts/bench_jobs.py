"""Rows a second and peak memory of the job layer: reader, parser and writer, without tokenizer and engine.

    python scripts/bench_jobs.py --rows 1000000

The rows come from a process that writes them as they are read (a pipe), so that there is no file to hold. Each figure
is of a process of its own: `stream` answers every row, `scan` reads that output, and `resume` scans an output that
lacks the last row, passes over the others and answers it.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from nvcli.jobs.input.reader import RowReader
from nvcli.jobs.job import Choice, Job, JobResult, Usage
from nvcli.jobs.output.job_output import OutputOptions
from nvcli.jobs.output.manifest import Manifest
from nvcli.jobs.output.open_output import open_output
from nvcli.jobs.output.output_scan import scan_output
from nvcli.jobs.output.writer import ResultWriter
from nvcli.jobs.rows.parser import RowParser

JOB = Manifest(created=0, model="m", facts={}, inputs=[])
GENERATOR = """
import sys
for start in range(0, {rows}, 1000):
    sys.stdout.write("".join(
        '{{"id": "request-%d", "prompt": "What is %d + %d, and why? Answer in one sentence.", "topic": "sums"}}\\n'
        % (i, i, 7 * i) for i in range(start, min(start + 1000, {rows}))))
"""


def answer(source: str, output: Path, limit: int) -> int:
    """Rows of `source`, each answered with a fixed text, into `output`; the number of rows read."""
    opened = open_output(str(output), JOB, OutputOptions())
    reader = RowReader([source], RowParser({}), limit=limit, answered=opened.answered)
    writer = ResultWriter(opened.sink, opened.form)
    choice = Choice(index=0, text="That is a sum, and I have added it up for you.", finish_reason="stop")
    for batch in reader.batches():
        writer.write(
            JobResult(place=row.place, choices=[choice], usage=Usage(prompt_tokens=20, completion_tokens=12))
            if isinstance(row, Job)
            else row
            for row in batch
        )
        writer.tick()
    writer.close()
    opened.close()
    return reader.rows_read


def measure(mode: str, num_rows: int, output: Path) -> None:
    """In this process: standard input is the generator."""
    started = time.perf_counter()
    rows = scan_output(output).num_rows if mode == "scan" else answer("-", output, num_rows)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{mode:<8}{rows:>12,} rows  {rows / seconds:>10,.0f} rows/s  {seconds:>7.2f} s  peak {peak:>6.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the job layer.")
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        measure(options.only, options.rows, options.output)
        return
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "out.jsonl"
        for mode in ("stream", "scan", "resume"):
            if mode == "resume":
                os.truncate(output, output.stat().st_size - 1)
            source = subprocess.Popen(
                [sys.executable, "-c", GENERATOR.format(rows=options.rows)], stdout=subprocess.PIPE
            )
            command = [sys.executable, __file__, "--only", mode, "--rows", str(options.rows), "--output", str(output)]
            subprocess.run(command, stdin=source.stdout, check=True)
            source.kill()
            source.wait()


if __name__ == "__main__":
    main()
