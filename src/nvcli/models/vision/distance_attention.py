"""DistanceAttention: attention whose scores depend on learned distances of rows and columns (SAM,
https://arxiv.org/abs/2304.02643)."""

from __future__ import annotations

from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvcli.kernels.patch_attention import Segments
from nvcli.kernels.whole_numbers import round_up
from nvcli.models.parallel import BuildContext
from nvcli.models.vision.tower_parts import Linear, Weights
from nvcli.models.vision.vision_config import QKV, VisionConfig

_MULTIPLE = 8
"""PyTorch's kernels for GPUs take heads whose numbers are a multiple of it."""


class DistanceAttention(nn.Module):
    """Attention among the patches of each tile, or of windows that are filled up with zeros, with the projections
    around it: [P, H] → [P, H], token by token.

    A score grows by the product of the query with the vector of the distance of rows, and with that of columns. Queries
    get these products as further numbers, and keys ones at their row and column, so that no bias has to be stored.
    """

    def __init__(self, build: BuildContext, path: str, config: VisionConfig, *, is_whole: bool) -> None:
        super().__init__()
        self.heads, self.merge, self.window = config.num_heads, config.merge_size, config.distance_window
        self.is_whole = is_whole
        self.qkv = Linear(build, *(f"{path}.{name}" for name in QKV))
        self.proj = Linear(build, f"{path}.proj")
        self.of_rows, self.of_columns = (Weights(build, f"{path}.{name}") for name in ("row_distances", "distances"))

    def forward(self, x: Tensor, angles: Tensor | None, segments: Segments) -> Tensor:
        """Attend within each of `segments`, which are squares, or within its windows. `angles` are those of other
        towers."""
        runs = segments.runs
        mixed = torch.cat([self._mixed(x[first : first + count * size], isqrt(size)) for first, count, size in runs])
        out: Tensor = self.proj(mixed)
        return out

    def _mixed(self, x: Tensor, side: int) -> Tensor:
        """Attend in squares of this side."""
        merge, tokens, window = self.merge, side // self.merge, side if self.is_whole else self.window
        size, padded = x.shape[-1], round_up(side, window)
        # tiles, rows and columns of tokens, and of patches in each
        raster = x.view(-1, tokens, tokens, merge, merge, size).transpose(2, 3).reshape(-1, side, side, size)
        filled = F.pad(raster, (0, 0, 0, padded - side, 0, padded - side))
        count = padded // window
        windows = filled.view(-1, count, window, count, window, size).transpose(2, 3).reshape(-1, size)
        mixed = self._attended(self.qkv(windows), window)
        mixed = mixed.view(-1, count, count, window, window, size).transpose(2, 3).reshape(-1, padded, padded, size)
        kept = mixed[:, :side, :side].reshape(-1, tokens, merge, tokens, merge, size).transpose(2, 3)
        return kept.reshape(-1, size)

    def _attended(self, qkv: Tensor, side: int) -> Tensor:
        """Attend within windows of this side, whose patches follow each other row by row: [P, 3 × H] → [P, H]."""
        q, k, v = qkv.view(-1, side**2, 3, self.heads, qkv.shape[-1] // 3 // self.heads).permute(2, 0, 3, 1, 4)
        scale = q.shape[-1] ** -0.5
        place = torch.arange(side, device=qkv.device)
        apart = place[:, None] - place + side - 1  # [side, side], of a query and a key
        squares = q.unflatten(2, (side, side)) / scale
        by_row = torch.einsum("nhrcd,rkd->nhrck", squares, _resized(self.of_rows.weight, side)[apart])
        by_column = torch.einsum("nhrcd,ckd->nhrck", squares, _resized(self.of_columns.weight, side)[apart])
        more = 0, -(q.shape[-1] + 2 * side) % _MULTIPLE
        queries = F.pad(torch.cat([q, by_row.flatten(2, 3), by_column.flatten(2, 3)], dim=-1), more)
        ones = torch.eye(side, dtype=q.dtype, device=q.device)
        where = torch.cat([ones.repeat_interleave(side, 0), ones.repeat(side, 1)], dim=1)
        keys = torch.cat([k, F.pad(where, more).expand(*k.shape[:2], -1, -1)], dim=-1)
        mixed = F.scaled_dot_product_attention(queries, keys, v, scale=scale)
        return mixed.transpose(1, 2).reshape(-1, qkv.shape[-1] // 3)


def _resized(distances: Tensor, side: int) -> Tensor:
    """Return the vectors of the distances in a square of this side, interpolated if they are those of another:
    [2 side - 1, D]."""
    count = 2 * side - 1
    if count == len(distances):
        return distances
    return F.interpolate(distances.T[None].float(), count, mode="linear")[0].T.to(distances.dtype)
