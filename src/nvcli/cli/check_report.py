"""Runs a check and prints its report, for `nvcli check` and for `generate --dry-run`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from nvcli.cli.messages import Interrupted

if TYPE_CHECKING:
    from nvcli.core.config import RunConfig
    from nvcli.core.config_source import ConfigSource
    from nvcli.tools.check.check import CheckOptions


def run_check(
    run: RunConfig,
    source: ConfigSource,
    *,
    inputs: Sequence[str],
    output: str | None = "-",
    options: CheckOptions,
    as_json: bool = False,
) -> None:
    """Check a job, print the report on standard output, and exit with its code.

    If `output` is a folder, each input is a job. Raises what `check_job` raises, and the error that ended its reading.
    """
    from nvcli.job.files import STREAM, is_folder, split_outputs
    from nvcli.tools.check.check import check_job
    from nvcli.tools.check.progress import CheckProgress

    code = 0
    jobs = split_outputs(inputs, output, options.shard)
    is_new = output is not None and is_folder(output) and not os.path.isdir(output)  # nothing to check there yet
    for some, one in jobs:
        if len(jobs) > 1:
            typer.echo(f"{some[0]} → {one}", err=as_json)
        place = STREAM if is_new else one
        done = check_job(run, source, inputs=some, output=place, options=options, progress=CheckProgress(sys.stderr))
        from nvcli.tools.check.report import format_json, print_report  # with rich, which a mistake needs not wait for

        if as_json:
            typer.echo(format_json(done.report))
        else:
            print_report(done.report, sys.stdout)
        if isinstance(done.ended_by, KeyboardInterrupt):
            raise Interrupted("the report covers the rows that were read until then")
        if done.ended_by is not None:
            raise done.ended_by
        code = max(code, 2 if done.report.machine.fits is False else 1 if done.report.rows_failed else 0)
    raise typer.Exit(code)
