"""Prefill attention of the `triton` backend where chunks share prefixes: a tile takes tokens of several requests over
the keys that they share, and then each chunk attends to the rest of its keys.

It is made for runs in which requests may share blocks, and works in steps whose batch has such chunks, for kinds of
attention without a window. Like the rest of the backend it plans on the GPU, so that such steps may be captured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import AttentionCase, AttentionSpec, Geometry
from nvcli.kernels.triton.prefill_attention import PrefillAttention
from nvcli.kernels.triton.prefill_tiles import PrefillTiles, TilePart

if TYPE_CHECKING:
    from nvcli.kernels.triton.hopper_prefill import HopperPrefillAttention

_Kernel: TypeAlias = "PrefillAttention | HopperPrefillAttention"


class PrefixedPrefill:
    """The work lists for steps whose chunks share prefixes, over the kernels that attend other chunks."""

    def __init__(self, case: AttentionCase, prefills: dict[Geometry, _Kernel]) -> None:
        """`prefills`: the kernel of each geometry that has kinds of attention without a window, at least one."""
        self._prefills = prefills
        self._tiles: dict[tuple[int, int], tuple[PrefillTiles, PrefillTiles]] = {}
        for prefill in prefills.values():
            if prefill.tile_key not in self._tiles:
                self._tiles[prefill.tile_key] = (
                    self._list(case, prefill, TilePart.PREFIX),
                    self._list(case, prefill, TilePart.REST),
                )
        most_heads = max(num_heads for num_heads, _, _ in prefills)
        self._log_sums = torch.empty(case.max_num_batched_tokens * most_heads, dtype=torch.float32, device=case.device)

    @staticmethod
    def _list(case: AttentionCase, prefill: _Kernel, part: TilePart) -> PrefillTiles:
        group, rows = prefill.tile_key
        return PrefillTiles(
            group=group,
            rows=rows,
            max_tokens=case.max_num_batched_tokens,
            max_chunks=case.max_num_seqs,
            device=case.device,
            part=part,
        )

    @property
    def tile_tokens(self) -> int:
        """The tokens that fill a tile, of the kernel whose tiles hold the fewest."""
        return min(max(1, rows // group) for group, rows in self._tiles)

    def plan(self, batch: ForwardBatch) -> None:
        """List the step's work; the batch has prefixes."""
        first = batch.num_single_rows
        for lists in self._tiles.values():
            for tiles in lists:
                tiles.plan(
                    batch.query_start_loc,
                    batch.seq_lens,
                    batch.slots,
                    first_chunk=first,
                    num_tokens=batch.num_tokens - first,
                    prefixes=batch.prefixes,
                )

    def run(
        self, spec: AttentionSpec, layer: int, q: Tensor, batch: ForwardBatch, out: Tensor, sinks: Tensor | None
    ) -> None:
        """Attend the chunks as planned; the arguments are those of `AttentionBackend.prefill`."""
        prefill = self._prefills[spec.geometry]
        k_cache, v_cache = batch.kv_cache.layer(layer)
        for tiles in self._tiles[prefill.tile_key]:
            prefill.run(
                q,
                k_cache,
                v_cache,
                batch.block_tables[spec.kv_group],
                tiles,
                out,
                scale=spec.scale,
                window=None,
                soft_cap=spec.soft_cap,
                sinks=sinks,
                log_sums=self._log_sums,
            )
