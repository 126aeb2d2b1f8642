"""The `triton` backend: our own kernels, with nothing to install and no compiler.

Every step is planned on the GPU, from the batch's shape and device tensors alone, so that steps of all shapes may be
captured in CUDA graphs and the host does nothing. Kinds of attention that differ in scale or KV group share their plans
and scratch memory.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.backend import AttentionBackend, AttentionCase, NewKV, output_buffer
from nvcli.attention.forward_batch import AttentionLayer, BatchShape, ForwardBatch
from nvcli.attention.requirements import import_failure, unmet_requirements
from nvcli.attention.spec import Geometry

_MAX_ROWS = 64_000
"""A launch grid has at most 65,535 rows, and each sequence makes at least one."""


class TritonBackend(AttentionBackend):
    """Attention by the kernels in `nvcli.kernels.triton`."""

    name = "triton"
    reads_segments = True
    plans_on_device = True

    def __init__(self, case: AttentionCase) -> None:
        # Triton is imported only by runs that use it.
        from nvcli.attention.triton_inputs import attention_shape, layer_inputs, row_tokens
        from nvcli.attention.triton_kernels import ChunkedPrefill, SegmentedDecode
        from nvcli.kernels.triton.attention.decode_attention import DecodeAttention

        self._inputs, self._row_tokens = layer_inputs, row_tokens
        self._max_width = case.max_decode_width
        windows: dict[Geometry, set[int | None]] = {}
        for spec in case.specs:
            windows.setdefault(spec.geometry, set()).add(spec.window)
        self._decodes: dict[Geometry, DecodeAttention] = {}
        for geometry, kinds in windows.items():
            self._decodes[geometry] = DecodeAttention(
                attention_shape(case, geometry),
                windows=kinds,
                max_rows=case.max_num_seqs,
                max_width=case.max_decode_width,
                max_tokens=case.max_draft_step_tokens,
                is_invariant=case.batch_invariant,
            )
        self._prefill = ChunkedPrefill(case)
        self.notes, self.prefix_tile_tokens = self._prefill.notes, self._prefill.prefix_tile_tokens
        self.projected = self._prefill.projected
        self._segmented: SegmentedDecode | None = None
        if case.max_shared_rows:
            assert not case.batch_invariant, "what is shared depends on the batch"
            self._segmented = SegmentedDecode(case, self._decodes, self._prefill.segment_kinds())

    @classmethod
    def unsupported(cls, case: AttentionCase) -> list[str]:
        reasons = unmet_requirements(
            case,
            capability=(8, 0),
            dtypes=(torch.bfloat16, torch.float16, torch.float32),
            head_dims=(16, 32, 64, 128, 256, 512),
            takes_sinks=True,
            takes_bias=True,
            takes_both_ways=True,
            takes_tails=True,
            takes_scaled_cache=not case.batch_invariant,
            is_batch_invariant=True,
        )
        if case.max_num_seqs > _MAX_ROWS:
            reasons.append(f"max_num_seqs {case.max_num_seqs} is above {_MAX_ROWS}")
        if not reasons and (failure := import_failure("triton", "the triton that belongs to your torch")):
            reasons.append(failure)
        return reasons

    def num_decoded_rows(self, shape: BatchShape) -> int:
        return shape.decode_rows if shape.tokens_per_row <= self._max_width else 0

    def can_capture(self, shape: BatchShape) -> bool:
        return True

    def choose_shape(self, shape: BatchShape, num_tokens: np.ndarray, seq_lens: np.ndarray) -> BatchShape:
        if self._prefill.projected is None or shape.prefill_rows == 0 or shape.shares_prefixes:
            return shape
        first = self.num_decoded_rows(shape)
        if first != shape.decode_rows or not self._prefill.projected.pays(num_tokens[first:], seq_lens[first:]):
            return shape
        return replace(shape, projects_latents=True)

    def plan_decode_on_device(self, batch: ForwardBatch) -> None:
        if batch.segments is not None:
            assert self._segmented is not None
            self._segmented.plan(batch)
            return
        num_rows, tokens = batch.num_decoded_rows, self._row_tokens(batch)
        for decode in self._decodes.values():
            decode.plan(batch.seq_lens[:num_rows], batch.slots[:num_rows], tokens)

    def plan_prefill_on_device(self, batch: ForwardBatch) -> None:
        self._prefill.plan(batch)

    def decode(self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        out = output_buffer(out, q, layer.spec)
        inputs = self._inputs(layer, q, batch)
        if batch.segments is not None:
            assert self._segmented is not None
            self._segmented.run(layer.spec, inputs, batch, out)
        else:
            self._decodes[layer.spec.geometry].run(inputs, out, tokens=self._row_tokens(batch))
        return out

    def prefill(self, layer: AttentionLayer, q: Tensor, new: NewKV, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        out = output_buffer(out, q, layer.spec)
        self._prefill.run(layer.spec, self._inputs(layer, q, batch), batch, out)
        return out
