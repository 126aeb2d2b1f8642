"""Joins the outputs of a job's shards into the output that one run of the whole job would have written.

The rows come in the order of the input. Shards hold theirs in any order, so rows that come too early wait, in memory up
to a bound and then in a temporary file; the shards are read twice and never held. The joined output has the manifest of
the whole job: `nvcli generate` without `--shard` takes it for its own. If a merge is cut short, the same merge goes on
where it was.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from nvcli.core.byte_sizes import counted
from nvcli.errors import OutputError
from nvcli.job.files import STREAM, check_output
from nvcli.job.output.job_output import JobOutput, OutputOptions, open_output
from nvcli.job.output.locked_file import in_chunks
from nvcli.job.output.reorder import ReorderBuffer
from nvcli.job.output.shard_outputs import (
    ShardOutput,
    ShardRows,
    expand_outputs,
    job_command,
    known_digests,
    lines_by_shard,
    open_shards,
    whole_job,
)
from nvcli.job.row_set import AnsweredRows, RowSet

WAITING_BYTES = 1 << 28
"""Memory for rows that wait for their turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Merged:
    """The result of a merge."""

    output: str
    num_shards: int
    rows: int
    """Rows of the output."""
    errors: dict[str, int]
    """Failed rows of the output by error type."""
    missing: str
    """The rows that no shard has, and how to compute them; empty if there are none."""
    was_complete: bool
    """Whether the output was complete before, so that there was nothing to do."""
    command: str
    """The command of the whole job with this output, as far as known."""


def merge_outputs(
    names: Sequence[str],
    output: str,
    *,
    overwrite: bool = False,
    allow_missing: bool = False,
    max_waiting_bytes: int = WAITING_BYTES,
    note: Callable[[str], None] = lambda line: None,
) -> Merged:
    """Join the outputs of shards (patterns are expanded) into `output` (`-`: standard output).

    An output that an earlier merge of the same job has begun is continued; `overwrite` starts it anew. With
    `allow_missing` the rows that are there are joined, and the output is one that is not finished. Rows may wait in
    `max_waiting_bytes` of memory. `note` takes lines for the user. Raises ConfigError for outputs that do not belong
    together, RowsMissing, OutputError, and OutputClosed when nobody reads standard output any more.
    """
    paths = expand_outputs(names)
    check_output(list(map(str, paths)), output)
    with contextlib.ExitStack() as stack:
        try:
            shards = open_shards(paths, stack)
            found = ShardRows(shards)
        except OSError as error:
            raise OutputError(f"{error.filename or 'a shard'} cannot be read: {error.strerror}") from None
        missing = "" if found.is_complete else str(found.missing())
        if missing and not allow_missing:
            raise found.missing()
        job = whole_job(shards)
        options = OutputOptions(
            order="input",
            overwrite=overwrite,
            retry_errors=True,  # an error that an earlier merge has found may have been fixed in its shard
            limit=None if found.all_read else found.total,
            reorder_bytes=max_waiting_bytes,
        )
        opened = stack.enter_context(contextlib.closing(open_output(output, job, options)))
        for line in opened.notes:
            note(line)
        finished = opened.finished
        if finished is None:
            note(f"joining {counted(found.answered.all.count, 'row')} of {counted(len(shards), 'shard')} into {output}")
            rows, errors = _join(shards, found, opened, max_waiting_bytes, output)
    return Merged(
        output=output,
        num_shards=len(shards),
        rows=rows if finished is None else finished.rows,
        errors=dict(errors) if finished is None else finished.errors,
        missing=missing,
        was_complete=finished is not None,
        command="" if output == STREAM else job_command(job, ["-o", output]),
    )


def _join(
    shards: Sequence[ShardOutput], found: ShardRows, opened: JobOutput, max_bytes: int, output: str
) -> tuple[int, Counter[str]]:
    """Write the rows that the output lacks, and finish it if none is missing then.

    Returns its number of rows, and its failed ones by error type.
    """
    rows, there, given = found.answered.all, opened.answered.all, AnsweredRows()
    waiting = ReorderBuffer(lambda index: _next_row(index, rows, there), max_bytes=max_bytes, folder=opened.folder)
    try:
        if opened.digests is not None:
            opened.digests.add_all(known_digests(shards))
        opened.sink.start()
        for chunk in in_chunks(_new_lines(shards, rows, there, given, waiting)):
            opened.sink.write(chunk)
    except OSError as error:
        raise OutputError(f"{output} cannot be made: a shard cannot be read: {error.strerror}") from None
    finally:
        waiting.close()
        opened.sink.close()
    num_rows = there.count + given.all.count
    errors = opened.answered.errors + given.errors
    if found.is_complete and found.total is not None:
        opened.finish(rows=num_rows, errors=errors, rows_read=found.total, all_read=found.all_read)
    return num_rows, errors


def _new_lines(
    shards: Sequence[ShardOutput], found: RowSet, there: RowSet, given: AnsweredRows, waiting: ReorderBuffer
) -> Iterator[bytes]:
    """Yield the lines of the rows that the joined output lacks, in the order of the job, and add them to `given`.

    `found` are the rows of the shards, and `there` those of the output. The shard that has the next row is read until
    that row comes. Raises OutputError if a shard has lost a row meanwhile.
    """
    lines = lines_by_shard(shards)
    count = shards[0].shard.count
    while waiting.next_index in found:
        row, line = next(lines[waiting.next_index % count], (None, b""))
        if row is None:
            raise OutputError(f"a shard was changed during the merge: row {waiting.next_index} is not there")
        if row.index in there or row.index not in found:
            continue
        given.add(row.index, row.error_type)
        waiting.add(row.index, line)
        yield from waiting.take()


def _next_row(index: int, found: RowSet, there: RowSet) -> int:
    """Return the next row to yield from `index` on, or past the last one, a row that no shard has."""
    index = found.next_present(index)
    while index in found and index in there:
        index = found.next_present(there.next_missing(index))
    return index
