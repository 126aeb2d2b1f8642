"""The `flash-attn` backend: the package flash-attn 2, or FlashAttention 3 (`flash_attn_interface`) if it is installed.

Both read the cache through block tables, which are gathered for the batch's rows once per step. Version 2 wants block
sizes that are multiples of 256; version 3 runs on Hopper, with any block size. Neither writes into a given output, so
the results of mixed batches are copied. Lengths are read on the device, so that every step may be captured in a CUDA
graph.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.attention.backend import AttentionBackend, AttentionCase, NewKV, copied_to
from nvcli.attention.forward_batch import AttentionLayer, BatchShape, ForwardBatch
from nvcli.attention.requirements import import_failure, unmet_requirements
from nvcli.attention.spec import AttentionSpec
from nvcli.kernels.whole_numbers import ceil_div

_BLOCK_MULTIPLE = 256
"""Block sizes of flash-attn 2 are multiples of it."""


@dataclass(frozen=True, slots=True)
class _Chunks:
    """The prefill chunks of a step, and after them one row without keys for the tokens that belong to no chunk."""

    query_starts: Tensor
    """[chunks + 2] int32, first token of each; the last entry is the number of tokens."""
    key_starts: Tensor
    """[chunks + 2] int32, running sum of `seq_lens`."""
    seq_lens: Tensor
    """[chunks + 1] int32."""
    longest: int
    """An upper bound of the longest chunk's tokens; at least 2, since 1 tells version 2 that each row has one token."""
    most_keys: int
    """An upper bound of the keys that a chunk attends to."""


class FlashAttnBackend(AttentionBackend):
    """Attention by the package flash-attn, version 3 where it is installed and version 2 elsewhere."""

    name = "flash-attn"

    def __init__(self, case: AttentionCase) -> None:
        self._is_version_3 = _why_not_version_3(case) is None
        package = import_module("flash_attn_interface" if self._is_version_3 else "flash_attn")
        self._with_kvcache: Callable[..., Tensor] = package.flash_attn_with_kvcache
        self._varlen: Callable[..., Tensor] = package.flash_attn_varlen_func
        self._block_size = case.block_size
        self._kv_groups = sorted({spec.kv_group for spec in case.specs})
        self._decode_tables: dict[int, Tensor] = {}
        """The decode rows' block tables by KV group: [rows, columns] int32."""
        self._chunk_tables: dict[int, Tensor] = {}
        """The chunks' block tables by KV group: [chunks + 1, columns] int32."""
        self._chunks: _Chunks | None = None

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

    def can_capture(self, shape: BatchShape) -> bool:
        return True

    def plan_decode_on_device(self, batch: ForwardBatch) -> None:
        rows = slice(0, batch.num_decoded_rows)
        self._decode_tables = self._gather(batch, rows)

    def plan_prefill_on_device(self, batch: ForwardBatch) -> None:
        first = batch.num_decoded_rows
        first_token = batch.num_decoded_tokens
        num_tokens = batch.num_tokens - first_token
        # A captured graph must serve any chunks of its shape.
        is_captured = torch.cuda.is_current_stream_capturing()
        longest = num_tokens if is_captured else int(batch.num_tokens_host[first:].max())
        tables = self._gather(batch, slice(first, batch.shape.num_rows))
        self._chunk_tables = {group: F.pad(table, (0, 0, 0, 1)) for group, table in tables.items()}
        seq_lens = F.pad(batch.seq_lens[first:], (0, 1))
        self._chunks = _Chunks(
            query_starts=F.pad(batch.query_start_loc[first:] - first_token, (0, 1), value=num_tokens),
            key_starts=F.pad(seq_lens.cumsum(0, dtype=torch.int32), (1, 0)),
            seq_lens=seq_lens,
            longest=max(longest, 2),
            most_keys=next(iter(tables.values())).shape[1] * self._block_size,
        )

    def decode(self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        tables = {"page_table" if self._is_version_3 else "block_table": self._decode_tables[layer.spec.kv_group]}
        seq_lens = batch.seq_lens[: batch.num_decoded_rows]
        cache = batch.kv_cache.layer(layer.number)
        result = self._with_kvcache(q.unsqueeze(1), *cache, cache_seqlens=seq_lens, **tables, **_options(layer.spec))
        return copied_to(out, result.squeeze(1))

    def prefill(self, layer: AttentionLayer, q: Tensor, new: NewKV, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        """Attend the chunks. Version 3 is called as `hopper/flash_attn_interface.py` of its repository documents it."""
        assert self._chunks is not None, "plan_on_device comes before forward"
        chunks, tables = self._chunks, self._chunk_tables[layer.spec.kv_group]
        cache = batch.kv_cache.layer(layer.number)
        options = {**_options(layer.spec), "cu_seqlens_q": chunks.query_starts, "max_seqlen_q": chunks.longest}
        if self._is_version_3:
            result = self._with_kvcache(q, *cache, cache_seqlens=chunks.seq_lens, page_table=tables, **options)
        else:
            keys = {"cu_seqlens_k": chunks.key_starts, "max_seqlen_k": chunks.most_keys}
            result = self._varlen(q, *cache, block_table=tables, **keys, **options)
        return copied_to(out, result)

    def _gather(self, batch: ForwardBatch, rows: slice) -> dict[int, Tensor]:
        """Gather some rows' block tables by KV group, as wide as a graph may need or as this batch needs."""
        num_columns = batch.block_tables.shape[2]
        if not torch.cuda.is_current_stream_capturing():
            num_columns = min(num_columns, ceil_div(int(batch.seq_lens_host[rows].max()), self._block_size))
        return {group: batch.gather_block_tables(group, rows, max(num_columns, 1)) for group in self._kv_groups}


def _why_not_version_3(case: AttentionCase) -> str | None:
    major, minor = torch.cuda.get_device_capability(case.device)
    if major != 9:
        return f"FlashAttention 3, which takes any block size, runs on Hopper GPUs, not on capability {major}.{minor}"
    return import_failure("flash_attn_interface", "FlashAttention 3, which takes any block size")


def _options(spec: AttentionSpec) -> dict[str, Any]:
    """Make the arguments that all functions of both versions take. The window counts the keys to the left and to the
    right of a token's own that it sees; -1: all."""
    window = (-1, -1) if spec.window is None else (spec.window - 1, 0)
    return {"softmax_scale": spec.scale, "causal": True, "window_size": window, "softcap": spec.soft_cap or 0.0}
