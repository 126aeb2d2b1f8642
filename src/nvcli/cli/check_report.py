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

    codes = {0}
    jobs = split_outputs(inputs, output, options.shard)
    is_new = output is not None and is_folder(output) and not os.path.isdir(output)  # nothing to check there yet
    for some, one in jobs:
        if len(jobs) > 1:
            typer.echo(f"{some[0]} → {one}", err=as_json)
        codes.add(_check(run, source, inputs=some, output=STREAM if is_new else one, options=options, as_json=as_json))
    raise typer.Exit(max(codes))


def _check(
    run: RunConfig,
    source: ConfigSource,
    *,
    inputs: Sequence[str],
    output: str | None,
    options: CheckOptions,
    as_json: bool,
) -> int:
    """Check one job, print the report, and return the exit code."""
    from nvcli.tools.check.check import check_job
    from nvcli.tools.check.progress import CheckProgress

    done = check_job(run, source, inputs=inputs, output=output, options=options, progress=CheckProgress(sys.stderr))
    report = done.report
    if as_json:
        from nvcli.tools.check.report import format_json

        typer.echo(format_json(report))
    else:
        from nvcli.tools.check.report import print_report

        print_report(report, sys.stdout)
    if isinstance(done.ended_by, KeyboardInterrupt):
        raise Interrupted("the report covers the rows that were read until then")
    if done.ended_by is not None:
        raise done.ended_by
    if report.machine.fits is False:
        return 2
    return 1 if report.rows_failed else 0
