"""`nvcli doctor`: finds out whether this machine is fit for a run."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from nvcli.cli.options import ConfigOption, DpOption, ModelOption, PpOption, SetOption, parse_size


class DeviceChoice(StrEnum):
    """The devices that a run may be on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def doctor(
    model: ModelOption = None,
    tp: Annotated[
        str | None,
        typer.Option("--tp", metavar="N|auto", help="GPUs (processes) for each copy: their all-reduce is tried."),
    ] = None,
    pp: PpOption = None,
    dp: DpOption = None,
    device: Annotated[
        DeviceChoice | None, typer.Option("--device", help="Device of the run. Without it: the one that is found.")
    ] = None,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="FILE", help="Where answers would go: its folder is looked at."),
    ] = Path("answers.jsonl"),
    config: ConfigOption = None,
    overrides: SetOption = None,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="SECONDS", min=1.0, help="How long a check may take.")
    ] = 120.0,
    as_json: Annotated[bool, typer.Option("--json", help="The findings as JSON, on standard output.")] = False,
) -> None:
    """Find out whether this machine, and a model where one is named, are fit for a run.

    Looks at Python, torch, drivers and GPUs, attention backends, collectives between --tp processes, memory, limits,
    folders, and the model's files. Every warning and problem says what to do. Downloads nothing.

    \b
    Examples:
      nvcli doctor
      nvcli doctor --model Qwen/Qwen3-8B --tp 2
      nvcli doctor -c configs/h200-qwen3-8b.yaml -o /data/answers.jsonl
      nvcli doctor --device cpu --tp 2 --json | jq '.findings[] | select(.level == "problem")'
    """
    from nvcli.config import find_config_file, load_run_config
    from nvcli.doctor.examination import examine
    from nvcli.doctor.findings import Level, count
    from nvcli.doctor.report import format_json, format_verdict, print_section
    from nvcli.process_limits import check_process

    check_process()
    flags = {
        "--model": model,
        "--tp": parse_size(tp),
        "--pp": pp,
        "--dp": parse_size(dp),
        "--device": device.value if device else None,
    }
    run = load_run_config(find_config_file(config), overrides or (), flags, needs_model=False)
    sections = []
    for section in examine(run, output=output.absolute().parent, timeout=timeout):
        sections.append(section)
        if not as_json:
            print_section(section, sys.stdout)
    typer.echo(format_json(sections) if as_json else format_verdict(sections))
    raise typer.Exit(1 if count(sections, Level.PROBLEM) else 0)
