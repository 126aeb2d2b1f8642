"""Estimates how long a replica takes for its share of a job, from rough figures of GPUs.

    decode step     matrices: the longer of reading every weight and multiplying with it; reading each request's keys
                    and values, and its recurrent states, which are written too; a fixed time for each layer and for
                    each request; tp > 1: two all-reduces for each layer, or with attention by rows one. With stages:
                    all of them work at a time, each on a share of the requests
    requests a step no more than `max_num_seqs`, the replica's share of the job, and what the KV cache holds. Answers
                    are of all lengths up to twice the usual one: the last to run end one by one, in ever smaller steps
    prompts         matrix time, attention and all-reduces

The constants were read off H200s, with Qwen3 in bfloat16; of other GPUs they are what is published, scaled alike.
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
_LAYER_SECONDS = 30e-6
"""Extra time of a decode step per layer: small kernels and the gaps between them."""
_PIECE_LOSS = 0.03
"""Slowdown of operations with each halving of the matrices."""
_ROW_SECONDS = 3e-6
"""Extra time of a decode step per request: the sampler, and prompts in the same step."""
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
    """Rate of dense matrix products in 16 bits."""
    link_bytes_per_second: float
    """Bandwidth of links to other GPUs."""
    link_seconds: float
    """Minimum time of an all-reduce between two GPUs."""

    def all_reduce_seconds(self, num_ranks: int, num_bytes: float) -> float:
        if num_ranks == 1:
            return 0.0
        steps = math.log2(num_ranks)
        return steps * self.link_seconds + 2 * (num_ranks - 1) / num_ranks * num_bytes / self.link_bytes_per_second


_NVLINK = {"link_bytes_per_second": 380e9, "link_seconds": 2e-6}
_PCIE = {"link_bytes_per_second": 15e9, "link_seconds": 30e-6}
_SPEEDS = {
    "B200": GpuSpeed(6.5e12, 1400e12, **_NVLINK),
    "H200": GpuSpeed(4.3e12, 600e12, **_NVLINK),
    "H100": GpuSpeed(2.9e12, 600e12, **_NVLINK),
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
    # With attention by rows, what is gathered and scattered once a layer takes the place of one of two sums.
    num_sums = 1 if model.attention_dp else 2
    stage = largest_stage(model, pp)
    num_layers = len(model.decoder.stage_layers(stage))
    held = requests_held(num_tokens, config, model, lengths.prompt + lengths.answer)
    running = max(1.0, min(config.max_num_seqs, num_requests, held))
    costs = model_costs(model, config.dtype, tensor_parallel_size=tp, stage=stage, kv_dtype=config.kv_dtype)
    head = model_costs(model, config.dtype, tensor_parallel_size=tp, stage=Stage(pp - 1, pp)).lm_head
    operations = costs.operations_per_token + head.operations_per_row
    row_bytes = model.hidden_size * DTYPE_BYTES[config.dtype]
    kv_bytes = costs.kv_read_bytes(lengths.prompt + lengths.answer / 2) + costs.state_bytes_per_row
    flops = speed.flops_per_second / (1 + _PIECE_LOSS * math.log2(tp)) * _RATED_BYTES / DTYPE_BYTES[config.dtype]

    def step(rows: float) -> float:
        matrix_bytes = costs.matrix_read_bytes(rows) + head.num_bytes
        seconds = max(matrix_bytes / speed.bytes_per_second, operations * rows / flops)
        seconds += rows * (kv_bytes / speed.bytes_per_second + _ROW_SECONDS)
        return seconds + num_layers * (_LAYER_SECONDS + num_sums * speed.all_reduce_seconds(tp, rows * row_bytes))

    steps = lengths.answer * (num_requests / running - 1) * step(max(1.0, running / pp))
    steps += 2 * lengths.answer / len(_LEFT) * sum(step(max(1.0, left * running / pp)) for left in _LEFT)
    prompt_tokens = num_requests * lengths.computed
    prompts = (costs.operations_per_token + costs.state_flops_per_token) * prompt_tokens / flops
    prompts += sum(
        kind.flops_per_pair * prompt_tokens * min(lengths.prompt / 2, kind.window or math.inf) / flops
        for kind in costs.mixers
    )
    prompts += num_sums * num_layers * speed.all_reduce_seconds(tp, prompt_tokens * row_bytes)
    return pp * steps + prompts
