"""The kernels of the `triton` backend with their work lists: for decode rows that share segments of their keys, which
are then read once for many rows, and for prefill chunks, which may share prefixes.

Everything is planned on the GPU, so that steps may be captured. What only steps with shared blocks need is made for
runs in which requests may share any.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nvcli.attention.backend import AttentionCase
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.kv_layout import scratch_tokens
from nvcli.attention.projected_latents import PROJECTED_NOTE, ProjectedLatents
from nvcli.attention.spec import AttentionSpec, Geometry
from nvcli.attention.triton_inputs import attention_shape, row_tokens
from nvcli.kernels.triton.attention import prefill_choice
from nvcli.kernels.triton.attention.attention_launch import LayerInputs
from nvcli.kernels.triton.attention.decode_attention import DecodeAttention
from nvcli.kernels.triton.attention.decode_work_list import DecodeWorkList
from nvcli.kernels.triton.attention.prefill_attention import PrefillAttention, PrefillKind
from nvcli.kernels.triton.attention.prefill_choice import PrefillKernel, TileLists, attends_prefixes, attends_segments
from nvcli.kernels.triton.attention.prefill_tiles import Chunks, PrefillTiles, TilePart
from nvcli.kernels.triton.attention.segment_attention import SegmentAttention
from nvcli.kernels.triton.attention.segment_merge import merge_segments
from nvcli.kernels.triton.attention.segment_work_list import SegmentWorkList
from nvcli.kernels.triton.attention.token_rows import TokenRows, expand_rows

_PARTS = TilePart.PREFIX, TilePart.REST, TilePart.OTHERS
"""Prefix first; the rest continues its softmax."""


class ChunkedPrefill:
    """Prefill attention of all kinds of a run. Where chunks share prefixes, a tile takes tokens of several requests
    over the keys that they share, and then each of these chunks attends to the rest of its keys."""

    def __init__(self, case: AttentionCase) -> None:
        self._tiles = TileLists(
            max_tokens=case.max_num_batched_tokens, max_chunks=case.max_num_seqs, device=case.device
        )
        self.kernels: dict[tuple[Geometry, bool], PrefillKernel] = {}
        """(geometry, has a window) → kernels."""
        notes: list[str] = []
        geometries = dict.fromkeys(spec.geometry for spec in case.specs)
        self._has_plain_blocks = not case.has_states and len({geometry[1:] for geometry in geometries}) == 1
        for kind in dict.fromkeys((spec.geometry, spec.window is not None) for spec in case.specs):
            geometry, has_window = kind
            self.kernels[kind], notes_of_kernel = prefill_choice.prefill_kernel(
                attention_shape(case, geometry),
                has_window=has_window,
                both_ways=any(spec.both_ways for spec in case.specs),
                batch_invariant=case.batch_invariant,
                has_plain_blocks=self._has_plain_blocks,
                has_whole_rows=_has_whole_rows(case, geometry),
                scratch_tokens=scratch_tokens(case.max_model_len, case.max_num_seqs),
            )
            notes += notes_of_kernel
        self.projected = ProjectedLatents.make(case)
        """The attention of chunks of batches that project latents; None: there are no such batches."""
        if self.projected is not None:
            notes.append(PROJECTED_NOTE)
        self._whole = {kind: [(kernel, self._tiles.of(kernel))] for kind, kernel in self.kernels.items()}
        self.notes = tuple(dict.fromkeys(notes))
        self.prefix_tile_tokens = 0
        """The tokens that fill a tile, for the kernel with the smallest tiles; 0: none attends to prefixes."""
        self._prefixed: dict[Geometry, list[tuple[PrefillKernel, PrefillTiles]]] = {}
        for (geometry, has_window), kernel in self.kernels.items():
            if case.max_shared_rows and not has_window and attends_prefixes(kernel):
                for_rests = PrefillAttention(attention_shape(case, geometry), PrefillKind.REST)
                kernels = (for_rests if part is TilePart.REST else kernel for part in _PARTS)
                self._prefixed[geometry] = [
                    (one, self._tiles.of(one, part)) for one, part in zip(kernels, _PARTS, strict=True)
                ]
                tokens = max(1, kernel.tile_key.rows // kernel.tile_key.group)
                self.prefix_tile_tokens = min(self.prefix_tile_tokens or tokens, tokens)
        most_heads = max((geometry[0] for geometry in self._prefixed), default=0)
        self._log_sums = torch.empty(case.max_num_batched_tokens * most_heads, dtype=torch.float32, device=case.device)

    def plan(self, batch: ForwardBatch) -> None:
        """List the step's work."""
        chunks = Chunks(
            query_start_loc=batch.query_start_loc,
            seq_lens=batch.seq_lens,
            slots=batch.slots,
            first=batch.num_decoded_rows,
            num_tokens=batch.num_tokens - batch.num_decoded_tokens,
            prefixes=batch.prefixes,
        )
        if batch.shape.projects_latents:
            assert self.projected is not None
            self.projected.plan(chunks)
        else:
            self._tiles.plan(chunks)

    def run(self, spec: AttentionSpec, inputs: LayerInputs, batch: ForwardBatch, out: Tensor) -> None:
        """Attend the chunks as planned."""
        has_window = spec.window is not None
        is_whole = batch.prefixes is None or has_window
        for kernel, tiles in self._whole[spec.geometry, has_window] if is_whole else self._prefixed[spec.geometry]:
            kernel.run(inputs, tiles, out, self._log_sums)

    def segment_kinds(self) -> set[tuple[Geometry, bool]]:
        """Return the kinds whose decode rows a kernel for Hopper GPUs may serve where they share segments."""
        if not self._has_plain_blocks:
            return set()
        return {kind for kind, kernel in self.kernels.items() if attends_segments(kernel)}


def _has_whole_rows(case: AttentionCase, geometry: Geometry) -> bool:
    """Tell whether the distance from one block of a layer to the next is a whole number of tokens' keys."""
    _, num_kv_heads, head_dim, _, _ = geometry
    return case.block_bytes % (num_kv_heads * head_dim * case.cache_dtype.itemsize) == 0


@dataclass(frozen=True, slots=True)
class _Kernels:
    """Decode kernels for one geometry, with or without windows."""

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
        max_tokens = max(case.max_shared_rows, case.max_draft_step_tokens)
        for spec in case.specs:
            geometry, kind = spec.geometry, (spec.geometry, spec.window is not None)
            if kind not in self._kernels:
                shape, max_rows = attention_shape(case, geometry), case.max_shared_rows
                own = decodes[geometry]
                if kind in on_hopper:
                    own = DecodeAttention(
                        shape,
                        windows=[None],
                        max_rows=max_rows,
                        max_width=case.max_decode_width,
                        max_tokens=case.max_draft_step_tokens,
                        is_beside=True,
                    )
                shared = SegmentAttention(shape, max_rows=max_tokens, on_hopper=kind in on_hopper)
                self._kernels[kind] = _Kernels(shared, own)
            kernels = self._kernels[kind]
            key = geometry, spec.window, spec.kv_group
            if key not in self._lists:
                lists = kernels.shared.work_list(spec.window), kernels.own.work_list(spec.window)
                self._lists[key] = _Lists(spec.kv_group, *lists)
        most_heads = max((spec.num_heads for spec in case.specs), default=0)
        self._log_sums = torch.empty(max_tokens * most_heads, dtype=torch.float32, device=case.device)
        self._token_rows = TokenRows.empty(case.max_draft_step_tokens, case.device)

    def plan(self, batch: ForwardBatch) -> None:
        """List the step's work; the batch has segments."""
        tables, num_rows = batch.segments, batch.num_decoded_rows
        assert tables is not None
        seq_lens, slots = batch.seq_lens[:num_rows], batch.slots[:num_rows]
        tokens = row_tokens(batch)
        if tokens is not None:
            expand_rows(tokens.starts, seq_lens, slots, *self._token_rows)
        for lists in self._lists.values():
            group, width = lists.kv_group, batch.shape.tokens_per_row
            lists.shared.plan(*self._rows_of_tokens(batch), tables.segments[group], tables.slot_segments[group], width)
            lists.own.plan(seq_lens, slots, lists.shared.lists.own_begins, tokens)

    def run(self, spec: AttentionSpec, inputs: LayerInputs, batch: ForwardBatch, out: Tensor) -> None:
        """Attend the decode rows as planned; the arguments are those of `AttentionBackend.decode`."""
        lists = self._lists[spec.geometry, spec.window, spec.kv_group]
        kernels = self._kernels[spec.geometry, spec.window is not None]
        seq_lens, slots = self._rows_of_tokens(batch)
        results = kernels.shared.run(inputs, lists.shared, slots, seq_lens)
        kernels.own.run(inputs, out, own=(lists.own, self._log_sums), tokens=row_tokens(batch))
        merge_segments(out, self._log_sums, results)

    def _rows_of_tokens(self, batch: ForwardBatch) -> tuple[Tensor, Tensor]:
        """Return the lengths and slots of the decode rows' tokens."""
        num_tokens = batch.num_decoded_tokens
        if batch.shape.tokens_per_row == 1:
            return batch.seq_lens[:num_tokens], batch.slots[:num_tokens]
        return self._token_rows.lens[:num_tokens], self._token_rows.slots[:num_tokens]
