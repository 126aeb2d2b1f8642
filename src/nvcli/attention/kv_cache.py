"""KVCache: the paged keys and values of all layers, and the layout that every backend reads.

Block 0 is the null block: padding writes there, and table entries behind a request's end point to it. The engine
never hands it out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

NULL_BLOCK = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheSpec:
    """Shape of one rank's cache."""

    num_layers: int
    num_kv_heads: int
    """Of this rank."""
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        per_token = 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return per_token * self.block_size


class KVCache:
    """Keys and values of each layer: two tensors [num_blocks, block_size, num_kv_heads, head_dim]."""

    def __init__(self, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> None:
        self.spec = spec
        self.num_blocks = num_blocks
        shape = (spec.num_layers, 2, num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        # Zeros, not empty: masked positions are multiplied by 0, and 0 × NaN is NaN.
        if device.type == "cpu":
            # numpy's zeros are pages that the system clears when they are first touched; torch's are written here.
            pages = np.zeros(num_blocks * spec.block_bytes, dtype=np.uint8)
            self.data = torch.from_numpy(pages).view(spec.dtype).view(shape)
        else:
            self.data = torch.zeros(shape, dtype=spec.dtype, device=device)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(keys, values) of one layer."""
        return self.data[index, 0], self.data[index, 1]

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()
