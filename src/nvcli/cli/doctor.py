"""`nvcli doctor`: checks whether this machine is ready for a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Meta

from nvcli.cli.options import AsJson, Settings, keys_of, with_options
from nvcli.core.flags import RESULT, Flag


@with_options(*keys_of("", "speculation", without=("seed",)))
def doctor(
    *,
    settings: Settings,
    output: Annotated[Path, Flag("--output -o", RESULT, "Output file of the run, whose folder is checked.")] = Path(
        "answers.jsonl"
    ),
    timeout: Annotated[
        float, Meta(ge=1, le=1_000_000), Flag("--timeout", RESULT, "Time limit for each check.", "SECONDS")
    ] = 120.0,
    as_json: AsJson = False,
) -> None:
    """Check whether this machine, and a model if one is named, are ready for a run.

    Checks Python, torch, drivers and GPUs, attention backends, collectives between --tp processes, memory, limits,
    folders, and the model's files. Every warning and problem says what to do. Downloads nothing.

    \b
    Examples:
      nvcli doctor
      nvcli doctor --model Qwen/Qwen3-8B --tp 2
      nvcli doctor -c configs/h200-qwen3-8b.yaml -o /data/answers.jsonl
      nvcli doctor --device cpu --tp 2 --json | jq '.findings[] | select(.level == "problem")'
    """
    from nvcli.tools.doctor.examination import examine
    from nvcli.tools.doctor.findings import Level, count
    from nvcli.tools.doctor.report import format_json, format_verdict, print_section

    run = settings.load(needs_model=False)
    sections = []
    for section in examine(run, output=output.absolute().parent, timeout=timeout):
        sections.append(section)
        if not as_json:
            print_section(section, sys.stdout)
    typer.echo(format_json(sections) if as_json else format_verdict(sections))
    raise typer.Exit(1 if count(sections, Level.PROBLEM) else 0)
