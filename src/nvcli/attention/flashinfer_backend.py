"""The `flashinfer` backend: the package's paged decode on tensor cores and its paged prefill, FA3 kernels on Hopper.

FlashInfer plans each step on the host, from lengths the host knows: nothing waits for the device. It compiles its
kernels at first use (20 s for decode, 60 s for Hopper's prefill, cached on disk), so it is used where it is named.
`seq_lens_host` must be exact here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.backend import AttentionBackend, AttentionCase, AttentionSpec, new_or
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.requirements import import_failure, unmet_requirements

_WORKSPACE_BYTES = 512 << 20
"""Partial results of cut sequences; plans of 1,024 rows with 32 heads of 128 take about half."""


class FlashInferBackend(AttentionBackend):
    name = "flashinfer"
    captures_decode = True

    def __init__(self, case: AttentionCase) -> None:
        flashinfer: Any = import_module("flashinfer")
        self._case = case
        self._package = flashinfer
        self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=case.device)
        self._eager_decode = _Planned(flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, "NHD", use_tensor_cores=True
        ))  # fmt: skip
        self._captured: dict[int, _CapturedDecode] = {}
        """By number of rows: in a graph, FlashInfer's wrapper belongs to one number of rows."""
        self._decode = self._eager_decode
        self._prefill = _Planned(flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD"))

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

    def prepare_capture(self, batch: ForwardBatch) -> None:
        if torch.cuda.is_current_stream_capturing():
            return
        num_rows, max_blocks = batch.block_tables.shape
        known = self._captured.get(num_rows)
        if known is None or known.max_blocks != max_blocks:
            self._captured[num_rows] = _CapturedDecode(self._package, self._workspace, num_rows, max_blocks)
        self.plan_decode(batch)

    def plan_decode(self, batch: ForwardBatch) -> None:
        num_rows = batch.num_decodes
        captured = self._captured.get(num_rows)
        blocks = _HostBlocks(batch.seq_lens_host[:num_rows], self._case.block_size)
        if captured is not None and batch.block_tables.shape[1] <= captured.max_blocks:
            self._decode = captured
            block_ids = captured.block_ids[:0]  # filled in place by plan_decode_on_device
        else:
            self._decode = self._eager_decode
            block_ids = blocks.gather_ids(batch.block_tables[:num_rows])
        case = self._case
        self._decode.plan(
            blocks.starts,
            block_ids,
            blocks.last_lens,
            case.num_heads,
            case.num_kv_heads,
            case.head_dim,
            case.block_size,
            q_data_type=case.dtype,
            kv_data_type=case.dtype,
            sm_scale=1.0,  # the layer's own comes with `run`
        )

    def plan_decode_on_device(self, batch: ForwardBatch) -> None:
        if isinstance(self._decode, _CapturedDecode):
            self._decode.gather_ids(batch.block_tables[: batch.num_decodes])

    def plan_extend(self, batch: ForwardBatch) -> None:
        case, first = self._case, batch.num_decodes
        blocks = _HostBlocks(batch.seq_lens_host[first:], case.block_size)
        self._prefill.plan(
            _starts(np.asarray(batch.extend_lens)),
            blocks.starts,
            blocks.gather_ids(batch.block_tables[first:]),
            blocks.last_lens,
            case.num_heads,
            case.num_kv_heads,
            case.head_dim,
            case.block_size,
            causal=True,
            q_data_type=case.dtype,
            kv_data_type=case.dtype,
            sm_scale=1.0,
        )

    def decode(self, spec: AttentionSpec, layer: int, q: Tensor, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        return self._decode.run(spec, layer, q, batch, out)

    def extend(
        self, spec: AttentionSpec, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, out: Tensor | None
    ) -> Tensor:
        return self._prefill.run(spec, layer, q, batch, out)


class _HostBlocks:
    """Which blocks the rows have, by FlashInfer's convention. Padding rows count one key of the null block."""

    def __init__(self, seq_lens: np.ndarray, block_size: int) -> None:
        seq_lens = np.maximum(seq_lens, 1)
        self.starts = _starts(-(-seq_lens // block_size))
        """[rows + 1] int32 on the host: where each row's ids begin in the list of all."""
        self.last_lens = torch.from_numpy(((seq_lens - 1) % block_size + 1).astype(np.int32))
        """[rows] int32 on the host: keys in each row's last block."""

    def gather_ids(self, block_tables: Tensor) -> Tensor:
        """The rows' block ids one behind the other: [rows, columns] → [ids] int32 on the device."""
        starts = self.starts.to(block_tables.device, non_blocking=True)
        block_ids = torch.empty(int(self.starts[-1]) + 1, dtype=torch.int32, device=block_tables.device)
        _gather_ids(block_tables, starts, block_ids)
        return block_ids[:-1]


class _Planned:
    """A FlashInfer wrapper whose plans may follow each other without waiting."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        """The last plan has left the wrapper's pinned buffer, which the next one overwrites."""

    def plan(self, *args: Any, **kwargs: Any) -> None:
        self._copied.synchronize()  # with one step in flight, it was long ago
        self._wrapper.plan(*args, **kwargs)
        self._copied.record()

    def run(self, spec: AttentionSpec, layer: int, q: Tensor, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        result: Tensor = self._wrapper.run(q, batch.kv_cache.layer(layer), q_scale=spec.scale, out=new_or(out, q))
        return result


class _CapturedDecode(_Planned):
    """Decode of a fixed number of rows, in buffers that a CUDA graph may refer to."""

    def __init__(self, package: Any, workspace: Tensor, num_rows: int, max_blocks: int) -> None:
        self.max_blocks = max_blocks

        def ints(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int32, device=workspace.device)

        self._starts = ints(num_rows + 1)
        self.block_ids = ints(num_rows * max_blocks + 1)
        super().__init__(
            package.BatchDecodeWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                use_tensor_cores=True,
                paged_kv_indptr_buffer=self._starts,
                paged_kv_indices_buffer=self.block_ids,
                paged_kv_last_page_len_buffer=ints(num_rows),
            )
        )

    def gather_ids(self, block_tables: Tensor) -> None:
        _gather_ids(block_tables, self._starts, self.block_ids)


def _starts(lens: np.ndarray) -> Tensor:
    """[n] → [n + 1] int32 on the host: running sums from 0."""
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lens))).astype(np.int32))


def _gather_ids(block_tables: Tensor, starts: Tensor, block_ids: Tensor) -> None:
    """Write row r's first starts[r + 1] - starts[r] ids from block_ids[starts[r]] on, in shapes that no length
    changes; the last element of `block_ids` takes what is left over."""
    column = torch.arange(block_tables.shape[1], device=block_tables.device)
    is_used = column < (starts[1:] - starts[:-1])[:, None]
    target = torch.where(is_used, starts[:-1, None] + column, block_ids.shape[0] - 1)
    block_ids.scatter_(0, target.flatten(), block_tables.flatten())
