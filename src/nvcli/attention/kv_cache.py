"""KVCache: the paged keys and values, or recurrent states, of all layers, and the layout that every backend reads.

A KV group is a list of layers that keep the same blocks. All groups share one pool of equally large blocks: block b of
a group holds, for each layer of that group, the keys and values of `block_size` tokens, or the recurrent state after
the last of them that is computed. Block 0 is the null block: padding writes there, and table entries that stand for no
block point to it. The engine never hands it out.

Keys and values may be kept in another type than the model's. In FP8 each layer's part of a block is its e4m3 numbers
[block_size, num_kv_heads, head_dim], and after them their scales [num_kv_heads, block_size] in bfloat16
(`kernels/fp8_kv.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.kv_layout import STATE_ALIGNMENT, KVDtype, part_bytes
from nvcli.attention.spec import AttentionSpec, StateSpec
from nvcli.kernels.fp8_kv import KVScales
from nvcli.kernels.fp8_types import FP8
from nvcli.kernels.key_copies import KeyCopies, copy_keys
from nvcli.kernels.whole_numbers import round_up

NULL_BLOCK = 0


def torch_kv_dtype(kv_dtype: KVDtype) -> torch.dtype:
    """Return the type of keys and values by its name."""
    dtype: torch.dtype = FP8 if kv_dtype == "fp8" else getattr(torch, kv_dtype)
    return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The shape of one rank's cache."""

    group_layers: tuple[tuple[int, ...], ...]
    """The numbers of each KV group's layers, counted from the rank's first layer."""
    group_heads: tuple[tuple[int, int], ...]
    """(KV heads of this rank, head size) of each KV group's layers."""
    block_size: int
    dtype: torch.dtype
    """The model's type, also used for the convolution inputs of states."""
    kv_dtype: torch.dtype | None = None
    """The type of keys and values; None: the model's."""
    group_states: tuple[StateSpec | None, ...] = ()
    """The state of each KV group's layers; None: they have keys and values. Empty where no group has states."""
    group_value_dims: tuple[int | None, ...] = ()
    """The size of the values of each KV group's layers, where it is not that of their keys. Empty where it is in all
    groups."""
    latent_groups: tuple[int, ...] = ()
    """The KV groups whose values are a part of their keys."""
    group_keys: tuple[int, ...] = ()
    """The keys in a block of each KV group. Empty where they are `block_size` in all groups."""

    @classmethod
    def of_layers(
        cls,
        layers: Sequence[AttentionSpec | StateSpec],
        group_layers: tuple[tuple[int, ...], ...],
        *,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> KVCacheSpec:
        """Make the cache of a rank's layers, each with one spec or several. A group without layers takes no space in a
        block."""
        of_group = {spec.kv_group: spec for layer in layers for spec in layer.kept}
        first = [of_group[number] if group else None for number, group in enumerate(group_layers)]
        heads = tuple(
            (spec.num_kv_heads, spec.head_dim) if isinstance(spec, AttentionSpec) else (0, 0) for spec in first
        )
        states = tuple(spec if isinstance(spec, StateSpec) else None for spec in first)
        kinds = [spec if isinstance(spec, AttentionSpec) else None for spec in first]
        value_dims = tuple(None if kind is None else kind.value_dim for kind in kinds)
        return cls(
            group_layers=group_layers,
            group_heads=heads,
            block_size=block_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
            group_states=states if any(states) else (),
            group_value_dims=value_dims if any(value_dims) else (),
            latent_groups=tuple(number for number, kind in enumerate(kinds) if kind and not kind.has_values),
            group_keys=tuple(block_size if kind is None else kind.block_keys(block_size) for kind in kinds)
            if any(kind and kind.rate > 1 for kind in kinds)
            else (),
        )

    @property
    def num_groups(self) -> int:
        return len(self.group_layers)

    @property
    def state_groups(self) -> tuple[int, ...]:
        """The KV groups whose layers have states."""
        return tuple(number for number, state in enumerate(self.group_states) if state is not None)

    @property
    def is_uniform(self) -> bool:
        """Whether the keys of all layers have one shape."""
        shapes = {shape for shape in zip(self.group_heads, self.value_dims, strict=True) if shape[0] != (0, 0)}
        return not self.group_states and not self.group_keys and len(shapes) == 1

    @property
    def value_dims(self) -> tuple[int | None, ...]:
        """`group_value_dims`, for all groups."""
        return self.group_value_dims or (None,) * self.num_groups

    def num_keys(self, group: int) -> int:
        """The keys in a block of a group."""
        return self.group_keys[group] if self.group_keys else self.block_size

    def num_parts(self, group: int) -> int:
        """The parts of a block for each layer of a group: keys, and values where they are kept apart."""
        return 1 if group in self.latent_groups else 2

    @property
    def stored_dtype(self) -> torch.dtype:
        """The type of keys and values."""
        return self.kv_dtype or self.dtype

    @property
    def has_scales(self) -> bool:
        """Whether keys and values have scales beside them."""
        return self.stored_dtype == FP8

    @property
    def unit(self) -> torch.dtype:
        """The type of the pool's elements: bytes where a block mixes several types."""
        return torch.uint8 if self.has_scales else self.stored_dtype

    def part_elements(self, group: int) -> int:
        """The elements of one layer's keys in a block of a group, with their scales."""
        num_keys, heads = self.num_keys(group), self.group_heads[group]
        return part_bytes(num_keys, *heads, "fp8") if self.has_scales else num_keys * heads[0] * heads[1]

    def token_bytes(self, group: int) -> int:
        """The bytes of one key and value in all layers of a group, with their scales."""
        elements = self.part_elements(group) * self.unit.itemsize // self.num_keys(group)
        return self.num_parts(group) * len(self.group_layers[group]) * elements

    @property
    def block_elements(self) -> int:
        """The elements of one block: keys and values, or states, of all layers of the largest group."""
        most = max(
            self.num_parts(group) * len(layers) * self.part_elements(group)
            for group, layers in enumerate(self.group_layers)
        )
        if not self.group_states:
            return most
        states = max(
            len(layers) * state.num_bytes(self.dtype.itemsize)
            for layers, state in zip(self.group_layers, self.group_states, strict=True)
            if state is not None
        )
        needed = max(most * self.unit.itemsize, states)
        return round_up(needed, STATE_ALIGNMENT) // self.unit.itemsize

    @property
    def block_bytes(self) -> int:
        return self.block_elements * self.unit.itemsize


class KVCache:
    """The keys and values of each layer, as two tensors [num_blocks, block_size, num_kv_heads, head_dim]; values that
    are smaller have the strides of keys, and those that are a part of the keys are a view of them.

    Where all layers have keys of one shape, a layer's blocks lie one after the other. Otherwise the layers of a block
    do, because a block of one shape must lie where a block of another would.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device, memory: Tensor | None = None) -> None:
        """`memory`: zeros [num_blocks × block_bytes] uint8 on `device` to keep the cache in; None: make them."""
        self.spec = spec
        self.num_blocks = num_blocks
        # Zeros, not empty: masked positions are multiplied by 0, and 0 × NaN is NaN.
        if memory is not None:
            memory = memory.view(spec.unit)
        elif device.type == "cpu":
            # numpy's zeros are pages that the system clears when they are first touched; torch's are written here.
            pages = np.zeros(num_blocks * spec.block_bytes, dtype=np.uint8)
            memory = torch.from_numpy(pages).view(spec.unit)
        else:
            memory = torch.zeros(num_blocks * spec.block_elements, dtype=spec.unit, device=device)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._of_groups: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._scales: dict[int, KVScales] = {}
        self._blocks_dim = 2 if spec.is_uniform else 0
        if spec.is_uniform:
            group = next(group for group, heads in enumerate(spec.group_heads) if heads != (0, 0))
            heads = spec.group_heads[group]
            self.data = memory.view(-1, spec.num_parts(group), num_blocks, spec.part_elements(group))
            if not spec.has_scales:
                self.data = self.data.unflatten(3, (spec.block_size, *heads))  # type: ignore[no-untyped-call]
            for number, layers in enumerate(spec.group_layers):
                for place, layer in enumerate(layers):
                    self._add_layer(layer, number, self.data[place].unbind(0))
        else:
            self.data = memory.view(num_blocks, spec.block_elements)
            for number, layers in enumerate(spec.group_layers):
                heads, num_parts = spec.group_heads[number], spec.num_parts(number)
                if heads == (0, 0):
                    continue
                size = num_parts * spec.part_elements(number)
                for place, layer in enumerate(layers):
                    parts = self.data[:, place * size : (place + 1) * size].chunk(num_parts, dim=1)
                    self._add_layer(layer, number, parts)
        self._group_states = dict(self._lay_out_states())
        self._states = {
            (layer, group): (conv[place], recurrent[place])
            for group, (conv, recurrent) in self._group_states.items()
            for place, layer in enumerate(spec.group_layers[group])
        }

    def _add_layer(self, layer: int, group: int, parts: Sequence[Tensor]) -> None:
        """Note a layer's parts of all blocks, [num_blocks, elements of a part] each."""
        spec, k, v = self.spec, parts[0], parts[-1]
        num_heads, head_dim = spec.group_heads[group]
        shape = (self.num_blocks, spec.num_keys(group), num_heads, head_dim)
        # Kernels are compiled for the distance between blocks: a single warm-up block has the same distance as in a
        # whole pool.
        stride = (k.stride(0), num_heads * head_dim, head_dim, 1)
        of_values = (*shape[:-1], spec.value_dims[group] or head_dim)
        if spec.has_scales:
            self._scales[layer] = KVScales(self._scales_of(k, shape), self._scales_of(v, shape))
            k, v = k.view(FP8), v.view(FP8)
        pair = k.as_strided(shape, stride), v.as_strided(of_values, stride)
        self._of_groups[layer, group] = pair
        self._layers.setdefault(layer, pair)

    def _scales_of(self, part: Tensor, shape: tuple[int, int, int, int]) -> Tensor:
        """Return the scales after the numbers [num_blocks, block_size, num_kv_heads, head_dim] of a part."""
        size, num_scales = math.prod(shape[1:]), shape[1] * shape[2]
        return part[:, size : size + 2 * num_scales].view(torch.bfloat16).view(self.num_blocks, shape[2], -1)

    def layer(self, index: int, group: int | None = None) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of one layer, counted from the rank's first, in a KV group; None: in the first
        one that has the layer, which is that of its own tokens' keys."""
        return self._layers[index] if group is None else self._of_groups[index, group]

    def scales(self, index: int) -> KVScales | None:
        """Return the scales of one layer's keys and values, or None where the cache's type has none."""
        return self._scales.get(index)

    def state(self, index: int, group: int) -> tuple[Tensor, Tensor]:
        """Return the convolution's inputs [num_blocks, inputs, channels] and the recurrent state
        [num_blocks, heads, key size, value size] float32 of one layer, counted from the rank's first, in a KV group."""
        return self._states[index, group]

    def group_states(self, group: int) -> tuple[Tensor, Tensor]:
        """Return `state` of all layers of a KV group, with the layers as leading dimension."""
        return self._group_states[group]

    def _lay_out_states(self) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Give each layer with a state its part of the blocks, by KV group: the recurrent state, then the convolution's
        inputs."""
        spec = self.spec
        if not spec.group_states:
            return
        blocks = self.data.view(torch.uint8)  # [num_blocks, block_bytes]
        for group, state in enumerate(spec.group_states):
            if state is None:
                continue
            num_layers, size = len(spec.group_layers[group]), state.num_bytes(spec.dtype.itemsize)
            recurrent_size = math.prod(state.recurrent_shape) * 4
            conv_size = math.prod(state.conv_shape) * spec.dtype.itemsize
            parts = blocks[:, : num_layers * size].unflatten(1, (num_layers, size)).transpose(0, 1)  # type: ignore[no-untyped-call]
            recurrent = parts[..., :recurrent_size].view(torch.float32).unflatten(2, state.recurrent_shape)
            conv = parts[..., recurrent_size : recurrent_size + conv_size].view(spec.dtype)
            yield group, (conv.unflatten(2, state.conv_shape), recurrent)

    def clear(self, blocks: Tensor) -> None:
        """Put zeros into blocks [n] int64, in all layers."""
        self.data.index_fill_(self._blocks_dim, blocks, 0)

    def copy_keys(self, copies: KeyCopies) -> None:
        """Copy keys and values from block to block, in all layers."""
        spec = self.spec
        if spec.is_uniform and self.data.is_cuda:
            from nvcli.kernels.triton.attention import key_copies

            # Blocks of all groups lie alike. A group with fewer layers than others has blocks with unused ends.
            first = next(group[0] for group in spec.group_layers if group)
            key_copies.copy_keys(
                *self.layer(first),
                self.scales(first),
                copies.entries,
                num_layers=len(self.data),
                layer_stride=self.data.stride(0),
            )
            return
        for (layer, group), pair in self._of_groups.items():
            if len(copies.of_groups[group]):
                copy_keys(*pair, self.scales(layer), copies.of_groups[group])

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()
