"""`nvcli profile-memory`: shows where the memory of each GPU goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nvcli.cli.messages import say
from nvcli.cli.options import AsJson, Settings, keys_of, with_options
from nvcli.core.flags import MODEL, RESULT, WORKLOAD, Flag
from nvcli.tools.bench.options import Shape


@with_options(*keys_of("", "speculation", without=("device", "seed", "data_parallel_size")))
def profile_memory(
    *,
    settings: Settings,
    shape: Shape = None,
    dry_run: Annotated[
        bool, Flag("--dry-run", MODEL, "Plan from the configuration alone, without loading the model or using a GPU.")
    ] = False,
    gpu_memory: Annotated[
        str | None, Flag("--gpu-memory", MODEL, "Memory of each GPU for --dry-run: 80GiB, 80G or 80.", "SIZE")
    ] = None,
    input_file: Annotated[
        str | None, Flag("--input", WORKLOAD, "File of rows; show how many of its requests fit.", "FILE")
    ] = None,
    plot: Annotated[
        Path | None, Flag("--plot", RESULT, "Draw a bar for each rank: an .svg or .png file.", "FILE.svg|.png")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where the memory of each GPU goes, how many requests fit, and which settings would change that.

    Loads the model as a run would and runs its largest batches. With --dry-run nothing is loaded and no GPU is needed.

    \b
    Examples:
      nvcli profile-memory -m Qwen/Qwen3-8B --input questions.jsonl
      nvcli profile-memory -m Qwen/Qwen3-32B --dry-run --gpu-memory 80GiB --tp 4
      nvcli profile-memory --shape qwen3-8b --plot memory.svg
    """
    from nvcli.tools.bench.plot import check_plot
    from nvcli.tools.profile.command import run_profile
    from nvcli.tools.profile.report import format_json, format_profile, print_bars, write_plot

    if plot is not None:
        check_plot(plot)
    run = settings.load(shape=shape)
    profile = run_profile(run, shape=shape, input_file=input_file, dry_run=dry_run, gpu_memory=gpu_memory, say=say)
    if as_json:
        typer.echo(format_json(profile))
    else:
        print_bars(profile)
        typer.echo(format_profile(profile))
    if plot is not None:
        write_plot(profile, plot)
    raise typer.Exit(2 if profile.problem is not None else 0)
