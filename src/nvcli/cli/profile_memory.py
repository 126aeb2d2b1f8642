"""`nvcli profile-memory`: shows where the memory of each GPU goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nvcli.cli.help import MODEL, RESULT, WORKLOAD
from nvcli.cli.key_flags import key_flags
from nvcli.cli.messages import choose_config_file, say
from nvcli.cli.options import (
    ConfigOption,
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
    ShapeOption,
    TpOption,
    model_or_shape,
)


def profile_memory(
    model: ModelOption = None,
    revision: RevisionOption = None,
    hf_overrides: HfOverridesOption = None,
    shape: ShapeOption = None,
    dtype: DtypeOption = None,
    quantization: QuantizationOption = None,
    max_model_len: MaxModelLenOption = None,
    max_num_seqs: MaxNumSeqsOption = None,
    gpu_memory_utilization: GpuMemoryUtilizationOption = None,
    tp: TpOption = None,
    ep: EpOption = False,
    pp: PpOption = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Plan from the configuration alone: no GPU, nothing loaded.", rich_help_panel=MODEL
        ),
    ] = False,
    gpu_memory: Annotated[
        str | None,
        typer.Option(
            "--gpu-memory",
            metavar="SIZE",
            help="Memory of each GPU for --dry-run: 80GiB, 80G or 80.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    input_file: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="FILE", help="Show how many of this file's requests fit.", rich_help_panel=WORKLOAD
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg|.png", help="Draw a bar for each rank.", rich_help_panel=RESULT),
    ] = None,
    as_json: JsonOption = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
) -> None:
    """Show where the memory of each GPU goes, how many requests fit, and which settings would change that.

    Loads the model as a run would and runs its largest batches. With --dry-run nothing is loaded and no GPU is needed.

    \b
    Examples:
      nvcli profile-memory -m Qwen/Qwen3-8B --input questions.jsonl
      nvcli profile-memory -m Qwen/Qwen3-32B --dry-run --gpu-memory 80GiB --tp 4
      nvcli profile-memory --shape qwen3-8b --plot memory.svg
    """
    given = dict(locals())  # the options by name
    from nvcli.bench.plot import check_plot
    from nvcli.config import load_run_config
    from nvcli.process_limits import check_process
    from nvcli.profile.command import run_profile
    from nvcli.profile.picture import print_bars, write_plot
    from nvcli.profile.report import format_json, format_profile

    if plot is not None:
        check_plot(plot)
    check_process()
    flags = key_flags(profile_memory, given)
    flags["--model"] = model_or_shape(model, shape)
    run = load_run_config(choose_config_file(config), overrides or (), flags)
    profile = run_profile(run, shape=shape, input_file=input_file, dry_run=dry_run, gpu_memory=gpu_memory, say=say)
    if plot is not None:
        write_plot(profile, plot)
    if as_json:
        typer.echo(format_json(profile))
    else:
        print_bars(profile)
        typer.echo(format_profile(profile))
    raise typer.Exit(2 if profile.problem is not None else 0)
