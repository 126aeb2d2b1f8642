"""The `flash-attn` backend: the package flash-attn 2, or FlashAttention 3 (`flash_attn_interface`) where it is there.

Both read the cache through block tables. Version 2 wants block sizes that are multiples of 256; version 3 runs on
Hopper, with any block size. Neither writes into a given output, so mixed batches copy theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.attention.backend import AttentionBackend, AttentionCase, AttentionSpec, copied_to
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.requirements import import_failure, unmet_requirements

_BLOCK_MULTIPLE = 256
"""Of flash-attn 2."""


class FlashAttnBackend(AttentionBackend):
    name = "flash-attn"
    captures_decode = True

    def __init__(self, case: AttentionCase) -> None:
        self._functions: _Version2 | _Version3 = _Version2() if _why_not_version_3(case) else _Version3()
        self._slice_starts = self._key_starts = torch.empty(0)
        self._longest_slice = self._most_keys = 0

    @classmethod
    def unsupported(cls, case: AttentionCase) -> list[str]:
        reasons = unmet_requirements(
            case, capability=(8, 0), dtypes=(torch.bfloat16, torch.float16), head_dims=range(8, 257, 8)
        )
        if reasons or not (newer := _why_not_version_3(case)):
            return reasons
        if case.block_size % _BLOCK_MULTIPLE:
            return [f"block size {case.block_size} is not a multiple of {_BLOCK_MULTIPLE}", newer]
        failure = import_failure("flash_attn", "flash-attn: pip install 'nvcli[flash-attn]'")
        return [failure, newer] if failure else []

    def plan_extend(self, batch: ForwardBatch) -> None:
        first = batch.num_decodes
        self._slice_starts = batch.query_start_loc[first:] - first  # [slices + 1] int32
        self._key_starts = F.pad(batch.seq_lens[first:].cumsum(0, dtype=torch.int32), (1, 0))
        self._longest_slice = max(batch.extend_lens)
        self._most_keys = int(batch.seq_lens_host[first:].max())

    def decode(self, spec: AttentionSpec, layer: int, q: Tensor, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        rows = slice(0, batch.num_decodes)
        k_cache, v_cache = batch.kv_cache.layer(layer)
        result = self._functions.decode(
            q.unsqueeze(1), k_cache, v_cache, batch.seq_lens[rows], batch.block_tables[rows], spec.scale
        )
        return copied_to(out, result.squeeze(1))

    def extend(
        self, spec: AttentionSpec, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, out: Tensor | None
    ) -> Tensor:
        k_cache, v_cache = batch.kv_cache.layer(layer)
        result = self._functions.extend(
            q,
            k_cache,
            v_cache,
            self._slice_starts,
            self._key_starts,
            batch.seq_lens[batch.num_decodes :],
            self._longest_slice,
            self._most_keys,
            batch.block_tables[batch.num_decodes :],
            spec.scale,
        )
        return copied_to(out, result)


def _why_not_version_3(case: AttentionCase) -> str | None:
    major, minor = torch.cuda.get_device_capability(case.device)
    if major != 9:
        return f"FlashAttention 3, which takes any block size, runs on Hopper GPUs, not on capability {major}.{minor}"
    return import_failure("flash_attn_interface", "FlashAttention 3, which takes any block size")


class _Functions:
    """What both versions share."""

    module: str
    tables_keyword: str
    """Name of the argument that takes block tables."""

    def __init__(self) -> None:
        package = import_module(self.module)
        self._with_kvcache: Callable[..., Tensor] = package.flash_attn_with_kvcache

    def decode(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, seq_lens: Tensor, block_tables: Tensor, scale: float
    ) -> Tensor:
        """q: [rows, 1, H, D] → the same."""
        return self._with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=seq_lens,
            softmax_scale=scale,
            causal=True,
            **{self.tables_keyword: block_tables},
        )


class _Version2(_Functions):
    module, tables_keyword = "flash_attn", "block_table"

    def __init__(self) -> None:
        super().__init__()
        self._varlen: Callable[..., Tensor] = import_module(self.module).flash_attn_varlen_func

    def extend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slice_starts: Tensor,
        key_starts: Tensor,
        seq_lens: Tensor,
        longest_slice: int,
        most_keys: int,
        block_tables: Tensor,
        scale: float,
    ) -> Tensor:
        """q: [T, H, D] → the same; `key_starts` [slices + 1] says how long each request is."""
        return self._varlen(
            q,
            k_cache,
            v_cache,
            cu_seqlens_q=slice_starts,
            cu_seqlens_k=key_starts,
            max_seqlen_q=longest_slice,
            max_seqlen_k=most_keys,
            softmax_scale=scale,
            causal=True,
            block_table=block_tables,
        )


class _Version3(_Functions):
    """As documented in `hopper/flash_attn_interface.py` of the flash-attention repository."""

    module, tables_keyword = "flash_attn_interface", "page_table"

    def extend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slice_starts: Tensor,
        key_starts: Tensor,
        seq_lens: Tensor,
        longest_slice: int,
        most_keys: int,
        block_tables: Tensor,
        scale: float,
    ) -> Tensor:
        return self._with_kvcache(
            q,
            k_cache,
            v_cache,
            cache_seqlens=seq_lens,
            page_table=block_tables,
            cu_seqlens_q=slice_starts,
            max_seqlen_q=longest_slice,
            softmax_scale=scale,
            causal=True,
        )
