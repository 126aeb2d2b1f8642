"""Compares the time that nvcli estimates for layouts, by which it chooses one, with what was measured.

    python scripts/layout_times.py scripts/results/h200s-*.json

The files are result files (`figures.py`) whose commands are `nvcli bench --shape …`, on the GPUs that the files name. A
line for each: output tokens/s as estimated for the command's layout (start left out) and as measured, and their ratio;
for a command that leaves the layout open, the one that would be chosen today. The estimate knows neither drafts nor
adapters.
"""

from __future__ import annotations

import argparse
import shlex
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from figures import read_results
from nvcli.core.config import load_run_config
from nvcli.core.system.nvidia_smi import SmiGpu
from nvcli.job.planning.job_time import Lengths
from nvcli.job.planning.layout import choose_layout, estimate_layout
from nvcli.job.run.engine_settings import load_checkpoint, resolve_engines
from nvcli.tools.bench.shapes import write_shape
from nvcli.tools.check.machine import named_gpus

_LENGTHS = "100:1024"
_NUM_REQUESTS = 256


def estimated(command: str, gpus: Sequence[SmiGpu]) -> tuple[str, float]:
    """Estimate a benchmark's run on these GPUs: its layout as flags, and output tokens/s. Raises ConfigError."""
    said, run_flags = _parser().parse_known_args(shlex.split(command)[2:])
    overrides: list[str] = []
    flags: dict[str, Any] = {}
    rest = iter(run_flags)
    for flag in rest:
        if flag == "--set":
            overrides.append(next(rest))
        else:
            flags[flag] = True if flag in ("--ep", "--attention-dp") else next(rest)
    sizes = {flag: int(value) if str(value).isdecimal() else value for flag, value in flags.items()}
    run = load_run_config(None, overrides, sizes, needs_model=False)
    run = msgspec.structs.replace(run, device="cuda")
    prompt, answer = (sum(map(int, text.split(":"))) / 2 for text in (said.input_len, said.output_len))
    lengths = Lengths(prompt=prompt, computed=prompt, answer=answer)
    with tempfile.TemporaryDirectory() as name:
        folder = write_shape(said.shape, Path(name), quantization=run.quantization)
        checkpoint = load_checkpoint(run, folder)
        run = msgspec.structs.replace(run, max_model_len=min(4096, checkpoint.max_position_embeddings))
        model, config, *_ = resolve_engines(run, folder, checkpoint, gpus=gpus)
    layout = choose_layout(
        gpus,
        model,
        config,
        num_requests=said.num_requests,
        tensor_parallel_size=run.tensor_parallel_size,
        data_parallel_size=run.data_parallel_size,
    )
    estimate = estimate_layout(layout, gpus, model, config, num_requests=said.num_requests, lengths=lengths)
    return layout.flags + " --ep" * run.enable_expert_parallel, said.num_requests * answer / estimate.seconds


def _parser() -> argparse.ArgumentParser:
    """The options of a benchmark that are none of a run's."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--shape", required=True)
    parser.add_argument("--num-requests", type=int, default=_NUM_REQUESTS)
    parser.add_argument("--input-len", default=_LENGTHS)
    parser.add_argument("--output-len", default=_LENGTHS)
    for name in ("--repeat", "--accept-rate", "--lora-rank", "--num-loras"):
        parser.add_argument(name)
    parser.add_argument("--json", action="store_true")
    return parser


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    print(f"{'':40} {'layout':18} {'estimated':>9} {'measured':>9}")
    ratios = []
    for path in parser.parse_args().files:
        for name, result in read_results(path).items():
            gpus = named_gpus(result.device.split()[1], result.num_devices)
            assert gpus is not None
            layout, rate = estimated(result.command, gpus)
            measured = result.figures["output_tokens_per_second"]
            ratios.append(rate / measured)
            print(f"{name:40} {layout:18} {rate:9,.0f} {measured:9,.0f} {rate / measured:5.2f}")
    print(f"estimated / measured: {min(ratios):.2f} to {max(ratios):.2f}")


if __name__ == "__main__":
    main()
