"""KVCache: the paged keys and values, or recurrent states, of all layers, and the layout that every backend reads.

A KV group is a list of layers that keep the same blocks. All groups share one pool of equally large blocks: block b of
a group holds, for each layer of that group, the keys and values of `block_size` tokens, or the recurrent state behind
the last of them that is computed. Block 0 is the null block: padding writes there, and table entries that stand for no
block point to it. The engine never hands it out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.spec import AttentionSpec, StateSpec
from nvcli.attention.state_size import STATE_ALIGNMENT

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The shape of one rank's cache."""

    group_layers: tuple[tuple[int, ...], ...]
    """The numbers of each KV group's layers, counted from the rank's first layer."""
    group_heads: tuple[tuple[int, int], ...]
    """(KV heads of this rank, head size) of each KV group's layers."""
    block_size: int
    dtype: torch.dtype
    group_states: tuple[StateSpec | None, ...] = ()
    """The state of each KV group's layers; None: they have keys and values. Empty where no group has states."""

    @classmethod
    def of_layers(
        cls,
        layers: Sequence[AttentionSpec | StateSpec],
        group_layers: tuple[tuple[int, ...], ...],
        *,
        block_size: int,
        dtype: torch.dtype,
    ) -> KVCacheSpec:
        """Make the cache of a rank's layers. A group without layers takes no room in a block."""
        first = [layers[group[0]] if group else None for group in group_layers]
        heads = tuple(
            (spec.num_kv_heads, spec.head_dim) if isinstance(spec, AttentionSpec) else (0, 0) for spec in first
        )
        states = tuple(spec if isinstance(spec, StateSpec) else None for spec in first)
        return cls(
            group_layers=group_layers,
            group_heads=heads,
            block_size=block_size,
            dtype=dtype,
            group_states=states if any(states) else (),
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
        return not self.group_states and len(set(self.group_heads) - {(0, 0)}) == 1

    @property
    def block_elements(self) -> int:
        """The elements of one block: keys and values, or states, of all layers of the group that needs most."""
        per_token = (
            2 * len(layers) * num_kv_heads * head_dim
            for layers, (num_kv_heads, head_dim) in zip(self.group_layers, self.group_heads, strict=True)
        )
        most = max(per_token) * self.block_size
        if not self.group_states:
            return most
        states = max(
            len(layers) * state.num_bytes(self.dtype)
            for layers, state in zip(self.group_layers, self.group_states, strict=True)
            if state is not None
        )
        needed = max(most * self.dtype.itemsize, states)
        return -(-needed // STATE_ALIGNMENT) * STATE_ALIGNMENT // self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        return self.block_elements * self.dtype.itemsize


class KVCache:
    """The keys and values of each layer, as two tensors [num_blocks, block_size, num_kv_heads, head_dim].

    Where all layers have keys of one shape, a layer's blocks lie one behind the other. Else a block's layers do,
    because a block of one shape must lie where a block of another would.
    """

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        # Zeros, not empty: masked positions are multiplied by 0, and 0 × NaN is NaN.
        if device.type == "cpu":
            # numpy's zeros are pages that the system clears when they are first touched; torch's are written here.
            pages = np.zeros(num_blocks * spec.block_bytes, dtype=np.uint8)
            memory = torch.from_numpy(pages).view(spec.dtype)
        else:
            memory = torch.zeros(num_blocks * spec.block_elements, dtype=spec.dtype, device=device)
        layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._blocks_dim = 2 if spec.is_uniform else 0
        if spec.is_uniform:
            heads = next(heads for heads in spec.group_heads if heads != (0, 0))
            self.data = memory.view(-1, 2, num_blocks, spec.block_size, *heads)
            for group in spec.group_layers:
                layers.update((layer, (self.data[place, 0], self.data[place, 1])) for place, layer in enumerate(group))
        else:
            self.data = memory.view(num_blocks, spec.block_elements)
            for group, heads in zip(spec.group_layers, spec.group_heads, strict=True):
                if heads == (0, 0):
                    continue
                size = spec.block_size * heads[0] * heads[1]
                for place, layer in enumerate(group):
                    k, v = self.data[:, 2 * place * size : 2 * (place + 1) * size].chunk(2, dim=1)
                    shape = (num_blocks, spec.block_size, *heads)
                    layers[layer] = k.view(shape), v.view(shape)
        self._layers = layers
        self._states = dict(self._lay_out_states())

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of one layer, counted from the rank's first."""
        return self._layers[index]

    def state(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the convolution's inputs [num_blocks, inputs, channels] and the recurrent state
        [num_blocks, heads, key size, value size] float32 of one layer, counted from the rank's first."""
        return self._states[index]

    def _lay_out_states(self) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        """Give each layer with a state its part of the blocks: the recurrent state, then the convolution's inputs."""
        spec = self.spec
        for group, state in zip(spec.group_layers, spec.group_states, strict=False):
            if state is None:
                continue
            size = state.num_bytes(spec.dtype) // spec.dtype.itemsize
            recurrent_size = math.prod(state.recurrent_shape) * 4 // spec.dtype.itemsize
            conv_size = math.prod(state.conv_shape)
            for place, layer in enumerate(group):
                part = self.data[:, place * size : place * size + recurrent_size + conv_size]
                recurrent = part[:, :recurrent_size].view(torch.float32).unflatten(1, state.recurrent_shape)  # type: ignore[no-untyped-call]
                yield layer, (part[:, recurrent_size:].unflatten(1, state.conv_shape), recurrent)  # type: ignore[no-untyped-call]

    def clear(self, blocks: Tensor) -> None:
        """Put zeros into blocks [n] int64, in all layers."""
        self.data.index_fill_(self._blocks_dim, blocks, 0)

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()
