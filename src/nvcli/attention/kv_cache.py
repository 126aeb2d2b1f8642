"""KVCache: the paged keys and values of all layers, and the layout that every backend reads.

A KV group is a list of layers that keep the same blocks. All groups share one pool of equally large blocks: block b of
a group holds, for each layer of that group, the keys and values of `block_size` tokens. Block 0 is the null block:
padding writes there, and table entries that stand for no block point to it. The engine never hands it out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """The shape of one rank's cache."""

    group_layers: tuple[tuple[int, ...], ...]
    """The numbers of each KV group's layers, counted from the rank's first layer."""
    num_kv_heads: int
    """The KV heads of this rank."""
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def num_groups(self) -> int:
        return len(self.group_layers)

    @property
    def layers_per_block(self) -> int:
        """The number of layers whose keys and values one block holds: those of the largest group."""
        return max(map(len, self.group_layers))

    @property
    def block_bytes(self) -> int:
        """The bytes of one block: keys and values of all layers of a group."""
        per_token = 2 * self.layers_per_block * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * self.block_size


class KVCache:
    """The keys and values of each layer, as two tensors [num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        shape = (spec.layers_per_block, 2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        # Zeros, not empty: masked positions are multiplied by 0, and 0 × NaN is NaN.
        if device.type == "cpu":
            # numpy's zeros are pages that the system clears when they are first touched; torch's are written here.
            pages = np.zeros(num_blocks * spec.block_bytes, dtype=np.uint8)
            self.data = torch.from_numpy(pages).view(spec.dtype).view(shape)
        else:
            self.data = torch.zeros(shape, dtype=spec.dtype, device=device)
        places = {layer: place for layers in spec.group_layers for place, layer in enumerate(layers)}
        self._layers = [(self.data[places[layer], 0], self.data[places[layer], 1]) for layer in sorted(places)]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of one layer, counted from the rank's first."""
        return self._layers[index]

    def clear(self, blocks: Tensor) -> None:
        """Put zeros into blocks [n] int64, in all layers."""
        self.data.index_fill_(2, blocks, 0)

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()
