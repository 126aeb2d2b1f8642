"""Runs a check and prints its report, for `nvcli check` and for `generate --dry-run`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from nvcli.cli.messages import Interrupted

if TYPE_CHECKING:
    from nvcli.check.check import CheckOptions
    from nvcli.config import RunConfig
    from nvcli.config_source import ConfigSource


def run_check(
    run: RunConfig,
    source: ConfigSource,
    *,
    inputs: list[str],
    output: str | None = "-",
    options: CheckOptions,
    as_json: bool = False,
) -> None:
    """Check a job, print the report on standard output, and leave with the exit code.

    Raises what `check_job` raises, and what ended its reading.
    """
    from nvcli.check.check import check_job
    from nvcli.check.progress import CheckProgress

    done = check_job(run, source, inputs=inputs, output=output, options=options, progress=CheckProgress(sys.stderr))
    report = done.report
    if as_json:
        from nvcli.check.report import format_json

        typer.echo(format_json(report))
    else:
        from nvcli.check.report import print_report

        print_report(report, sys.stdout)
    if isinstance(done.ended_by, KeyboardInterrupt):
        raise Interrupted("the report is of the rows that were read until then")
    if done.ended_by is not None:
        raise done.ended_by
    if report.machine.fits is False:
        raise typer.Exit(2)
    raise typer.Exit(1 if report.rows_failed else 0)
