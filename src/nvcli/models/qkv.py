"""Preparation of the fused QKV projection before heads are rotated, in plain torch as few families need it.

Shapes: T tokens, D head_dim, KV heads of this rank.
"""

from __future__ import annotations

from itertools import product

import torch
from torch import Tensor, nn

from nvcli.kernels.norm import rms_norm
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
        self.query_size = attention.num_heads // size * attention.head_dim
        self.kv_size = attention.kv_heads_per_rank(size) * attention.head_dim
        self.norm: QKNorm | None = None
        if attention.qk_norm == "row":
            self.norm = QKRowNorm(build, path, attention, norm)
        elif attention.qk_norm == "own":
            self.norm = QKHeadNorms(build, path, norm)
        elif attention.qk_norm == "layer":
            self.norm = QKLayerNorms(build, path, norm)

    @staticmethod
    def is_needed(attention: AttentionConfig) -> bool:
        norms_here, is_clamped = attention.qk_norm not in (None, "head"), attention.clip is not None
        return not attention.shares_kv and (norms_here or is_clamped or attention.keys_are_values)

    def forward(self, qkv: Tensor) -> Tensor:
        if self.keys_are_values:
            qkv = torch.cat((qkv, qkv[:, self.query_size :]), dim=1)
        if self.norm is not None:
            q, k, _ = torch.split(qkv, [self.query_size, self.kv_size, self.kv_size], dim=1)
            self.norm(q, k)
        if self.clip is not None:
            qkv.clamp_(-self.clip, self.clip)
        return qkv


class QKNorm(TensorShards):
    """The weights of norms of queries and keys, which ranks share by heads."""

    q_weight: nn.Parameter
    k_weight: nn.Parameter
    q_bias: nn.Parameter | None
    k_bias: nn.Parameter | None

    def __init__(self, build: BuildContext, path: str, norm: NormConfig) -> None:
        kinds = product(("q", "k"), ("weight", "bias"))
        super().__init__(build, {f"{name}_{kind}": f"{path}.{name}_norm.{kind}" for name, kind in kinds})
        self.eps = norm.eps
        self.is_centered = norm.kind == "layer"


class QKHeadNorms(QKNorm):
    """Norms each head of queries and of keys by itself, with weights of its own, in place."""

    def forward(self, q: Tensor, k: Tensor) -> None:
        for rows, weight in ((q, self.q_weight), (k, self.k_weight)):
            heads = rows.view(len(rows), *weight.shape)
            values = heads.float()
            if self.is_centered:
                values = values - values.mean(-1, keepdim=True)
            heads.copy_(values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps) * weight)


class QKLayerNorms(QKNorm):
    """Norms each head of queries and of keys by LayerNorm, in place."""

    def forward(self, q: Tensor, k: Tensor) -> None:
        for rows, weight, bias in ((q, self.q_weight, self.q_bias), (k, self.k_weight, self.k_bias)):
            heads = rows.view(len(rows), -1, len(weight))
            heads.copy_(rms_norm(heads, weight, self.eps, is_centered=True, bias=bias))


class QKRowNorm(QKNorm):
    """RMSNorm over all heads of a token together, for queries and for keys, in place. Each rank has some of the heads,
    so their squares are summed over the ranks."""

    def __init__(self, build: BuildContext, path: str, attention: AttentionConfig, norm: NormConfig) -> None:
        super().__init__(build, path, norm)
        size = self.group.size
        # If ranks share a KV head, its squares are counted once for each of them.
        kv_heads = attention.kv_heads_per_rank(size) * size
        self.widths = (attention.num_heads * attention.head_dim, kv_heads * attention.head_dim)

    def forward(self, q: Tensor, k: Tensor) -> None:
        rows = (q.float(), k.float())
        squares = torch.stack([row.square().sum(-1) for row in rows])  # [2, T]
        squares = self.group.sum_of_squares(squares)
        for target, row, weight, square, width in zip(
            (q, k), rows, (self.q_weight, self.k_weight), squares, self.widths, strict=True
        ):
            target.copy_(row * torch.rsqrt(square / width + self.eps).unsqueeze(-1) * weight)


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
