"""`nvcli profile-memory`: turns its options into a profile."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec

from nvcli.core.byte_sizes import parse_size
from nvcli.core.config import RunConfig
from nvcli.core.system.host_memory import available_ram
from nvcli.core.system.nvidia_smi import SmiGpu
from nvcli.errors import CapacityError, ConfigError
from nvcli.job.planning.layout import resolve_layout
from nvcli.job.run.engine_settings import load_checkpoint, resolve_engines
from nvcli.job.run.resolve import ResolvedModel, model_of_rows
from nvcli.job.run.row_settings import read_row_settings
from nvcli.job.text.prepare import PreparedRow
from nvcli.sizing.ram import check_ram
from nvcli.tools.bench.file_workload import prepared_rows
from nvcli.tools.bench.shapes import model_folder
from nvcli.tools.profile.lengths import FileLengths, lengths_of
from nvcli.tools.profile.profile import MemoryProfile, gpu_memory_here, profile_by_loading, profile_from_config

_MOST_GIB = 4096
_LEAST_BYTES = 1 << 26
"""Numbers up to `_MOST_GIB` are GiB, larger ones bytes: no GPU has more GiB, or fewer bytes than this."""


def run_profile(
    run: RunConfig,
    *,
    shape: str | None,
    input_file: str | None,
    dry_run: bool,
    gpu_memory: str | None,
    say: Callable[[str], None],
) -> MemoryProfile:
    """Profile `run.model`, or made-up weights of a known `shape`. Raises ConfigError and what the engine raises."""
    total = gpu_size(gpu_memory)
    if total is not None and not dry_run:
        raise ConfigError("--gpu-memory is for --dry-run; without it the GPU of this machine is used")
    if shape is not None and input_file is not None:
        raise ConfigError("--input needs a tokenizer, which --shape does not have; name a model with --model")
    with model_folder(run.model, shape, revision=run.revision, quantization=run.quantization) as path:
        if dry_run and run.device == "auto":
            run = msgspec.structs.replace(run, device="cuda")
        gpus = None if total is None else [SmiGpu(index=0, uuid="", name="", total_bytes=total)]
        checkpoint = load_checkpoint(run, path)
        engines = resolve_engines(run, path, checkpoint, gpus=gpus)
        model, config = engines.model, engines.config
        if shape is not None:
            config = msgspec.structs.replace(config, load_format="dummy")
        lengths = None
        if input_file is not None:
            lengths = _file_lengths(model_of_rows(read_row_settings(run, path, checkpoint), engines), input_file)
        name = shape or run.model
        if not dry_run:
            check_ram(config, model, num_replicas=1, available=available_ram())
            with contextlib.suppress(CapacityError):  # loading reports exactly what is missing
                layout = resolve_layout(msgspec.structs.replace(run, data_parallel_size=1), config, model)
                if layout.why:
                    say(layout.why)
                config = layout.apply(config)
            return profile_by_loading(config, model, name, lengths=lengths, say=say)
        if config.device == "cpu":
            raise ConfigError("--dry-run plans for GPUs, but `device` is cpu; leave --dry-run out to profile a CPU run")
        total = total or gpu_memory_here()
        if total is None:
            raise ConfigError("--dry-run: this machine has no GPU to plan for; give --gpu-memory, such as 80GiB")
        return profile_from_config(config, model, name, total=total, lengths=lengths)


def gpu_size(text: str | None) -> int | None:
    """Return the bytes of a GPU's memory. A bare number means GiB, or bytes if it is too large for that."""
    try:
        size = parse_size(text)
        if size is not None and size <= _MOST_GIB:
            size = parse_size(f"{text}GiB")
    except ValueError:
        size = 0
    if size is not None and size < _LEAST_BYTES:
        raise ConfigError(f"--gpu-memory {text}: allowed: a size such as 80GiB, 80G or 80 (the same), or 85GB")
    return size


def _file_lengths(model: ResolvedModel, input_file: str) -> FileLengths:
    requests: list[tuple[int, int]] = []
    failed = 0
    for row in prepared_rows(model, input_file):
        if isinstance(row, PreparedRow):
            requests += [(row.num_prompt_tokens, row.max_tokens)] * row.sampling.num_samples
        else:
            failed += 1
    if not requests:
        raise ConfigError(f"--input {input_file}: none of its {failed} rows can be answered")
    return lengths_of(requests, failed_rows=failed, block_size=model.config.block_size)
