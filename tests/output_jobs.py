"""Small jobs without engines: the rows of an input answered into an output, as far as a test wants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from nvcli.core.config_types import Order
from nvcli.errors import RowError
from nvcli.job.compression import Unpacker, compression_of
from nvcli.job.job import Choice, Job, JobResult, RowContext, RowForm, Usage, failed
from nvcli.job.output.job_output import JobOutput, OutputOptions, open_output
from nvcli.job.output.manifest import Manifest
from nvcli.job.output.reorder import ReorderBuffer
from nvcli.job.output.writer import ResultWriter

JOB = Manifest(created=1000, model="m", facts={"seed": 0, "dtype": "float32"}, inputs=[("in.jsonl", "5 bytes")])
FAILING = frozenset((3, 4))


def result_of(index: int, *, failing: Iterable[int] = (), form: RowForm = RowForm.NATIVE) -> JobResult:
    context = RowContext(id=f"r{index}", index=index, line=f"line {index + 1}", form=form)
    if index in failing:
        return failed(context, RowError("prompt_too_long", "too long"))
    choices = [Choice(index=0, text=f"ünswer {index}\n", finish_reason="stop")]
    return JobResult(context=context, choices=choices, usage=Usage(prompt_tokens=index))


def extra_of(row: Job | JobResult) -> dict[str, Any]:
    """The values that a row passes through."""
    return {key: msgspec.json.decode(value) for key, value in row.context.extra.items()}


def open_job(path: Path, job: Manifest = JOB, **options: Any) -> JobOutput:
    return open_output(str(path), job, OutputOptions(**options))


def write(
    path: Path,
    indices: Sequence[int],
    *,
    order: Order = "completion",
    failing: Iterable[int] = FAILING,
    finish: bool = False,
    all_read: bool = True,
    rows_read: int | None = None,
    form: RowForm = RowForm.NATIVE,
    **options: Any,
) -> JobOutput:
    """One run that answers those of these rows that are missing, a flush for each.

    `all_read`: the input has no others than `rows_read`, or than those up to the last of these.
    """
    output = open_job(path, order=order, **options)
    try:
        answered = output.answered.all
        reorder = ReorderBuffer(answered.next_missing, max_bytes=1000) if order == "input" else None
        writer = ResultWriter(output.sink, output.form, reorder=reorder)
        results = [result_of(index, failing=failing, form=form) for index in indices if index not in answered]
        for result in results:
            writer.write([result])
            writer.flush()
        if not finish:
            writer.close_early()
            return output
        writer.close()
        errors = output.answered.errors + errors_of(results)
        if rows_read is None:
            rows_read = max(indices, default=-1) + 1
        output.finish(rows=answered.count + len(results), errors=errors, rows_read=rows_read, all_read=all_read)
        return output
    finally:
        output.close()


def make_table(write: Callable[..., int], lines: Callable[[], Iterable[bytes]], path: Path, **options: Any) -> int:
    """Write rows to a table with `write`, and return how many they were."""
    with path.open("w+b") as file:
        return write(lines, file, **options)


def errors_of(results: Iterable[JobResult]) -> Counter[str]:
    return Counter(result.error.type for result in results if result.error is not None)


def plain_bytes(path: Path) -> bytes:
    """What the file holds, unpacked."""
    compression = compression_of(path.name)
    data = path.read_bytes()
    if not compression:
        return data
    unpacker = Unpacker(compression)
    plain = b"".join(unpacker.feed(data))
    unpacker.end()
    return plain


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [msgspec.json.decode(line) for line in plain_bytes(path).splitlines()]
