"""`nvcli merge`: joins the outputs of a job's shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from nvcli.cli.messages import say
from nvcli.cli.options import Overwrite, with_options
from nvcli.core.flags import ROWS, Flag
from nvcli.core.system.standard_streams import OutputGone


@with_options()
def merge(
    outputs: Annotated[list[str], typer.Argument(metavar="OUTPUT", help="The outputs of all shards, in any order.")],
    *,
    output: Annotated[str, Flag("--output -o", ROWS, "The joined output, or -; FOLDER/ for one per job.", "FILE")],
    overwrite: Overwrite = False,
    allow_missing: Annotated[
        bool,
        Flag("--allow-missing", ROWS, "Join the existing rows; the command of the job can compute the others."),
    ] = False,
) -> None:
    """Join the outputs of a job's shards (`nvcli generate --shard I/N`), in the order of the input.

    Every row must occur once, and all shards must belong to one job. The joined output is that of the whole job: the
    job's command without --shard continues it, for example with --retry-errors. The outputs of the shards are kept.

    \b
    Examples:
      nvcli merge 'questions.shard-*.out.jsonl' -o questions.out.jsonl
      nvcli merge a.parquet b.parquet -o answers.parquet
      nvcli merge 'answers/*.shard-*' -o joined/
      nvcli merge 'questions.shard-*.out.jsonl' --allow-missing -o - | wc -l
    """
    from nvcli.core.system.process_limits import check_process
    from nvcli.job.files import folder_made
    from nvcli.job.output.shard_outputs import split_shards

    check_process()
    jobs = split_shards(outputs, output)
    with folder_made(output):
        are_whole = [_merge(shards, one, overwrite=overwrite, allow_missing=allow_missing) for shards, one in jobs]
    raise typer.Exit(0 if all(are_whole) else 1)


def _merge(shards: Sequence[str], output: str, *, overwrite: bool, allow_missing: bool) -> bool:
    """Join the shards of one job, report the outcome, and return whether all of its rows are answered."""
    from nvcli.core.byte_sizes import counted
    from nvcli.job.output.merge import merge_outputs
    from nvcli.job.output.sink import OutputClosed
    from nvcli.job.run.early_end import steps_for_errors

    try:
        merged = merge_outputs(shards, output, overwrite=overwrite, allow_missing=allow_missing, note=say)
    except OutputClosed:
        raise OutputGone from None
    failed = sum(merged.errors.values())
    rows = f"{counted(merged.rows, 'row')}, {failed:,} of them errors"
    if merged.missing:
        say(f"{output} has {rows}, and is not complete: {merged.missing}")
    elif merged.was_complete:
        say(f"{output} is complete: {rows}; nothing to do")
    else:
        say(f"joined {counted(merged.num_shards, 'shard')}: {rows}" + ("" if output == "-" else f" → {output}"))
    if merged.command:
        steps = steps_for_errors(merged.command, merged.errors)
        if merged.missing:
            steps = {merged.command: "computes the missing rows"}
        for command, purpose in steps.items():
            say(f"this {purpose}, with the job's other options:\n  {command}")
    return not failed and not merged.missing
