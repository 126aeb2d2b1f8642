"""The `triton` backend: our own kernels, with nothing to install and no compiler.

Every step is planned on the GPU, from the batch's shape and device tensors alone, so that steps of all shapes may be
captured in CUDA graphs and the host does nothing. Kinds of attention that differ in scale or KV group share their plans
and scratch memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.attention.backend import AttentionBackend, AttentionCase, AttentionLayer, NewKV, output_buffer
from nvcli.attention.forward_batch import BatchShape, ForwardBatch
from nvcli.attention.kv_layout import scratch_tokens
from nvcli.attention.requirements import import_failure, unmet_requirements
from nvcli.attention.spec import Geometry

_MAX_ROWS = 64_000
"""A launch grid has at most 65,535 rows, and each sequence makes at least one."""


class TritonBackend(AttentionBackend):
    """Attention by the kernels in `nvcli.kernels.triton`."""

    name = "triton"
    reads_segments = True

    def __init__(self, case: AttentionCase) -> None:
        # Triton is imported only by runs that use it.
        from nvcli.attention.triton_inputs import attention_shape, layer_inputs
        from nvcli.attention.triton_prefixes import PrefixedPrefill
        from nvcli.attention.triton_segments import SegmentedDecode
        from nvcli.kernels.triton.decode_attention import DecodeAttention
        from nvcli.kernels.triton.prefill_choice import (
            PrefillKernel,
            attends_prefixes,
            attends_segments,
            prefill_kernel,
        )
        from nvcli.kernels.triton.prefill_scratch import ScratchTiles
        from nvcli.kernels.triton.prefill_tiles import PrefillTiles, TileKey

        self._inputs = layer_inputs
        windows: dict[Geometry, set[int | None]] = {}
        for spec in case.specs:
            windows.setdefault(spec.geometry, set()).add(spec.window)
        self._decodes: dict[Geometry, DecodeAttention] = {}
        self._prefills: dict[tuple[Geometry, bool], PrefillKernel] = {}
        self._tiles: dict[TileKey, PrefillTiles] = {}
        notes: list[str] = []
        has_plain_blocks = not case.has_states and len({geometry[1:] for geometry in windows}) == 1
        for geometry, kinds in windows.items():
            shape = attention_shape(case, geometry)
            self._decodes[geometry] = DecodeAttention(
                shape, windows=kinds, max_rows=case.max_num_seqs, is_invariant=case.batch_invariant
            )
            for has_window in sorted({window is not None for window in kinds}):
                prefill, notes_of_kernel = prefill_kernel(
                    shape,
                    has_window=has_window,
                    batch_invariant=case.batch_invariant,
                    has_plain_blocks=has_plain_blocks,
                    scratch_tokens=scratch_tokens(case.max_model_len, case.max_num_seqs),
                )
                notes += notes_of_kernel
                self._prefills[geometry, has_window] = prefill
                key = prefill.tile_key
                if key not in self._tiles:
                    self._tiles[key] = (ScratchTiles if key.scratch_units else PrefillTiles)(
                        key,
                        max_tokens=case.max_num_batched_tokens,
                        max_chunks=case.max_num_seqs,
                        device=case.device,
                    )
        self.notes = tuple(dict.fromkeys(notes))
        self._segmented: SegmentedDecode | None = None
        if case.max_shared_rows:
            assert not case.batch_invariant, "what is shared depends on the batch"
            on_hopper = {kind for kind, prefill in self._prefills.items() if attends_segments(prefill)}
            self._segmented = SegmentedDecode(case, self._decodes, on_hopper)
        self._prefixed: PrefixedPrefill | None = None
        prefills = {
            geometry: prefill
            for (geometry, has_window), prefill in self._prefills.items()
            if case.max_shared_rows and not has_window and attends_prefixes(prefill)
        }
        if prefills:
            self._prefixed = PrefixedPrefill(case, prefills)
            self.prefix_tile_tokens = self._prefixed.tile_tokens

    @classmethod
    def unsupported(cls, case: AttentionCase) -> list[str]:
        reasons = unmet_requirements(
            case,
            capability=(8, 0),
            dtypes=(torch.bfloat16, torch.float16, torch.float32),
            head_dims=(16, 32, 64, 128, 256, 512),
            takes_sinks=True,
            takes_scaled_cache=not case.batch_invariant,
            is_batch_invariant=True,
        )
        if case.max_num_seqs > _MAX_ROWS:
            reasons.append(f"max_num_seqs {case.max_num_seqs} is above {_MAX_ROWS}")
        if not reasons and (failure := import_failure("triton", "the triton that belongs to your torch")):
            reasons.append(failure)
        return reasons

    def can_capture(self, shape: BatchShape) -> bool:
        return True

    def plan_decode_on_device(self, batch: ForwardBatch) -> None:
        if batch.segments is not None:
            assert self._segmented is not None
            self._segmented.plan(batch)
            return
        num_rows = batch.num_single_rows
        for decode in self._decodes.values():
            decode.plan(batch.seq_lens[:num_rows], batch.slots[:num_rows])

    def plan_prefill_on_device(self, batch: ForwardBatch) -> None:
        first = batch.num_single_rows
        for tiles in self._tiles.values():
            tiles.plan(
                batch.query_start_loc,
                batch.seq_lens,
                batch.slots,
                first_chunk=first,
                num_tokens=batch.num_tokens - first,
            )
        if batch.prefixes is not None:
            assert self._prefixed is not None
            self._prefixed.plan(batch)

    def decode(self, layer: AttentionLayer, q: Tensor, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        out = output_buffer(out, q)
        inputs = self._inputs(layer, q, batch)
        if batch.segments is not None:
            assert self._segmented is not None
            self._segmented.run(layer.spec, inputs, batch, out)
        else:
            self._decodes[layer.spec.geometry].run(inputs, out)
        return out

    def prefill(self, layer: AttentionLayer, q: Tensor, new: NewKV, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        out = output_buffer(out, q)
        spec, inputs = layer.spec, self._inputs(layer, q, batch)
        if batch.prefixes is not None and spec.window is None:
            assert self._prefixed is not None
            self._prefixed.run(spec, inputs, out)
        else:
            prefill = self._prefills[spec.geometry, spec.window is not None]
            prefill.run(inputs, self._tiles[prefill.tile_key], out)
        return out
