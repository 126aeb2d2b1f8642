"""KV groups: which layers of a model keep the same KV blocks, and how large those blocks are. Torch-free.

A sequence has a list of blocks for each group. Layers of full attention keep the blocks of the whole sequence; layers
with a window free those that the window has left behind, so layers with different windows are in different groups. All
groups have equally many layers, as nearly as they can, so that one pool of equally large blocks serves them all (as in
vLLM's hybrid KV cache manager, vllm/v1/core/kv_cache_utils.py).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from nvcli.distributed.stage import WHOLE, Stage
from nvcli.models.config import ModelConfig
from nvcli.models.geometry import DTYPE_BYTES, StoredDtype

_FULL_PADDING_COST = 4
"""A place without a layer in a group of full attention wastes memory of every block that a sequence has ever filled; in
a group with a window only of those that the window covers. The cost of the latter, and of one more group, is 1."""


class KVGroup(NamedTuple):
    """The layers of one stage that keep the same blocks."""

    window: int | None
    """How many tokens each token attends to, itself included; None: all before it."""
    layers: tuple[int, ...]
    """Their numbers in the stage, from 0, in ascending order. A stage may have none of a group."""


@lru_cache(maxsize=64)  # plans ask for the same few stages many times
def kv_groups(config: ModelConfig, stage: Stage = WHOLE) -> tuple[KVGroup, ...]:
    """The KV groups of a stage. Every stage has the same groups in the same order, each with the layers it holds."""
    held = stage.layers(config.num_layers)
    return tuple(
        KVGroup(window, tuple(number - held.start for number in numbers if number in held))
        for window, numbers in _whole_groups(config.layer_windows)
    )


def block_bytes(
    config: ModelConfig, dtype: StoredDtype, *, block_size: int, tensor_parallel_size: int = 1, stage: Stage = WHOLE
) -> int:
    """The bytes of one KV block on one rank: keys and values of `block_size` tokens in each layer of a group."""
    num_layers = max(len(group.layers) for group in kv_groups(config, stage))
    per_layer = 2 * kv_heads_per_rank(config, tensor_parallel_size) * config.head_dim * DTYPE_BYTES[dtype]
    return num_layers * block_size * per_layer


def kv_heads_per_rank(config: ModelConfig, tensor_parallel_size: int) -> int:
    """How many KV heads each rank has. With fewer KV heads than ranks, neighbouring ranks hold the same one."""
    return max(1, config.num_kv_heads // tensor_parallel_size)


def blocks_needed(config: ModelConfig, num_tokens: int, *, block_size: int, chunk: int) -> int:
    """The most blocks that a sequence of `num_tokens` holds at a time, over all groups.

    `chunk` is the most tokens that one step computes for it: blocks behind a window are freed between steps.
    """
    total = 0
    for group in kv_groups(config):
        blocks = -(-num_tokens // block_size)
        if group.window is not None:
            seen = min(num_tokens, group.window - 1 + chunk)
            blocks = min(blocks, -(-seen // block_size) + 1)  # the first of them may begin before the window
        total += blocks
    return total


def _whole_groups(windows: tuple[int | None, ...]) -> list[tuple[int | None, tuple[int, ...]]]:
    """(window, layers) of each group of the whole model, kinds in the order of their first layers."""
    kinds: dict[int | None, list[int]] = {}
    for number, window in enumerate(windows):
        kinds.setdefault(window, []).append(number)
    size = _group_size({window: len(numbers) for window, numbers in kinds.items()})
    groups = []
    for window, numbers in kinds.items():
        count = -(-len(numbers) // size)
        # Every count-th layer: so each stage of a pipeline has about as many layers of each group.
        groups += [(window, tuple(numbers[first::count])) for first in range(count)]
    return groups


def _group_size(counts: dict[int | None, int]) -> int:
    """How many layers a group has: few groups, and few places in them that no layer fills."""

    def cost(size: int) -> int:
        total = 0
        for window, count in counts.items():
            num_groups = -(-count // size)
            padding = num_groups * size - count
            total += num_groups + padding * (_FULL_PADDING_COST if window is None else 1)
        return total

    return min(range(max(counts.values()), 0, -1), key=cost)
