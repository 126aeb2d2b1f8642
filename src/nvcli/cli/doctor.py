"""`nvcli doctor`: finds out whether this machine is fit for a run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from msgspec import Meta

from nvcli.cli import completion
from nvcli.cli.help import MODEL, RESULT
from nvcli.cli.key_flags import key_flags
from nvcli.cli.messages import choose_config_file
from nvcli.cli.options import (
    ConfigOption,
    DpOption,
    DtypeOption,
    EpOption,
    GpuMemoryUtilizationOption,
    HfOverridesOption,
    JsonOption,
    MaxModelLenOption,
    MaxNumSeqsOption,
    ModelOption,
    PpOption,
    QuantizationOption,
    RevisionOption,
    SetOption,
)
from nvcli.cli.values import option_value

_Seconds = Annotated[float, Meta(ge=1, le=1_000_000)]


def doctor(
    model: ModelOption = None,
    revision: RevisionOption = None,
    hf_overrides: HfOverridesOption = None,
    dtype: DtypeOption = None,
    quantization: QuantizationOption = None,
    max_model_len: MaxModelLenOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    gpu_memory_utilization: GpuMemoryUtilizationOption = None,
    tp: Annotated[
        str | None,
        typer.Option(
            "--tp",
            metavar="N|auto",
            help="GPUs (processes) for each copy: their all-reduce is tried.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    ep: EpOption = False,
    pp: PpOption = None,
    dp: DpOption = None,
    device: Annotated[
        str | None,
        typer.Option(
            "--device",
            metavar="auto|cpu|cuda",
            help="Device of the run; auto: a GPU where one is found.",
            autocompletion=completion.words("auto", "cpu", "cuda"),
            rich_help_panel=MODEL,
        ),
    ] = None,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where answers would go: its folder is looked at.",
            rich_help_panel=RESULT,
        ),
    ] = Path("answers.jsonl"),
    timeout: Annotated[
        str,
        typer.Option("--timeout", metavar="SECONDS", help="How long a check may take.", rich_help_panel=RESULT),
    ] = "120",
    as_json: JsonOption = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
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
    given = dict(locals())  # the options by name
    from nvcli.config import load_run_config
    from nvcli.doctor.examination import examine
    from nvcli.doctor.findings import Level, count
    from nvcli.doctor.report import format_json, format_verdict, print_section
    from nvcli.process_limits import check_process

    check_process()
    seconds = option_value("--timeout", timeout, _Seconds, float)
    flags = key_flags(doctor, given)
    run = load_run_config(choose_config_file(config), overrides or (), flags, needs_model=False)
    sections = []
    for section in examine(run, output=output.absolute().parent, timeout=seconds):
        sections.append(section)
        if not as_json:
            print_section(section, sys.stdout)
    typer.echo(format_json(sections) if as_json else format_verdict(sections))
    raise typer.Exit(1 if count(sections, Level.PROBLEM) else 0)
