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

from nvcli.attention.backend import AttentionBackend, AttentionCase, AttentionLayer, NewKV, output_buffer
from nvcli.attention.forward_batch import BatchShape, ForwardBatch
from nvcli.attention.kv_layout import SCRATCH_UNIT
from nvcli.attention.requirements import import_failure, unmet_requirements
from nvcli.attention.spec import AttentionSpec, Geometry

_ABSORBED_RATE, _PROJECTED_RATE, _PROJECTING_RATE = 310.0, 550.0, 400.0
"""Tera-operations per second of an H200: of prefill attention with absorbed queries (measured), with projected keys and
values, and of their projection."""
_MAX_ROWS = 64_000
"""A launch grid has at most 65,535 rows, and each sequence makes at least one."""


class TritonBackend(AttentionBackend):
    """Attention by the kernels in `nvcli.kernels.triton`."""

    name = "triton"
    reads_segments = True
    plans_on_device = True

    def __init__(self, case: AttentionCase) -> None:
        # Triton is imported only by runs that use it.
        from nvcli.attention.triton_kernels import (
            ChunkedPrefill,
            SegmentedDecode,
            attention_shape,
            layer_inputs,
            row_tokens,
        )
        from nvcli.kernels.triton.attention.decode_attention import DecodeAttention

        self._inputs, self._row_tokens = layer_inputs, row_tokens
        self._max_width = case.max_decode_width
        windows: dict[Geometry, set[int | None]] = {}
        for spec in case.specs:
            windows.setdefault(spec.geometry, set()).add(spec.window)
        has_plain_blocks = not case.has_states and len({geometry[1:] for geometry in windows}) == 1
        self._decodes: dict[Geometry, DecodeAttention] = {}
        for geometry, kinds in windows.items():
            self._decodes[geometry] = DecodeAttention(
                attention_shape(case, geometry),
                windows=kinds,
                max_rows=case.max_num_seqs,
                max_width=case.max_decode_width,
                max_tokens=case.max_draft_step_tokens,
                is_invariant=case.batch_invariant,
                has_plain_blocks=has_plain_blocks,
            )
        self._prefill = ChunkedPrefill(case)
        self.notes, self.prefix_tile_tokens = self._prefill.notes, self._prefill.prefix_tile_tokens
        self.can_project = self._prefill.projected is not None
        self._projected_spec = case.specs[0] if self.can_project else None
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
            takes_latents=True,
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
        if not self.can_project or shape.prefill_rows == 0 or shape.shares_prefixes:
            return shape
        first = self.num_decoded_rows(shape)
        if first != shape.decode_rows or not self.projects_latents(num_tokens[first:], seq_lens[first:]):
            return shape
        return replace(shape, projects_latents=True)

    def projects_latents(self, num_tokens: np.ndarray, seq_lens: np.ndarray) -> bool:
        """Whether chunks of so many tokens, of requests with so many keys, [chunks] each, take less time with projected
        latents, and find room for them."""
        spec = self._projected_spec
        if spec is None or self._prefill.projected is None:
            return False
        num_units = int((-(-seq_lens // SCRATCH_UNIT)).sum())
        if num_units > self._prefill.projected.num_units:
            return False
        assert spec.projected is not None
        sizes = spec.projected
        of_latent = spec.result_dim * sizes.projected_dim
        pairs = float((num_tokens * (seq_lens - (num_tokens - 1) / 2)).sum())
        absorbed = pairs * (spec.head_dim + spec.result_dim) / _ABSORBED_RATE
        absorbed += float(num_tokens.sum()) * of_latent / _PROJECTING_RATE
        projected = pairs * (sizes.key_dim + sizes.value_dim) / _PROJECTED_RATE
        return projected + num_units * SCRATCH_UNIT * of_latent / _PROJECTING_RATE < absorbed

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

    def forward_projected(
        self, spec: AttentionSpec, layer: int, q: Tensor, weight: Tensor, batch: ForwardBatch, out: Tensor
    ) -> None:
        self._prefill.run_projected(self._inputs(AttentionLayer(spec, layer, None), q, batch), weight, out)
