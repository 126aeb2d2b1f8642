"""The step shapes that are captured as CUDA graphs. Memory plans count them too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal

from nvcli.core.engine_config import UNEVEN_ROWS, EngineConfig
from nvcli.models.config import ModelConfig
from nvcli.models.tensor_spec import DTYPE_BYTES
from nvcli.sizing.costs import activation_elements, model_costs

_PREFILL_TOKENS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)
"""Prompt tokens of captured steps for models of every size, each with the maximum number of decode rows."""
_MORE_PREFILL_TOKENS = (3072, 4096, 6144, 8192, 12288, 16384)
"""For models that still launch slower than they compute at those sizes; the largest size that a step can hold is
added."""
_MATRIX_RATE = 550e12
"""Floating-point operations per second of such a model's matrix products (measured on an H200)."""
_BATCHED_TOKENS = 8192
"""Default maximum of tokens per step."""
_SMALL_MODEL_BATCHED_TOKENS = 16_384
"""Default for models that take as long to launch as to compute _LAUNCH_BOUND_TOKENS. In such models a step's fixed cost
counts for more: with 4,096 prompts of 200 to 600 tokens and answers of 1 to 8, Qwen3-0.6B makes 5,599 output tokens/s
on an H200, against 5,422 with 8,192 tokens per step. All these steps are captured; launched eagerly, they are 3 %
slower. Qwen3-30B-A3B, whose experts take many launches, makes 6,508 in the reference workload, against 6,413 with
8,192. GLM-4.7-Flash and DeepSeek-V2-Lite compute prompts of 8,000 to 24,000 tokens 4 % faster, the latter also those of
100 to 1,024: experts get more rows each, and latents of earlier steps are projected again in fewer steps."""
_LAUNCH_BOUND_TOKENS = 6144
_MOST_BATCHED_TOKENS = 32_768
_EXPERT_ROWS = 600
"""Rows for each expert of a step; steps that would give fewer are twice as long. On an H200 that makes prompts of 100
to 1,024 tokens, and of 8,000 to 24,000, so much faster: Nemotron-3-Nano with 384 rows, 4 and 5 %; Qwen3-Next in FP8
with 320, 3 and 5 %; Qwen3.5-35B-A3B with 512, 3 and 6 %, in FP8 4 and 8 %. The 1,024 of Qwen3-30B-A3B and GLM-4.7-Flash
gain nothing."""
_ACTIVATION_SHARE = 0.03
"""Share of a GPU's memory that the activations of such a longer step take at most."""
_MIN_PREFILL_ROWS = 32
_TOKENS_PER_PREFILL_ROW = 16
"""A captured step holds one chunk per this many prompt tokens, or the minimum."""
_MANY_SEQS = 64
"""With fewer requests, steps with many prompt tokens are too rare for their graphs to be worth the capture time; a lone
request has one."""

GraphSize = tuple[int, int, int]
"""(decode rows, prefill rows, prompt tokens)."""


def decode_sizes(max_num_decodes: int) -> list[int]:
    """Return ascending batch sizes to capture: padding costs at most a quarter, and the last is `max_num_decodes`
    itself."""
    sizes = [1, 2, 4, 8]
    step = 8
    while sizes[-1] < max_num_decodes:
        step = max(step, 1 << (sizes[-1].bit_length() - 3))
        sizes.append(sizes[-1] + step)
    return [size for size in sizes if size < max_num_decodes] + [max_num_decodes]


def default_batched_tokens(
    model: ModelConfig, device: Literal["cpu", "cuda"], gpu_bytes: Callable[[], int | None]
) -> int:
    """Return the default maximum of tokens per step, for a configuration that leaves it open. `gpu_bytes` returns the
    memory of a GPU (None: not known), and is asked only if that matters."""
    if device == "cpu":
        return _BATCHED_TOKENS
    is_small = launch_bound_tokens(model) >= _LAUNCH_BOUND_TOKENS
    num_tokens = _SMALL_MODEL_BATCHED_TOKENS if is_small else _BATCHED_TOKENS
    experts = model_costs(model, model.dtype).experts
    rows_per_token = experts.experts_per_token / experts.num_experts
    if num_tokens * rows_per_token < _EXPERT_ROWS:
        room = _ACTIVATION_SHARE * (gpu_bytes() or 0)
        activation_bytes = DTYPE_BYTES[model.dtype] * max(activation_elements(model, 1).values())
        most = min(_MOST_BATCHED_TOKENS, room / activation_bytes)
        while num_tokens * rows_per_token < _EXPERT_ROWS and 2 * num_tokens <= most:
            num_tokens *= 2
    return num_tokens


def launch_bound_tokens(model: ModelConfig, tensor_parallel_size: int = 1) -> int:
    """Return the number of tokens at which a step takes the GPU as long as launching its kernels takes the host."""
    costs = model_costs(model, model.dtype, tensor_parallel_size=tensor_parallel_size)
    seconds = sum(block.launch_seconds for layer in model.layers for block in layer.blocks)
    return int(seconds * _MATRIX_RATE / (2 * max(1, costs.weights_per_token)))


def bound_tokens_of_home(config: EngineConfig, model: ModelConfig) -> int:
    """Return one home's share of `launch_bound_tokens`."""
    return launch_bound_tokens(model, config.tensor_parallel_size) // config.num_homes


def step_graph_sizes(config: EngineConfig, model: ModelConfig) -> list[GraphSize]:
    """Return all sizes that a run's ranks capture, in the order of `graph_sizes`."""
    return graph_sizes(
        max_num_seqs=config.max_num_seqs,
        max_num_decodes=config.max_num_decodes,
        max_num_batched_tokens=config.max_num_batched_tokens,
        launch_bound_tokens=bound_tokens_of_home(config, model),
    )


def draft_graph_sizes(config: EngineConfig, widths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return the sizes of steps whose decode rows have drafts, captured when they are first used: (rows, tokens of all
    rows, most tokens of a row). In the first ones every row has as many tokens, in the others not."""
    all_rows = decode_sizes(config.max_num_decodes)
    sizes = [(rows, rows * width, width) for width in widths for rows in all_rows]
    if widths:
        most, means = config.most_of_uneven, config.uneven_draft_widths
        sizes += [(rows, int(mean * rows), most) for mean in means for rows in all_rows if rows >= UNEVEN_ROWS]
    most_tokens = config.max_draft_step_tokens
    return [size for size in sizes if size[1] <= most_tokens]


def may_share(decode_rows: int, max_shared_rows: int) -> bool:
    """Whether a size has a second graph, for steps whose decode rows share segments of keys. It is captured on first
    use, in runs in which up to `max_shared_rows` rows may share (0: none)."""
    return max_shared_rows > 0 and decode_rows > 1


def may_share_prefixes(size: GraphSize, max_shared_rows: int, launch_bound_tokens: int) -> bool:
    """Whether a size has graphs for steps whose prefill chunks share prefixes, likewise captured on first use. Steps
    larger than `launch_bound_tokens` need none: they launch faster than they compute, and most such steps are large."""
    _, prefill_rows, prefill_tokens = size
    return max_shared_rows > 0 and prefill_rows > 1 and prefill_tokens <= launch_bound_tokens


def may_absorb(prefill_tokens: int, num_stages: int, launch_bound_tokens: int) -> bool:
    """Whether a size has a graph for steps whose chunks do not attend to projected latents, in runs in which others do,
    likewise captured on first use. Steps larger than `launch_bound_tokens` need none, unless there are several pipeline
    stages: each chooses by its own layers, and all must pad a step alike."""
    return prefill_tokens > 0 and (num_stages > 1 or prefill_tokens <= launch_bound_tokens)


def graph_sizes(
    *, max_num_seqs: int, max_num_decodes: int, max_num_batched_tokens: int, launch_bound_tokens: int
) -> list[GraphSize]:
    """Return all sizes to capture, most tokens first, so that smaller ones reuse the memory of larger ones.

    A step with few prompt tokens is padded to the most decode rows. With many, each row of padding costs more than
    another graph, so there are sizes with fewer decode rows too; a step of maximum size is padded only by the gap
    between two numbers of decode rows.
    """
    sizes: set[GraphSize] = {(num_rows, 0, 0) for num_rows in decode_sizes(max_num_decodes)}

    def add(decode_rows: int, num_tokens: int) -> None:
        prefill_rows = min(max_num_seqs, num_tokens, max(_MIN_PREFILL_ROWS, num_tokens // _TOKENS_PER_PREFILL_ROW))
        sizes.add((decode_rows, prefill_rows, num_tokens))

    for num_tokens in _PREFILL_TOKENS if max_num_seqs > 1 else ():
        if num_tokens < max_num_batched_tokens:
            add(max_num_decodes, num_tokens)
    reach = _SMALL_MODEL_BATCHED_TOKENS if launch_bound_tokens >= _BATCHED_TOKENS else _PREFILL_TOKENS[-1]
    most = min(max_num_batched_tokens, max(launch_bound_tokens, reach))
    if max_num_seqs >= _MANY_SEQS:
        decode_rows = [max_num_decodes // 4, max_num_decodes // 2, max_num_decodes]
        for num_tokens in _MORE_PREFILL_TOKENS:
            if num_tokens < most:
                add(decode_rows[0], num_tokens)
                add(max_num_decodes, num_tokens)
        if most == max_num_batched_tokens:
            for fewer, more in pairwise([0, *decode_rows]):
                add(more, most - fewer)
    return sorted(sizes, key=lambda size: (size[0] + size[2], size), reverse=True)
