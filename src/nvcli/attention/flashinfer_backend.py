"""The `flashinfer` backend: the package's paged decode on tensor cores and its paged prefill, FA3 kernels on Hopper.

FlashInfer plans each step on the host, from lengths the host knows: nothing waits for the device. Block ids are
gathered on the device. It compiles its kernels at first use (20 s for decode, 60 s for Hopper's prefill, cached on
disk), so it is used only when named. `seq_lens_host` must be exact here (`needs_exact_lens`). Decode steps may be
captured in CUDA graphs.

A FlashInfer wrapper holds the plan of one kind of attention; layers that differ in scale alone share it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.backend import AttentionBackend, AttentionCase, NewKV, output_buffer
from nvcli.attention.forward_batch import AttentionLayer, BatchShape, ForwardBatch
from nvcli.attention.requirements import import_failure, unmet_requirements
from nvcli.attention.spec import AttentionSpec

_WORKSPACE_BYTES = 512 << 20
"""Partial results of cut sequences; plans of 1,024 rows with 32 heads of 128 take about half."""


class FlashInferBackend(AttentionBackend):
    """Attention by the package flashinfer."""

    name = "flashinfer"
    needs_exact_lens = True

    def __init__(self, case: AttentionCase) -> None:
        package: Any = import_module("flashinfer")
        self._package = package
        self._case = case
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=case.device)
        self._kind_of = {spec: replace(spec, scale=1.0) for spec in case.specs}
        """Each spec without its scale, which a wrapper's plan does not depend on."""
        self._kinds = tuple(dict.fromkeys(self._kind_of.values()))
        self._eager_decodes = {
            kind: _Planned(
                self._package.BatchDecodeWithPagedKVCacheWrapper(self._workspace, "NHD", use_tensor_cores=True),
                kind,
                case,
            )
            for kind in self._kinds
        }
        self._captured_decodes: dict[int, _CapturedDecodes] = {}
        """The wrappers for graphs, by number of rows: each of them serves one number of rows only."""
        self._decodes = self._eager_decodes
        self._prefills = {
            kind: _Planned(package.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD"), kind, case)
            for kind in self._kinds
        }

    @classmethod
    def unsupported(cls, case: AttentionCase) -> list[str]:
        reasons = unmet_requirements(
            case, capability=(8, 0), dtypes=(torch.bfloat16, torch.float16), head_dims=(64, 128, 256)
        )
        if reasons:
            return reasons
        if failure := import_failure("flashinfer", "flashinfer: pip install 'nvcli[flashinfer]'"):
            return [failure]
        from torch.utils.cpp_extension import CUDA_HOME

        if CUDA_HOME is None:
            return ["compiles its kernels and finds no nvcc; install the CUDA toolkit"]
        return []

    def can_capture(self, shape: BatchShape) -> bool:
        return self.num_decoded_rows(shape) == shape.num_rows

    def prepare_capture(self, batch: ForwardBatch) -> None:
        num_rows, max_blocks = batch.num_decoded_rows, batch.block_tables.shape[2]
        known = self._captured_decodes.get(num_rows)
        if known is None or known.max_blocks != max_blocks:
            self._captured_decodes[num_rows] = _CapturedDecodes(
                max_blocks, {kind: self._make_captured(kind, num_rows, max_blocks) for kind in self._kinds}
            )

    def plan_decode(self, batch: ForwardBatch) -> None:
        num_rows = batch.num_decoded_rows
        captured = self._captured_decodes.get(num_rows)
        fits = captured is not None and batch.block_tables.shape[2] == captured.max_blocks
        self._decodes = captured.by_kind if captured is not None and fits else self._eager_decodes
        blocks = _HostBlocks(batch, slice(0, num_rows), self._case.block_size)
        for planned in self._decodes.values():
            planned.plan(blocks)

    def plan_decode_on_device(self, batch: ForwardBatch) -> None:
        for planned in self._decodes.values():
            planned.gather_ids(batch, slice(0, batch.num_decoded_rows))

    def plan_prefill(self, batch: ForwardBatch) -> None:
        chunks = slice(batch.num_decoded_rows, batch.shape.num_rows)
        blocks = _HostBlocks(batch, chunks, self._case.block_size)
        query_starts = _running_sums(batch.num_tokens_host[chunks])
        for planned in self._prefills.values():
            planned.plan(blocks, query_starts)

    def plan_prefill_on_device(self, batch: ForwardBatch) -> None:
        for planned in self._prefills.values():
            planned.gather_ids(batch, slice(batch.num_decoded_rows, batch.shape.num_rows))

    def decode(self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        decode, cache = self._decodes[self._kind_of[layer.spec]], batch.kv_cache.layer(layer.number)
        return decode.run(q, cache, layer.spec.scale, output_buffer(out, q, layer.spec))

    def prefill(self, layer: AttentionLayer, q: Tensor, new: NewKV, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        out = output_buffer(out, q, layer.spec)
        num_tokens = int(batch.num_tokens_host[batch.num_decoded_rows :].sum())
        out[num_tokens:].zero_()  # padding, which FlashInfer does not write
        cache = batch.kv_cache.layer(layer.number)
        self._prefills[self._kind_of[layer.spec]].run(q, cache, layer.spec.scale, out)
        return out

    def _make_captured(self, kind: AttentionSpec, num_rows: int, max_blocks: int) -> _Planned:
        """Make a wrapper for decode of a fixed number of rows, in buffers that a CUDA graph may refer to."""

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=self._case.device)

        starts, block_ids = ints(num_rows + 1), ints(num_rows * max_blocks + 1)
        wrapper = self._package.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=starts,
            paged_kv_indices_buffer=block_ids,
            paged_kv_last_page_len_buffer=ints(num_rows),
        )
        return _Planned(wrapper, kind, self._case, _BlockIds(starts, block_ids))


@dataclass(frozen=True, slots=True)
class _CapturedDecodes:
    """The wrappers of one captured number of decode rows."""

    max_blocks: int
    """Columns of the block tables that fit the buffers."""
    by_kind: dict[AttentionSpec, _Planned]


@dataclass(frozen=True, slots=True)
class _BlockIds:
    """The block ids of some rows, one row after the other, on the device."""

    starts: Tensor
    """[rows + 1] int32: where each row's ids begin."""
    ids: Tensor
    """[ids + 1] int32; the last element is scratch."""


class _HostBlocks:
    """The block counts of some rows, in FlashInfer's format. Padding rows count as many keys of the null block as
    they have tokens, and at least one."""

    def __init__(self, batch: ForwardBatch, rows: slice, block_size: int) -> None:
        seq_lens = np.maximum(np.maximum(batch.seq_lens_host[rows], batch.num_tokens_host[rows]), 1)
        self.starts = _running_sums(-(-seq_lens // block_size))
        """[rows + 1] int32 on the host: where each row's ids begin in the list of all."""
        self.last_lens = torch.from_numpy(((seq_lens - 1) % block_size + 1).astype(np.int32))
        """[rows] int32 on the host: keys in each row's last block."""


class _Planned:
    """A FlashInfer wrapper for one kind of attention, whose plans may follow each other without waiting."""

    def __init__(
        self, wrapper: Any, kind: AttentionSpec, case: AttentionCase, static_ids: _BlockIds | None = None
    ) -> None:
        """`static_ids` are buffers that the wrapper was given; without them, each plan makes new ones."""
        self._wrapper, self._kind, self._case = wrapper, kind, case
        self._static_ids = static_ids
        self._block_ids = static_ids
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        """Done once the last plan has left the wrapper's pinned buffer, which the next plan overwrites."""

    def plan(self, blocks: _HostBlocks, query_starts: Tensor | None = None) -> None:
        """Plan a step on the host. query_starts: [chunks + 1] int32 on the host, the first token of each chunk; None
        for decode rows."""
        kind, case = self._kind, self._case
        self._block_ids = self._static_ids
        if self._block_ids is None:
            ids = torch.empty(int(blocks.starts[-1]) + 1, dtype=torch.int32, device=case.device)
            self._block_ids = _BlockIds(blocks.starts.to(case.device, non_blocking=True), ids)
        # The ids are filled in by `gather_ids`: the wrapper keeps a view of them, or its own buffer in a graph.
        ids = self._block_ids.ids[:0] if self._static_ids is not None else self._block_ids.ids[:-1]
        self._copied.synchronize()  # with one step in flight, it was long ago
        self._wrapper.plan(
            *(() if query_starts is None else (query_starts,)),
            blocks.starts,
            ids,
            blocks.last_lens,
            kind.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            case.block_size,
            window_left=-1 if kind.window is None else kind.window - 1,
            logits_soft_cap=kind.soft_cap,
            q_data_type=case.dtype,
            kv_data_type=case.dtype,
            sm_scale=1.0,  # the layer's own comes with `run`
            **({} if query_starts is None else {"causal": True}),
        )
        self._copied.record()

    def gather_ids(self, batch: ForwardBatch, rows: slice) -> None:
        """Write row r's first starts[r + 1] - starts[r] block ids from ids[starts[r]] on, in shapes that no length
        changes; the last element takes what is left over."""
        assert self._block_ids is not None, "plan comes before plan_on_device"
        starts, ids = self._block_ids.starts, self._block_ids.ids
        tables = batch.gather_block_tables(self._kind.kv_group, rows, batch.block_tables.shape[2])
        column = torch.arange(tables.shape[1], device=tables.device)
        is_used = column < (starts[1:] - starts[:-1])[:, None]
        target = torch.where(is_used, starts[:-1, None] + column, ids.shape[0] - 1)
        ids.scatter_(0, target.flatten(), tables.flatten())

    def run(self, q: Tensor, kv_cache: tuple[Tensor, Tensor], scale: float, out: Tensor) -> Tensor:
        result: Tensor = self._wrapper.run(q, kv_cache, q_scale=scale, out=out)
        return result


def _running_sums(lens: np.ndarray) -> Tensor:
    """Sum up lengths from 0: [n] → [n + 1] int32 on the host."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lens))).astype(np.int32))
