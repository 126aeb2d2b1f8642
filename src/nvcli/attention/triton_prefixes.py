"""Prefill attention of the `triton` backend where chunks share prefixes: a tile takes tokens of several requests over
the keys that they share, and then each of these chunks attends to the rest of its keys.

It is made for runs in which requests may share blocks, and works in steps whose batch has such chunks, for kinds of
attention without a window. Like the rest of the backend it plans on the GPU, so that such steps may be captured.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.attention.backend import AttentionCase
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import AttentionSpec, Geometry
from nvcli.attention.triton_inputs import attention_shape
from nvcli.kernels.triton.attention_launch import LayerInputs
from nvcli.kernels.triton.prefill_attention import PrefillAttention, PrefillKind
from nvcli.kernels.triton.prefill_tiles import PrefillTiles, TileKey, TilePart

_PARTS = TilePart.PREFIX, TilePart.REST, TilePart.OTHERS
"""In this order: a rest goes on from its prefix."""


class PrefixedPrefill:
    """The kernels and work lists for steps whose chunks share prefixes."""

    def __init__(self, case: AttentionCase, prefills: dict[Geometry, PrefillAttention]) -> None:
        """`prefills`: the kernel of each geometry that has kinds of attention without a window, at least one."""
        keys = [prefill.tile_key for prefill in prefills.values()]
        self.tile_tokens = min(max(1, key.rows // key.group) for key in keys)
        """The tokens that fill a tile, of the kernel whose tiles hold the fewest."""
        self._parts: dict[Geometry, list[tuple[PrefillAttention, PrefillTiles]]] = {}
        self._tiles: dict[tuple[TilePart, TileKey], PrefillTiles] = {}
        for geometry, prefill in prefills.items():
            for_rests = PrefillAttention(attention_shape(case, geometry), PrefillKind.REST)
            kernels = (for_rests if part is TilePart.REST else prefill for part in _PARTS)
            self._parts[geometry] = [
                (kernel, self._tiles_of(case, part, kernel)) for part, kernel in zip(_PARTS, kernels, strict=True)
            ]
        most_heads = max(num_heads for num_heads, _, _ in prefills)
        self._log_sums = torch.empty(case.max_num_batched_tokens * most_heads, dtype=torch.float32, device=case.device)

    def _tiles_of(self, case: AttentionCase, part: TilePart, kernel: PrefillAttention) -> PrefillTiles:
        """Return the list of a part, which kernels with equal tiles have in common."""
        # Tiles of prefixes are sorted by their keys as they are.
        tile_key = kernel.tile_key._replace(is_sorted=kernel.tile_key.is_sorted and part is TilePart.OTHERS)
        key = part, tile_key
        if key not in self._tiles:
            self._tiles[key] = PrefillTiles(
                tile_key,
                max_tokens=case.max_num_batched_tokens,
                max_chunks=case.max_num_seqs,
                device=case.device,
                part=part,
            )
        return self._tiles[key]

    def plan(self, batch: ForwardBatch) -> None:
        """List the step's work; the batch has prefixes."""
        first = batch.num_single_rows
        for tiles in self._tiles.values():
            tiles.plan(
                batch.query_start_loc,
                batch.seq_lens,
                batch.slots,
                first_chunk=first,
                num_tokens=batch.num_tokens - first,
                prefixes=batch.prefixes,
            )

    def run(self, spec: AttentionSpec, inputs: LayerInputs, out: Tensor) -> None:
        """Attend the chunks as planned; the arguments are those of `AttentionBackend.prefill`."""
        for kernel, tiles in self._parts[spec.geometry]:
            kernel.run(inputs, tiles, out, None if tiles.part is TilePart.OTHERS else self._log_sums)
