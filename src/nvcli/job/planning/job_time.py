"""Estimates how long a replica takes for its share of a job, from rough figures of GPUs.

    decode step     matrices: reading every weight and multiplying with it, which overlap in part; reading each
                    request's keys and values, and its recurrent states, which are written too; writing and reading
                    activations; a fixed time for each kernel; tp > 1: a sum for each block, or with attention by rows
                    one for each MLP. With stages: all of them work at a time, each on a share of the requests, and
                    wait for the tokens that come back
    requests a step no more than `max_num_seqs`, the replica's share of the job, and what the KV cache holds. Answers
                    are of all lengths up to twice the usual one: the last to run end one by one, in ever smaller steps
    prompts         matrix time, activations, attention and sums

The constants were read off H200s; of other GPUs they are what is published, scaled alike. scripts/layout_times.py
compares the estimate with measured runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nvcli.core.engine_config import EngineConfig
from nvcli.models.config import ModelConfig
from nvcli.models.tensor_spec import DTYPE_BYTES
from nvcli.sizing.costs import model_costs
from nvcli.sizing.kv_cache import requests_held
from nvcli.sizing.weights import largest_stage
from nvcli.worker.distributed.stage import Stage

_LEFT = (0.875, 0.625, 0.375, 0.125)
"""Share of the last requests that still run, in each quarter of the time until they have ended."""
_MEAN_ANSWERED = 2 / 3
"""Part of an answer of mean length that a decode row has before it, in the mean over all rows: longer answers have more
of them."""
_KERNEL_SECONDS = 3.5e-6
"""Extra time of each kernel: its start and end, and the gap before it. One of Qwen3-0.6B takes 2.8 µs, of 8B 4.6."""
_ROW_SECONDS = 1e-6
"""Extra time of a decode step per request: the sampler, and prompts in the same step."""
_W4_FACTORS = {"w4a16": 2, "w4a8": 1.5}
"""Time of reading 4-bit weights, which are decoded, relative to others of as many bytes: the experts of gpt-oss-20b
take 196 and 146 µs for 64 tokens, and their bytes 98."""
_ATTENTION_SHARE = 0.7
"""Rate of the products in the attention of prompts, relative to other products: 8,000 to 24,000 tokens."""
_GATHER_SECONDS = 25e-6
"""Extra time of a sum with attention by rows: a gather and a scattered sum by NCCL, 12 µs and more each, in place of
one kernel."""
_TURN_SECONDS = 1.5e-3
"""Time until the tokens of the last stage have become a step of the first one, which has nothing else to do: what
Qwen3-8B takes longer with two stages than otherwise estimated."""
_RATED_BYTES = 2
"""Bytes of the type for which rates of matrix products are given; a type twice as wide counts as half as fast."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The mean lengths of a job's requests, in tokens."""

    prompt: float
    computed: float
    """Prompt tokens that are not in the prefix cache."""
    answer: float


@dataclass(frozen=True, slots=True)
class GpuSpeed:
    """Approximate speeds of a kind of GPU."""

    bytes_per_second: float
    """Memory bandwidth."""
    flops_per_second: float
    """Rate of dense matrix products in 16 bits, which the GPU's power limits."""
    link_bytes_per_second: float
    """Bandwidth of links to other GPUs."""
    link_seconds: float
    """Minimum time of an all-reduce between two GPUs."""

    def all_reduce_seconds(self, num_ranks: int, num_bytes: float) -> float:
        if num_ranks == 1:
            return 0.0
        steps = math.log2(num_ranks)
        return steps * self.link_seconds + 2 * (num_ranks - 1) / num_ranks * num_bytes / self.link_bytes_per_second


# Sums on H200s: on two 13 µs for 2 MB and 60 for 17, on four 17.6 for 2 MB and 450 for 84.
_NVLINK = {"link_bytes_per_second": 280e9, "link_seconds": 4e-6}
_PCIE = {"link_bytes_per_second": 15e9, "link_seconds": 30e-6}
_SPEEDS = {
    "B200": GpuSpeed(6.5e12, 1500e12, **_NVLINK),
    "H200": GpuSpeed(4.3e12, 660e12, **_NVLINK),
    "H100": GpuSpeed(2.9e12, 660e12, **_NVLINK),
    "A100": GpuSpeed(1.6e12, 250e12, **_NVLINK),
    "L40": GpuSpeed(0.75e12, 200e12, **_PCIE),
}
"""Speeds of known GPUs, by a part of their name."""
_OTHER_SPEED = GpuSpeed(0.75e12, 130e12, **_PCIE)


def is_known_gpu(name: str) -> bool:
    """Tell whether the speed of a GPU with this name is known."""
    return any(part in name for part in _SPEEDS)


def gpu_speed(name: str) -> GpuSpeed:
    """Return the speed of a GPU by its name; of an unknown one, a guess."""
    return next((speed for part, speed in _SPEEDS.items() if part in name), _OTHER_SPEED)


def replica_seconds(
    model: ModelConfig,
    config: EngineConfig,
    speed: GpuSpeed,
    num_requests: float,
    num_tokens: float,
    lengths: Lengths,
) -> float:
    """Estimate the seconds that a running replica takes for `num_requests`.

    `num_tokens` is what its KV cache holds.
    """
    tp, pp = config.tensor_parallel_size, config.pipeline_parallel_size
    stage = largest_stage(model, pp)
    held = requests_held(num_tokens, config, model, lengths.prompt + lengths.answer)
    running = max(1.0, min(config.max_num_seqs, num_requests, held))
    costs = model_costs(model, config.dtype, tensor_parallel_size=tp, stage=stage, kv_dtype=config.kv_dtype)
    head = model_costs(model, config.dtype, tensor_parallel_size=tp, stage=Stage(pp - 1, pp)).lm_head
    operations = costs.operations_per_token + head.operations_per_row
    read_factor = _W4_FACTORS.get(model.quantization, 1)
    hidden_bytes = model.hidden_size * DTYPE_BYTES[config.dtype]
    row_bytes = costs.kv_read_bytes(lengths.prompt + lengths.answer * _MEAN_ANSWERED) + costs.state_bytes_per_row
    row_bytes += 2 * costs.activation_bytes
    flops = speed.flops_per_second * _RATED_BYTES / DTYPE_BYTES[config.dtype]
    fixed = costs.num_kernels * _KERNEL_SECONDS
    if pp > 1:
        fixed += _TURN_SECONDS / pp
    if model.attention_dp and tp > 1:
        fixed += costs.num_sums * _GATHER_SECONDS

    def step(rows: float) -> float:
        matrix_bytes = costs.matrix_read_bytes(rows) * read_factor + head.num_bytes
        seconds = math.hypot(matrix_bytes / speed.bytes_per_second, operations * rows / flops)
        seconds += rows * (row_bytes / speed.bytes_per_second + _ROW_SECONDS)
        return fixed + seconds + costs.num_sums * speed.all_reduce_seconds(tp, rows * hidden_bytes)

    longest = 2 * lengths.answer * running / (running + 1)
    steps = lengths.answer * (num_requests / running - 1) * step(max(1.0, running / pp))
    steps += longest / len(_LEFT) * sum(step(max(1.0, left * running / pp)) for left in _LEFT)
    prompt_tokens = num_requests * lengths.computed
    of_token = (costs.operations_per_token + costs.state_flops_per_token) / flops
    of_token += 2 * costs.activation_bytes / speed.bytes_per_second
    of_token += sum(
        kind.prompt_flops_per_pair * min(lengths.prompt / 2, kind.window or math.inf) / (_ATTENTION_SHARE * flops)
        for kind in costs.mixers
    )
    sums = costs.num_sums * speed.all_reduce_seconds(tp, prompt_tokens * hidden_bytes)
    return pp * steps + prompt_tokens * of_token + sums
