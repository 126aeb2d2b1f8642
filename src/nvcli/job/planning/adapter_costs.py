"""Chooses the LoRA adapters of a job that are merged into the weights in turn, rather than run beside others in every
step.

Requests of an adapter that is merged take as long as those of the base model, but the weights must be changed before
and after them. Beside others each step takes longer, by kernels for each linear layer. As the tail of a group of
requests runs beside those of other groups anyway (`engine.merged_adapter`), merging saves the longer steps of all but
the tail. An adapter is merged if that is more than two changes of the weights take, and if together the adapters save
more than the start takes longer.

The constants were read off one H200, with an 8B model and adapters of rank 16 on all linear layers: steps of 256
requests took 1.1 ms longer with them, and a change of 13 GiB of weights 11 ms with their base on the GPU, 236 ms with
their base in RAM.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nvcli.core.engine_config import EngineConfig
from nvcli.core.lora_config import BASE_SHARE
from nvcli.job.planning.job_time import GpuSpeed
from nvcli.models.adapters.adapter import Adapter
from nvcli.models.config import ModelConfig
from nvcli.models.geometry import model_tensors
from nvcli.models.kv_groups import kv_groups
from nvcli.models.tensor_info import LowRankChange
from nvcli.models.tensor_spec import DTYPE_BYTES

_LINEAR_SECONDS = 4.5e-6
"""Extra time of a step for each projection that adapters change, of which that model has 252."""
_START_SECONDS = 2.0
"""Extra time of a start that captures graphs of steps with and without adapters."""
_PASSES = 4
"""Times that a change of the weights reads or writes them, if their base is on the GPU."""
_RAM_BYTES_PER_SECOND = 59e9
"""Rate at which a GPU reads them from RAM."""
_TAIL_WAVES = 0.5
"""The tail of a group, in the tokens of as many requests as run at a time, if it may rest while the next group runs.
Where a quarter of these have ended, it is 0.3 of them for lengths up to three times the shortest, and 0.7 for lengths
that vary most. A tail that may not rest is 1: the next group's requests run beside it."""
_PROMPT_TOKENS = 512
"""Assumed length of a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterWork:
    """The work of a job under one adapter."""

    num_requests: int
    answer_tokens: float
    """Mean length of the answers that is expected."""


def choose_merged(
    work: Mapping[int, AdapterWork],
    adapters: Mapping[int, Adapter],
    model: ModelConfig,
    config: EngineConfig,
    speed: GpuSpeed,
    *,
    gpu_bytes: int | None,
) -> tuple[int, ...]:
    """Return the adapters, by their numbers, that are to be merged. `gpu_bytes` is the memory of a GPU; None: unknown,
    or a CPU."""
    saved: dict[int, float] = {}
    tail = 1.0 if any(group.is_state for group in kv_groups(model)) else _TAIL_WAVES
    for number, adapter in adapters.items():
        mine = work.get(number)
        if mine is None or mine.num_requests < config.max_num_seqs:
            continue
        changed = _changed(adapter.changes, model, config)
        weights = sum(one.num_bytes for one in changed)
        num_waves = mine.num_requests / config.max_num_seqs - tail
        step = len(changed) * _LINEAR_SECONDS
        flops = sum(one.flops_per_token for one in changed)
        prompts = config.max_num_seqs * _PROMPT_TOKENS * 2 * flops / speed.flops_per_second
        gain = num_waves * (mine.answer_tokens * step + prompts)
        gain -= 2 * _change_seconds(weights, model, config, speed, gpu_bytes)
        if gain > 0:
            saved[number] = gain
    is_first = config.device == "cuda" and not config.merged_adapters
    return tuple(saved) if sum(saved.values()) > is_first * _START_SECONDS else ()


@dataclass(frozen=True, slots=True)
class _Changed:
    """A rank's part of a weight that an adapter changes."""

    num_bytes: float
    flops_per_token: float
    """Operations of the adapter's own product."""


def _changed(changes: Mapping[str, Iterable[object]], model: ModelConfig, config: EngineConfig) -> list[_Changed]:
    size, found = config.tensor_parallel_size, []
    for tensor in model_tensors(model, config.dtype):
        for name in tensor.stored_names:
            ranks = [one.down.shape[0] for one in changes.get(name, ()) if isinstance(one, LowRankChange)]
            if ranks:
                rows, columns = tensor.stored_shape
                found.append(
                    _Changed(rows * columns * DTYPE_BYTES[tensor.dtype] / size, 2 * ranks[0] * (rows + columns) / size)
                )
    return found


def _change_seconds(
    num_bytes: float, model: ModelConfig, config: EngineConfig, speed: GpuSpeed, gpu_bytes: int | None
) -> float:
    """Estimate the time that a change of `num_bytes` of weights takes."""
    if gpu_bytes is None:
        return _PASSES * num_bytes / speed.bytes_per_second
    weights = sum(tensor.kept_bytes(config.tensor_parallel_size) for tensor in model_tensors(model, config.dtype))
    if num_bytes <= BASE_SHARE * max(0, gpu_bytes - weights):
        return _PASSES * num_bytes / speed.bytes_per_second
    return num_bytes / _RAM_BYTES_PER_SECOND
