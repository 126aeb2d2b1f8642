"""Copies keys and values of some tokens from one block of the cache to another. Plain torch is the reference; CUDA
tensors take the Triton kernel that is held to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nvcli.kernels.fp8_kv import KVScales
from nvcli.kernels.fp8_types import FP8

COPY_FIELDS = 4
"""Block that has the keys, block that gets them, first token, end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyCopies:
    """A step's copies of keys and values."""

    entries: Tensor
    """[N, `COPY_FIELDS`] int32 on the device of the cache. No copy reads what another one writes."""
    of_groups: Sequence[Tensor]
    """The entries of each KV group."""


def copy_keys(k_cache: Tensor, v_cache: Tensor, scales: KVScales | None, copies: Tensor) -> None:
    """Copy keys and values within a layer's cache, with their scales where it has any.

    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, D]; copies: `KeyCopies.entries` of the layer's KV group.
    """
    if len(copies) == 0:
        return
    if k_cache.is_cuda:
        from nvcli.kernels.triton.attention import key_copies

        key_copies.copy_keys(k_cache, v_cache, scales, copies)
        return
    if k_cache.dtype == FP8:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    by_token = [k_cache, v_cache] if scales is None else [k_cache, v_cache, *(each.transpose(1, 2) for each in scales)]
    for numbers in by_token:
        read = [numbers[source, first:end].clone() for source, _, first, end in copies.tolist()]
        for (_, target, first, end), values in zip(copies.tolist(), read, strict=True):
            numbers[target, first:end] = values
