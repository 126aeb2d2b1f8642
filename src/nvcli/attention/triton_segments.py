"""Decode attention of the `triton` backend where requests share segments of their keys: each segment is read once for
many rows, and what is behind it by each row on its own.

It is made for runs in which requests may share blocks, and works in steps whose batch has segments. Like the rest of
the backend it plans on the GPU, so that such steps may be captured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvcli.attention.backend import AttentionCase
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import AttentionSpec, Geometry
from nvcli.attention.triton_inputs import attention_shape
from nvcli.kernels.triton.attention_launch import LayerInputs
from nvcli.kernels.triton.decode_attention import DecodeAttention
from nvcli.kernels.triton.decode_work_list import DecodeWorkList
from nvcli.kernels.triton.segment_attention import SegmentAttention
from nvcli.kernels.triton.segment_merge import merge_segments
from nvcli.kernels.triton.segment_work_list import SegmentWorkList


@dataclass(frozen=True, slots=True)
class _Kernels:
    """What attends for one geometry, with windows or without."""

    shared: SegmentAttention
    own: DecodeAttention


@dataclass(frozen=True, slots=True)
class _Lists:
    """The work lists of one geometry, window and KV group."""

    kv_group: int
    shared: SegmentWorkList
    own: DecodeWorkList


class SegmentedDecode:
    """The kernels and work lists for steps with shared segments.

    `on_hopper`: the kinds of attention, by whether they have windows, that the kernels for Hopper GPUs serve.
    """

    def __init__(
        self, case: AttentionCase, decodes: dict[Geometry, DecodeAttention], on_hopper: set[tuple[Geometry, bool]]
    ) -> None:
        self._kernels: dict[tuple[Geometry, bool], _Kernels] = {}
        self._lists: dict[tuple[Geometry, int | None, int], _Lists] = {}
        for spec in case.specs:
            geometry, kind = spec.geometry, (spec.geometry, spec.window is not None)
            if kind not in self._kernels:
                shape, max_rows = attention_shape(case, geometry), case.max_shared_rows
                own = decodes[geometry]
                if kind in on_hopper:
                    own = DecodeAttention(shape, windows=[None], max_rows=max_rows, is_beside=True)
                shared = SegmentAttention(shape, max_rows=max_rows, on_hopper=kind in on_hopper)
                self._kernels[kind] = _Kernels(shared, own)
            kernels = self._kernels[kind]
            key = geometry, spec.window, spec.kv_group
            if key not in self._lists:
                lists = kernels.shared.work_list(spec.window), kernels.own.work_list(spec.window)
                self._lists[key] = _Lists(spec.kv_group, *lists)
        most_heads = max(spec.geometry[0] for spec in case.specs)
        self._log_sums = torch.empty(case.max_shared_rows * most_heads, dtype=torch.float32, device=case.device)

    def plan(self, batch: ForwardBatch) -> None:
        """List the step's work; the batch has segments."""
        tables, num_rows = batch.segments, batch.num_single_rows
        assert tables is not None
        seq_lens, slots = batch.seq_lens[:num_rows], batch.slots[:num_rows]
        for lists in self._lists.values():
            group = lists.kv_group
            lists.shared.plan(seq_lens, slots, tables.segments[group], tables.slot_segments[group])
            lists.own.plan(seq_lens, slots, lists.shared.own_begins)

    def run(self, spec: AttentionSpec, inputs: LayerInputs, batch: ForwardBatch, out: Tensor) -> None:
        """Attend the rows of one token as planned; the arguments are those of `AttentionBackend.decode`."""
        num_rows = batch.num_single_rows
        lists = self._lists[spec.geometry, spec.window, spec.kv_group]
        kernels = self._kernels[spec.geometry, spec.window is not None]
        results = kernels.shared.run(inputs, lists.shared, batch.slots[:num_rows], batch.seq_lens[:num_rows])
        kernels.own.run(inputs, out, own=(lists.own, self._log_sums))
        merge_segments(out, self._log_sums, results)
