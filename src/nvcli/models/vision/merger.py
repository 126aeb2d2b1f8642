"""Mergers: what makes the decoder's embedding of each token's square of patches, in each way of `MergerConfig`.

Each is held to transformers' own. Shapes: P patches, H hidden size of the tower, N tokens, O the decoder's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvcli.models.parallel import BuildContext
from nvcli.models.vision.latent_merger import LatentMerger
from nvcli.models.vision.tower_parts import GatedMLP, Linear, Norm, Weights, side_by_side
from nvcli.models.vision.vision_config import NUM_MARKS, QKV, DeepOutput, VisionConfig
from nvcli.models.weights import DerivedModule


class SquareMerger(nn.Module):
    """An MLP of the patches' vectors side by side, and in some models another projection: [P, H] → [N, O]."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig, *, norms_squares: bool) -> None:
        """`norms_squares`: the norm, if there is one, is over all patches of a token together."""
        super().__init__()
        self.count, self.norms_squares, self.config = config.late_merge**2, norms_squares, config.merger
        self.norm = Norm(build, f"{path}.norm", config.merger.eps) if config.merger.has_norm else nn.Identity()
        self.first, self.second = Linear(build, f"{path}.linear_fc1"), Linear(build, f"{path}.linear_fc2")
        numbers = () if config.merger.patch_result_size is None else (1, 2)
        self.of_patch = nn.ModuleList(Linear(build, f"{path}.patch_linear_fc{number}") for number in numbers)
        is_last = config.merger.result_size is None
        self.projector = nn.Identity() if is_last else Linear(build, f"{path}.projector")

    def forward(self, x: Tensor) -> Tensor:
        if self.of_patch:
            first, second = self.of_patch
            x = second(F.gelu(first(x)))
        beside = partial(side_by_side, count=self.count, by_channel=self.config.by_channel)
        x = self.norm(beside(x)) if self.norms_squares else beside(self.norm(x))
        x = self._activated(self.first(x))
        x = self.second(x)
        out: Tensor = self.projector(self._activated(x) if self.config.activates_result else x)
        return out

    def _activated(self, x: Tensor) -> Tensor:
        if self.config.is_gated:
            up, gate = x.chunk(2, dim=-1)
            return F.silu(gate) * up
        return F.gelu(x) if self.config.activation == "gelu" else F.relu(x).square()


class LinearMerger(nn.Module):
    """A projection of the patches' vectors side by side (Idefics 3): [P, H] → [N, O]."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig) -> None:
        super().__init__()
        self.count = config.late_merge**2
        self.projection = Linear(build, f"{path}.projection")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.projection(side_by_side(x, self.count))
        return out


class PooledMerger(nn.Module):
    """The mean of the patches, normed and projected (Gemma 3): [P, H] → [N, O]."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig) -> None:
        super().__init__()
        self.count = config.late_merge**2
        self.norm = Norm(build, f"{path}.norm", config.merger.eps)
        self.projection = Weights(build, f"{path}.projection")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x.view(-1, self.count, x.shape[-1]).mean(1)) @ self.projection.weight
        return out


class ProjectingMerger(nn.Module):
    """The mean of the patches, scaled, normed without weights and projected (Gemma 4): [P, H] → [N, O]."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig) -> None:
        super().__init__()
        self.count, self.config = config.late_merge**2, config.merger
        self.projection = Linear(build, f"{path}.projection")
        self.shift, self.scale = (
            Weights(build, f"{path}.{name}") if self.config.is_standardised else None for name in ("shift", "scale")
        )

    def forward(self, x: Tensor) -> Tensor:
        mean = x.view(-1, self.count, x.shape[-1]).float().mean(1) * self.config.scale
        if self.shift is not None and self.scale is not None:
            mean = (mean - self.shift.weight) * self.scale.weight
        out: Tensor = self.projection(F.rms_norm(mean.to(x.dtype), mean.shape[-1:], eps=self.config.eps))
        return out


class PatchMerger(nn.Module):
    """Normed patches merged to one, and an MLP of it (Mistral 3): [P, H] → [N, O]."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig) -> None:
        super().__init__()
        self.count = config.late_merge**2
        self.norm = Norm(build, f"{path}.norm", config.merger.eps)
        self.merging = Linear(build, f"{path}.merging_layer")
        self.first, self.second = Linear(build, f"{path}.linear_fc1"), Linear(build, f"{path}.linear_fc2")

    def forward(self, x: Tensor) -> Tensor:
        x = self.merging(side_by_side(self.norm(x), self.count, by_channel=True))
        out: Tensor = self.second(F.gelu(self.first(x)))
        return out


class GatedMerger(nn.Module):
    """Patches merged by a convolution, normed, and a gated MLP of them (GLM): [P, H] → [N, O]."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig) -> None:
        super().__init__()
        self.count = config.late_merge**2
        self.downsample, self.proj = Linear(build, f"{path}.downsample"), Linear(build, f"{path}.proj")
        self.norm = Norm(build, f"{path}.norm", config.merger.eps)
        self.mlp = GatedMLP(build, path, config.activation, config.limit)

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(side_by_side(x, self.count, by_channel=True))
        out: Tensor = self.mlp(F.gelu(self.norm(self.proj(x))))
        return out


class PlacedMerger(nn.Module):
    """Normed patches projected side by side, to which the places of tokens in their tile are added, and an MLP of their
    sums, with norms (Granite Docling): [P, H] → [N, O]."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig) -> None:
        super().__init__()
        self.count = config.late_merge**2
        self.norm, self.middle_norm, self.last_norm = (
            Norm(build, f"{path}.{name}", config.merger.eps) for name in ("norm", "middle_norm", "last_norm")
        )
        self.projection, self.second = Linear(build, f"{path}.projection"), Linear(build, f"{path}.linear_fc2")
        self.places = TilePlaces(config.tile_tokens, config.out_size)

    def forward(self, x: Tensor) -> Tensor:
        x = self.places(self.projection(side_by_side(self.norm(x), self.count)))
        out: Tensor = self.last_norm(self.second(F.gelu(self.middle_norm(x))))
        return out


class TilePlaces(DerivedModule):
    """Adds sines and cosines of each token's column and row in its tile (https://arxiv.org/abs/1706.03762)."""

    table: Tensor

    def __init__(self, side: int, size: int) -> None:
        super().__init__()
        self.side = side
        self.register_buffer("table", torch.empty(side**2, size, dtype=torch.float32), persistent=False)

    def derive(self, device: torch.device) -> None:
        quarter = self.table.shape[1] // 4
        frequencies = 10_000.0 ** -(torch.arange(quarter, dtype=torch.float64, device=device) / quarter)
        numbers = torch.arange(self.side**2, device=device)
        column, row = numbers % self.side, numbers // self.side
        angles = [torch.outer(place.double(), frequencies) for place in (column, row)]
        self.table = torch.cat([turn for each in angles for turn in (each.sin(), each.cos())], dim=1).float()

    def forward(self, x: Tensor) -> Tensor:
        tiles = x.view(-1, *self.table.shape)
        return (tiles + self.table.to(x.dtype)).view(x.shape)


class BorderedMerger(nn.Module):
    """Normed patches merged by a convolution, two projections and a norm, and the vectors that stand around an image's
    tokens (HunyuanOCR): [P, H] → [N, O]."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig) -> None:
        super().__init__()
        self.count = config.late_merge**2
        self.norm, self.last_norm = (Norm(build, f"{path}.{name}", config.merger.eps) for name in ("norm", "last_norm"))
        self.merging = Linear(build, f"{path}.merging_layer")
        self.first, self.second = Linear(build, f"{path}.linear_fc1"), Linear(build, f"{path}.linear_fc2")
        self.begin, self.newline, self.end = (Weights(build, f"{path}.{name}") for name in ("begin", "newline", "end"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.merging(side_by_side(self.norm(x), self.count, by_channel=True))
        out: Tensor = self.last_norm(self.second(self.first(F.gelu(x))))
        return out

    def borders(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the vectors before an image's tokens, after each row of them, and after the last: [1, O] each."""
        newline = self.second(self.newline.weight[None])
        begin, row_end, end = (self.last_norm(x) for x in (self.begin.weight[None], newline, self.end.weight[None]))
        return begin, row_end, end


class EndedMerger(nn.Module):
    """Normed patches merged by a convolution and projected, and the vector that stands after each row of an image's
    tokens (Hunyuan V4): [P, H] → [N, O]."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig) -> None:
        super().__init__()
        self.count = config.late_merge**2
        self.norm = Norm(build, f"{path}.norm", config.merger.eps)
        self.merging, self.first = Linear(build, f"{path}.merging_layer"), Linear(build, f"{path}.linear_fc1")
        self.newline = Weights(build, f"{path}.newline")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(F.gelu(self.merging(side_by_side(self.norm(x), self.count, by_channel=True))))
        return out

    def borders(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what `BorderedMerger.borders` does: nothing before and after the tokens, [0, O], and the vector after
        each row, [1, O]."""
        newline = self.newline.weight[None]
        return newline[:0], newline, newline[:0]


class ConvolvedMerger(nn.Module):
    """Two convolutions that halve the grid of patches, and a projection (Step 3.7), in some models behind a neck that
    keeps it (GOT-OCR 2): [P, H] → [N, O]."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig) -> None:
        super().__init__()
        merger, of_neck = config.merger, (1, 2) if config.merger.neck_size else ()
        self.neck = nn.ModuleList(Linear(build, f"{path}.neck{number}") for number in of_neck)
        self.norms = nn.ModuleList(Norm(build, f"{path}.neck_norm{number}", merger.eps) for number in of_neck)
        self.halving = nn.ModuleList(Linear(build, f"{path}.downsampler{number}") for number in (1, 2))
        self.projection = nn.Identity() if config.encoder is not None else Linear(build, f"{path}.projection")

    def forward(self, x: Tensor, reads: Sequence[Tensor]) -> Tensor:
        """Merge patches. `reads`: `PatchGrid.reads`"""
        if self.neck:
            (projection, convolution), (first_norm, second_norm), (read, *reads) = self.neck, self.norms, reads
            x = second_norm(_convolved(convolution, first_norm(projection(x)), read))
        for convolution, read in zip(self.halving, reads, strict=True):
            x = _convolved(convolution, x, read)
        out: Tensor = self.projection(x)
        return out


def _convolved(convolution: nn.Module, x: Tensor, read: Tensor) -> Tensor:
    """Project the vectors that lie around each place side by side: [P, H] → [places, O]."""
    padded = torch.cat([x, x.new_zeros(1, x.shape[1])])  # the last is read as number -1
    out: Tensor = convolution(side_by_side(padded[read].flatten(0, 1), read.shape[1], by_channel=True))
    return out


class QueryMerger(nn.Module):
    """Queries made of the tokens' patches attend to each other and to the patches of their window, and are projected
    (Q-Former, https://arxiv.org/abs/2301.12597, as in Granite 4 Vision): [P, H] → [N, O]."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig, *, patch: int | None = None) -> None:
        """`patch`: `DeepOutput.patch`"""
        super().__init__()
        self.patch, self.side, self.window, merger = patch, config.merge_size, config.window_tokens, config.merger
        self.num_heads = merger.num_heads
        self.norm = Norm(build, f"{path}.norm", merger.eps)
        self.first_norm, self.query_norm, self.cross_norm, self.last_norm = (
            Norm(build, f"{path}.{name}", merger.layer_eps)
            for name in ("first_norm", "attn.norm", "crossattn.norm", "last_norm")
        )
        self.queries, self.places = (Weights(build, f"{path}.{name}") for name in ("queries", "places"))
        self.qkv = Linear(build, *(f"{path}.attn.{name}" for name in QKV))
        self.query = Linear(build, f"{path}.crossattn.q_proj")
        self.keys_values = Linear(build, *(f"{path}.crossattn.{name}" for name in QKV[1:]))
        self.proj, self.cross_proj = (Linear(build, f"{path}.{name}.proj") for name in ("attn", "crossattn"))
        self.first, self.second = Linear(build, f"{path}.linear_fc1"), Linear(build, f"{path}.linear_fc2")
        self.projection = Linear(build, f"{path}.projection")

    def forward(self, x: Tensor) -> Tensor:
        """Merge patches, which come window by window, and token by token in each."""
        window, side, size = self.window, self.side, x.shape[-1]
        x = self.norm(x)
        squares = x.view(-1, side**2, size)
        tokens = squares.mean(1) if self.patch is None else squares[:, self.patch]
        queries = self.first_norm((tokens.view(-1, window**2, size) + self.queries.weight).flatten(0, 1))
        places = self.places.weight.view(window, side, window, side, size).transpose(1, 2).reshape(-1, size)
        patches = (x.view(-1, len(places), size) + places).flatten(0, 1)
        queries = self.query_norm(queries + self.proj(self._attended(*self.qkv(queries).chunk(3, dim=-1))))
        own = self._attended(self.query(queries), *self.keys_values(patches).chunk(2, dim=-1))
        queries = self.cross_norm(queries + self.cross_proj(own))
        queries = self.last_norm(queries + self.second(F.gelu(self.first(queries))))
        out: Tensor = self.projection(queries)
        return out

    def _attended(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attend from each window's queries to its keys: [N, H], [P, H], [P, H] → [N, H]."""
        count = len(queries) // self.window**2
        q, k, v = (
            part.reshape(count, -1, self.num_heads, part.shape[-1] // self.num_heads).transpose(1, 2)
            for part in (queries, keys, values)
        )
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(queries.shape)


class TableMerger(nn.Module):
    """A softmax over the patches' normed projection weighs the vectors of a table (Ovis 2,
    https://arxiv.org/abs/2405.20797): [P, H] → [N, O]."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig) -> None:
        super().__init__()
        self.count, self.eps = config.late_merge**2, config.merger.eps
        self.projection = Linear(build, f"{path}.projection")
        self.norm, self.table = (Weights(build, f"{path}.{name}") for name in ("norm", "table"))

    def forward(self, x: Tensor) -> Tensor:
        x = self.projection(side_by_side(x, self.count))
        x = F.layer_norm(x, x.shape[-1:], self.norm.weight, self.norm.bias, self.eps).softmax(-1)
        return F.pad(x, (0, NUM_MARKS)) @ self.table.weight

    def with_marks(self, embeddings: Tensor, count: int, columns: int) -> Tensor:
        """Put the vectors of marks around and between the tokens of an image: [N, O] → [tokens, O]. `embeddings`:
        `count` of each tile, in rows of `columns` tiles, and of the whole image, which comes first here."""
        begin, whole_end, tile_end, row_end, end = torch.split(self.table.weight[-NUM_MARKS:], 1)
        *tiles, whole = torch.split(embeddings, count)
        parts = [begin, whole, whole_end]
        for number, tile in enumerate(tiles):
            parts += [row_end if number % columns == 0 else tile_end, tile] if number else [tile]
        return torch.cat([*parts, end])


def make_deep_merger(build: BuildContext, path: str, config: VisionConfig, output: DeepOutput) -> nn.Module:
    """Make the merger of a deep output."""
    if config.merger.kind == "queries":
        return QueryMerger(build, path, config, patch=output.patch)
    return SquareMerger(build, path, config, norms_squares=True)


def make_merger(build: BuildContext, path: str, config: VisionConfig) -> nn.Module:
    """Make the merger after the last layer."""
    kind = config.merger.kind
    if kind == "squares":
        return SquareMerger(build, path, config, norms_squares=config.merger.norms_squares)
    kinds = {
        "linear": LinearMerger,
        "pool": PooledMerger,
        "project": ProjectingMerger,
        "patches": PatchMerger,
        "gated": GatedMerger,
        "bordered": BorderedMerger,
        "ended": EndedMerger,
        "placed": PlacedMerger,
        "convolved": ConvolvedMerger,
        "queries": QueryMerger,
        "table": TableMerger,
        "latents": LatentMerger,
    }
    return kinds[kind](build, path, config)
