"""KVCache: the paged keys and values of all layers, and the layout that every backend reads.

A KV group is a list of layers that keep the same blocks. All groups share one pool of equally large blocks: block b of
a group holds, for each layer of that group, the keys and values of `block_size` tokens. Block 0 is the null block:
padding writes there, and table entries that stand for no block point to it. The engine never hands it out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.spec import AttentionSpec

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

    @classmethod
    def of_layers(
        cls,
        layers: Sequence[AttentionSpec],
        group_layers: tuple[tuple[int, ...], ...],
        *,
        block_size: int,
        dtype: torch.dtype,
    ) -> KVCacheSpec:
        """Make the cache of a rank's layers. A group without layers takes no room in a block."""
        first = [layers[group[0]] if group else None for group in group_layers]
        heads = tuple((0, 0) if spec is None else (spec.num_kv_heads, spec.head_dim) for spec in first)
        return cls(group_layers=group_layers, group_heads=heads, block_size=block_size, dtype=dtype)

    @property
    def num_groups(self) -> int:
        return len(self.group_layers)

    @property
    def is_uniform(self) -> bool:
        """Whether the keys of all layers have one shape."""
        return len(set(self.group_heads) - {(0, 0)}) == 1

    @property
    def block_elements(self) -> int:
        """The elements of one block: keys and values of all layers of the group that needs most."""
        per_token = (
            2 * len(layers) * num_kv_heads * head_dim
            for layers, (num_kv_heads, head_dim) in zip(self.group_layers, self.group_heads, strict=True)
        )
        return max(per_token) * self.block_size

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
                size = spec.block_size * heads[0] * heads[1]
                for place, layer in enumerate(group):
                    k, v = self.data[:, 2 * place * size : 2 * (place + 1) * size].chunk(2, dim=1)
                    shape = (num_blocks, spec.block_size, *heads)
                    layers[layer] = k.view(shape), v.view(shape)
        self._layers = layers

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of one layer, counted from the rank's first."""
        return self._layers[index]

    def clear(self, blocks: Tensor) -> None:
        """Put zeros into blocks [n] int64, in all layers."""
        self.data.index_fill_(self._blocks_dim, blocks, 0)

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()
