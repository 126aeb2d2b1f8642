"""Preparation of the fused QKV projection before heads are rotated, which few families need.

Shapes: T tokens, D head_dim, KV heads of this rank.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor, nn

from nvcli.kernels.norm import norm_shared_parts, rms_norm, squares_of_parts
from nvcli.models.mixers.attention import HEAD_SCALES, AttentionConfig, QueryScaling
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.parallel import BuildContext, TensorShards
from nvcli.models.weights import DerivedModule


class QKVPreparation(nn.Module):
    """Norms queries and keys by row, by LayerNorm or with weights of each head, copies keys as values, and clamps all
    of them, in layers that need it.

    [T, (heads + KV heads, or 2 KV heads) × D] → [T, (heads + 2 KV heads) × D].
    """

    def __init__(self, build: BuildContext, path: str, attention: AttentionConfig, norm: NormConfig) -> None:
        super().__init__()
        self.keys_are_values, self.clip = attention.keys_are_values, attention.clip
        size = build.group.size
        query_size = attention.num_heads // size * attention.head_dim
        self.sizes = query_size, attention.kv_heads_per_rank(size) * attention.head_dim
        self.norm: QKNorm | None = None
        if attention.qk_norm == "row":
            self.norm = QKRowNorm(build, path, norm, self.sizes, attention)
        elif attention.qk_norm == "own":
            self.norm = QKHeadNorms(build, path, norm, self.sizes)
        elif attention.qk_norm == "layer":
            self.norm = QKLayerNorms(build, path, norm, self.sizes)

    @staticmethod
    def is_needed(attention: AttentionConfig) -> bool:
        norms_here, is_clamped = attention.qk_norm not in (None, "head"), attention.clip is not None
        return not attention.shares_kv and (norms_here or is_clamped or attention.keys_are_values)

    def forward(self, qkv: Tensor) -> Tensor:
        if self.keys_are_values:
            qkv = torch.cat((qkv, qkv[:, self.sizes[0] :]), dim=1)
        if self.norm is not None:
            self.norm(qkv[:, : sum(self.sizes)])
        if self.clip is not None:
            qkv.clamp_(-self.clip, self.clip)
        return qkv


class QKNorm(TensorShards):
    """Norms queries and keys, which ranks share by heads, in place: [T, (heads + KV heads) × D], rows may lie apart."""

    q_weight: nn.Parameter
    k_weight: nn.Parameter
    q_bias: nn.Parameter | None
    k_bias: nn.Parameter | None

    def __init__(self, build: BuildContext, path: str, norm: NormConfig, sizes: tuple[int, int]) -> None:
        """`sizes`: the numbers of a token's queries and keys on this rank."""
        kinds = product(("q", "k"), ("weight", "bias"))
        super().__init__(build, {f"{name}_{kind}": f"{path}.{name}_norm.{kind}" for name, kind in kinds})
        self.sizes = sizes
        self.eps = norm.eps
        self.is_centered = norm.kind == "layer"


class QKHeadNorms(QKNorm):
    """Norms each head of queries and of keys by itself, with weights of its own."""

    def forward(self, heads: Tensor) -> None:
        parts = heads.tensor_split((self.sizes[0],), dim=1)
        for rows, weight in zip(parts, (self.q_weight, self.k_weight), strict=True):
            own = rows.view(len(rows), *weight.shape)
            values = own.float()
            if self.is_centered:
                values = values - values.mean(-1, keepdim=True)
            own.copy_(values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps) * weight)


class QKLayerNorms(QKNorm):
    """Norms each head of queries and of keys by LayerNorm."""

    def forward(self, heads: Tensor) -> None:
        of_parts = (self.q_weight, self.q_bias), (self.k_weight, self.k_bias)
        for rows, (weight, bias) in zip(heads.tensor_split((self.sizes[0],), dim=1), of_parts, strict=True):
            own = rows.view(len(rows), -1, len(weight))
            own.copy_(rms_norm(own, weight, self.eps, is_centered=True, bias=bias))


class QKRowNorm(QKNorm):
    """RMSNorm over all heads of a token together, for queries and for keys. Each rank has some of the heads, so their
    squares are summed over the ranks."""

    def __init__(
        self, build: BuildContext, path: str, norm: NormConfig, sizes: tuple[int, int], attention: AttentionConfig
    ) -> None:
        super().__init__(build, path, norm, sizes)
        size = self.group.size
        # If ranks share a KV head, its squares are counted once for each of them.
        kv_heads = attention.kv_heads_per_rank(size) * size
        self.widths = (attention.num_heads * attention.head_dim, kv_heads * attention.head_dim)

    def forward(self, heads: Tensor) -> None:
        squares = self.group.sum_of_squares(squares_of_parts(heads, self.sizes))
        norm_shared_parts(heads, squares, (self.q_weight, self.k_weight), self.eps, self.widths)


class QueryScaleTable(DerivedModule):
    """The factor on queries at every position: positions [T] → [T, 1, 1] float32."""

    table: Tensor

    def __init__(self, scaling: QueryScaling, max_positions: int) -> None:
        super().__init__()
        self.scaling = scaling
        self.register_buffer("table", torch.empty(max_positions, dtype=torch.float32), persistent=False)

    def derive(self, device: torch.device) -> None:
        positions = torch.arange(self.table.shape[0], dtype=torch.float32, device=device)
        places = (positions + self.scaling.offset) / self.scaling.length
        if self.scaling.kind == "power":
            self.table = torch.exp(self.scaling.beta * torch.log1p(places))
        elif self.scaling.kind == "clamped":
            self.table = 1 + self.scaling.beta * torch.log(places.clamp(min=1.0))
        else:
            self.table = 1 + self.scaling.beta * torch.log(1 + torch.floor(places))

    def forward(self, positions: Tensor) -> Tensor:
        return self.table.index_select(0, positions).view(-1, 1, 1)


class HeadScales(TensorShards):
    """The factors on queries that each head has by its own numbers (`head_scale_tensors`): logarithms of positions,
    counted from 1, [T] → [T, heads, 1] float32."""

    scale: nn.Parameter
    bias: nn.Parameter

    def __init__(self, build: BuildContext, path: str) -> None:
        super().__init__(build, {kind: f"{path}.{HEAD_SCALES}.{kind}" for kind in ("scale", "bias")})

    def forward(self, logs: Tensor) -> Tensor:
        return torch.addcmul(self.bias, logs.unsqueeze(1), self.scale).unsqueeze(2)


def query_scale_table(scaling: QueryScaling | None, max_positions: int) -> QueryScaleTable | None:
    """Return the table for runs of `max_positions` tokens; None: no factor is other than 1."""
    if scaling is None or (max_positions + scaling.offset <= scaling.length and scaling.kind != "power"):
        return None
    return QueryScaleTable(scaling, max_positions)
