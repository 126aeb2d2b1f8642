"""KV groups: which layers of a model share KV blocks, and how large these blocks are. Torch-free.

A sequence has a list of blocks for each group. Full-attention layers keep the blocks of the whole sequence; layers with
a window free blocks that the window has passed. Layers with different windows are therefore in different groups, and so
are layers whose keys differ in shape. All groups take as nearly as possible the same number of bytes per token, so that
one pool of equal-sized blocks serves them all (as in vLLM's hybrid KV cache manager, vllm/v1/core/kv_cache_utils.py).

A layer may keep several things, each in a group of its own (`AttentionSpec.kept`). Of keys that stand for several
tokens a block holds those of several columns, and where these would be too many, fewer keys than fit.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from nvcli.attention.kv_layout import STATE_ALIGNMENT, KVDtype
from nvcli.attention.spec import AttentionSpec, CacheSpec, CompressedKeys, StateSpec
from nvcli.core.messages import MAX_KV_GROUPS, KVGroup
from nvcli.kernels.whole_numbers import ceil_div, round_up
from nvcli.models.config import ModelConfig
from nvcli.models.mixers.mixer import Mixer
from nvcli.models.tensor_spec import StoredDtype
from nvcli.worker.distributed.stage import WHOLE, Stage

_FULL_PADDING_COST = 8
"""Cost of an unused layer slot in a full-attention group, which wastes memory in every block of a sequence. In a group
with a window it does so only in the blocks that the window covers: that costs 1, and so does one more group."""


class _Layers(NamedTuple):
    """The layers of a group in the whole model, and a mixer of one of them: all keep the same things."""

    mixer: Mixer
    numbers: tuple[int, ...]
    place: int = 0
    """The place of these things among all that such a mixer keeps (`AttentionSpec.kept`)."""

    def spec(self, tensor_parallel_size: int = 1) -> CacheSpec:
        """Return the spec of what the layers keep on one rank."""
        return self.mixer.kv_spec(tensor_parallel_size).kept[self.place]


class _Kind(NamedTuple):
    """The properties that all layers of a group share."""

    place: int
    window: int | None
    num_kv_heads: int
    head_dim: int
    num_parts: int
    rate: int
    num_shares: int
    """The columns of a block are so many times those of its keys."""

    @classmethod
    def of(cls, spec: AttentionSpec, place: int) -> _Kind:
        """Return the kind of what a mixer keeps in that place."""
        sizes = spec.num_kv_heads, spec.head_dim, spec.num_parts
        return cls(place, spec.window, *sizes, spec.rate, spec.rate // spec.span)

    @property
    def elements(self) -> int:
        """The elements of one layer's keys and values in a block, for each token of a column."""
        return ceil_div(self.num_parts * self.num_kv_heads * self.head_dim, self.num_shares)


@lru_cache(maxsize=64)  # plans ask for the same few stages many times
def kv_groups(config: ModelConfig, stage: Stage = WHOLE) -> tuple[KVGroup, ...]:
    """Return the KV groups of a stage. Every stage has the same groups in the same order, each with the stage's own
    layers."""
    held = _held_layers(config, stage)
    groups = []
    for of_group in _whole_groups(config):
        spec = of_group.spec()
        layers = tuple(number - held.start for number in of_group.numbers if number in held)
        groups.append(KVGroup(window=spec.window, is_state=spec.is_state, layers=layers, span=spec.span))
    return tuple(groups)


def layer_specs(config: ModelConfig, tensor_parallel_size: int, stage: Stage = WHOLE) -> tuple[CacheSpec, ...]:
    """Return the KV-cache spec of each mixer of a stage, in the order of layers and of the mixers of a layer, on one
    rank; in the last stage those of a draft head follow. Layers of one KV group that attend alike have equal specs."""
    numbers, mixers = _held_layers(config, stage), config.mixers
    size = config.attention_ranks(tensor_parallel_size)
    owners = [*config.decoder.kv_owners, *range(config.num_layers, len(mixers))]
    group_of = {
        (layer, of_group.place, of_group.spec() if group.is_state else None): number
        for number, (group, of_group) in enumerate(zip(kv_groups(config, stage), _whole_groups(config), strict=True))
        for layer in group.layers
    }

    def spec_of(mixer: Mixer, number: int) -> CacheSpec:
        layer = owners[number] - numbers.start
        state = whole if isinstance(whole := mixer.kv_spec(), StateSpec) else None
        spec = mixer.kv_spec(size, group_of[layer, 0, state])
        if isinstance(spec, StateSpec) or spec.compressed is None:
            return spec
        kept = [replace(one, kv_group=group_of[layer, place, None]) for place, one in enumerate(spec.compressed, 1)]
        return replace(spec, compressed=CompressedKeys(*kept))

    return tuple(spec_of(mixer, number) for number in numbers for mixer in mixers[number])


def _held_layers(config: ModelConfig, stage: Stage) -> range:
    """Return the numbers of the layers that a stage has in its KV cache."""
    numbers = config.decoder.stage_layers(stage)
    return range(numbers.start, len(config.mixers)) if stage.is_last else numbers


@lru_cache(maxsize=64)
def block_bytes(
    config: ModelConfig,
    dtype: StoredDtype,
    *,
    block_size: int,
    tensor_parallel_size: int = 1,
    stage: Stage = WHOLE,
    kv_dtype: KVDtype | None = None,
) -> int:
    """Return the bytes of one KV block on one rank: the keys and values of `block_size` tokens, or the state, in all
    layers of the group that needs most. `kv_dtype` is the type of keys and values; None: the model's `dtype`."""
    keys, state = group_bytes(
        config,
        dtype,
        block_size=block_size,
        tensor_parallel_size=tensor_parallel_size,
        stage=stage,
        kv_dtype=kv_dtype,
    )
    return keys if state == 0 else round_up(max(keys, state), STATE_ALIGNMENT)


@lru_cache(maxsize=64)
def group_bytes(
    config: ModelConfig,
    dtype: StoredDtype,
    *,
    block_size: int,
    tensor_parallel_size: int = 1,
    stage: Stage = WHOLE,
    kv_dtype: KVDtype | None = None,
) -> tuple[int, int]:
    """Return the bytes that the layers of the largest KV group take on one rank: for the keys and values of
    `block_size` tokens, and for a recurrent state (0 if no layer has one)."""
    most, states = 0, 0
    for of_group, group in zip(_whole_groups(config), kv_groups(config, stage), strict=True):
        spec = of_group.spec(config.attention_ranks(tensor_parallel_size))
        num_bytes = len(group.layers) * spec.block_bytes(block_size, dtype, kv_dtype or dtype)
        if group.is_state:
            states = max(states, num_bytes)
        else:
            most = max(most, num_bytes)
    return most, states


def blocks_needed(config: ModelConfig, num_tokens: int, *, block_size: int, chunk: int) -> int:
    """Return the most blocks that a sequence of `num_tokens` holds at once, over all groups.

    `chunk` is the most tokens that one step computes for it: blocks that a window has left are freed between steps.
    """
    return sum(group.most_blocks(num_tokens, block_size, chunk) for group in kv_groups(config))


@lru_cache(maxsize=64)
def _whole_groups(config: ModelConfig) -> tuple[_Layers, ...]:
    """Return the layers of each group of the whole model, with kinds in the order of their first layers."""
    kinds: dict[_Kind, list[int]] = {}
    with_states: dict[StateSpec, list[int]] = {}
    mixers: dict[_Kind | StateSpec, Mixer] = {}
    besides: dict[_Kind, list[int]] = {}
    for number, of_layer in enumerate(config.mixers):
        for mixer in of_layer:
            kept: tuple[CacheSpec, ...] = mixer.kv_spec().kept
            for place, spec in enumerate(kept):
                if isinstance(spec, StateSpec):
                    mixers.setdefault(spec, mixer)
                    with_states.setdefault(spec, []).append(number)
                elif mixer.reads_kv_of is None:
                    kind = _Kind.of(spec, place)
                    mixers.setdefault(kind, mixer)
                    (besides if place else kinds).setdefault(kind, []).append(number)
    kinds |= besides  # behind all keys of tokens, so that these are in the first group of a layer
    size = _block_elements({kind: len(numbers) for kind, numbers in kinds.items()}) if kinds else 0
    groups: list[_Layers] = []
    for kind, numbers in kinds.items():
        count = ceil_div(len(numbers), size // kind.elements)
        # Every count-th layer, so that each pipeline stage has about as many layers of each group.
        groups += [_Layers(mixers[kind], tuple(numbers[first::count]), kind.place) for first in range(count)]
    for index, (state, numbers) in enumerate(with_states.items()):
        # A state is as large as the keys of many tokens, so groups with the fewest layers have the smallest blocks.
        count = (MAX_KV_GROUPS - len(groups)) // (len(with_states) - index)
        per_group = ceil_div(len(numbers), count)
        count = ceil_div(len(numbers), per_group)
        groups += [_Layers(mixers[state], tuple(numbers[first::count])) for first in range(count)]
    return tuple(groups)


def _block_elements(counts: dict[_Kind, int]) -> int:
    """Choose a block's elements per token so that there are few groups with few unused layer slots. Blocks that hold
    all layers of a kind give one group per kind, and no model has more than `MAX_KV_GROUPS` kinds."""
    least = min(kind.elements for kind in counts)

    def cost(size: int) -> float:
        total, all_groups = 0.0, 0
        for kind, count in counts.items():
            num_groups = ceil_div(count, size // kind.elements)
            all_groups += num_groups
            padding = (num_groups * size - count * kind.elements) / least
            total += num_groups + padding * (_FULL_PADDING_COST if kind.window is None else 1)
        return total if all_groups <= MAX_KV_GROUPS else math.inf

    largest = max(kind.elements for kind in counts)
    sizes = {kind.elements * number for kind, count in counts.items() for number in range(1, count + 1)}
    return min(sorted((size for size in sizes if size >= largest), reverse=True), key=cost)
