"""Tensor parallelism: the layers whose weights are cut over a group of ranks (`distributed/tensor_parallel.py`).

A column-parallel layer owns rows of the weight (outputs). A row-parallel layer owns columns (inputs), and what it gives
is this rank's part of a sum over the ranks, which the norm behind it takes: there the sum, the residual sum and the
norm are one operation. The group is passed in; nothing here is global. Shapes: T tokens, `in`/`out` features of the
whole layer.

How a linear layer stores and multiplies its piece is its `LinearMethod`'s business, chosen when the model is built:
the place where quantised weights and adapters come in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvcli.distributed.stage import Stage
from nvcli.distributed.tensor_parallel import TensorParallelGroup
from nvcli.kernels.activation import silu_and_mul
from nvcli.kernels.embedding import embed_part
from nvcli.kernels.linear import gated_linear, linear, linear_parts
from nvcli.models.weights import WeightModule, WeightSource, whole


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPiece:
    """What this rank owns of one of the projections that a layer fuses."""

    name: str
    """Of the projection, beside the layer in the checkpoint."""
    shape: tuple[int, int]
    """[out, in] of the whole projection."""
    rows: slice
    columns: slice


class ShardedLinear(WeightModule):
    """y = x Wᵀ + b over this rank's pieces, stacked by rows."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, build: BuildContext, pieces: list[LinearPiece], bias: bool) -> None:
        super().__init__()
        self.group = build.group
        self.pieces = pieces
        self.method = build.linear_method
        self.method.create(self, build.dtype, bias)

    def weight_sources(self, path: str) -> Iterator[WeightSource]:
        return self.method.sources(self, path.rpartition(".")[0])


class LinearMethod(ABC):
    """How a linear layer stores its weight, reads it from a checkpoint and multiplies by it. Shared by all layers."""

    @abstractmethod
    def create(self, layer: ShardedLinear, dtype: torch.dtype, bias: bool) -> None:
        """Give `layer` its parameters."""

    @abstractmethod
    def sources(self, layer: ShardedLinear, parent: str) -> Iterator[WeightSource]:
        """Where they come from; `parent` is the dotted name of the module around the layer."""

    @abstractmethod
    def apply(self, layer: ShardedLinear, x: Tensor, *, with_bias: bool) -> Tensor:
        """[T, columns] → [T, rows] of this rank."""

    def apply_gated(self, layer: ShardedLinear, x: Tensor) -> Tensor:
        """For a layer that fuses gate and up: silu(gate) × up. [T, columns] → [T, rows / 2]."""
        return silu_and_mul(self.apply(layer, x, with_bias=True))

    def apply_for_sum(self, layer: ShardedLinear, x: Tensor) -> Tensor:
        """[T, columns] → [T, rows], or float32 parts [P, T, rows] of it, for a sum that takes either."""
        return self.apply(layer, x, with_bias=True)

    def apply_into(self, layer: ShardedLinear, x: Tensor, out: Tensor, *, with_bias: bool) -> Tensor:
        """As `apply`, with the result in `out`, contiguous."""
        return out.copy_(self.apply(layer, x, with_bias=with_bias))


class PlainLinearMethod(LinearMethod):
    """Weights as they are, in the model's dtype."""

    def create(self, layer: ShardedLinear, dtype: torch.dtype, bias: bool) -> None:
        rows = sum(_length(piece.rows) for piece in layer.pieces)
        columns = _length(layer.pieces[0].columns)
        layer.weight = nn.Parameter(torch.empty(rows, columns, dtype=dtype), requires_grad=False)
        layer.bias = nn.Parameter(torch.empty(rows, dtype=dtype), requires_grad=False) if bias else None

    def sources(self, layer: ShardedLinear, parent: str) -> Iterator[WeightSource]:
        start = 0
        for piece in layer.pieces:
            end = start + _length(piece.rows)
            name = f"{parent}.{piece.name}" if parent else piece.name
            yield WeightSource(
                tensor=f"{name}.weight",
                shape=piece.shape,
                read=(piece.rows, piece.columns),
                parameter="weight",
                write=(slice(start, end), slice(0, _length(piece.columns))),
            )
            if layer.bias is not None:
                yield WeightSource(
                    tensor=f"{name}.bias",
                    shape=piece.shape[:1],
                    read=(piece.rows,),
                    parameter="bias",
                    write=(slice(start, end),),
                )
            start = end

    def apply(self, layer: ShardedLinear, x: Tensor, *, with_bias: bool) -> Tensor:
        return linear(x, layer.weight, layer.bias if with_bias else None)

    def apply_gated(self, layer: ShardedLinear, x: Tensor) -> Tensor:
        return gated_linear(x, layer.weight) if layer.bias is None else super().apply_gated(layer, x)

    def apply_for_sum(self, layer: ShardedLinear, x: Tensor) -> Tensor:
        return linear_parts(x, layer.weight) if layer.bias is None else super().apply_for_sum(layer, x)

    def apply_into(self, layer: ShardedLinear, x: Tensor, out: Tensor, *, with_bias: bool) -> Tensor:
        return linear(x, layer.weight, layer.bias if with_bias else None, out)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """What a model's layers are built for; model files hand it on without looking inside."""

    group: TensorParallelGroup
    dtype: torch.dtype
    linear_method: LinearMethod
    max_positions: int
    """Rotary tables cover positions below it."""
    stage: Stage
    """What of the model is built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """One of the projections that a column-parallel layer fuses."""

    name: str
    out_features: int
    num_shards: int | None = None
    """Pieces that the outputs are cut into; None: one for each rank. With fewer, neighbouring ranks share a piece."""


class ColumnParallelLinear(ShardedLinear):
    """Projections of the same input, each cut by outputs, multiplied as one. [T, in] → [T, this rank's outputs]."""

    def __init__(
        self, build: BuildContext, in_features: int, projections: list[Projection], *, bias: bool = False
    ) -> None:
        group = build.group
        pieces = []
        for p in projections:
            num_shards = group.size if p.num_shards is None else p.num_shards
            assert p.out_features % num_shards == 0, "ModelConfig.check_tensor_parallel comes first"
            rows = p.out_features // num_shards
            shard = group.rank * num_shards // group.size
            pieces.append(
                LinearPiece(
                    name=p.name,
                    shape=(p.out_features, in_features),
                    rows=slice(shard * rows, (shard + 1) * rows),
                    columns=slice(0, in_features),
                )
            )
        super().__init__(build, pieces, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.method.apply(self, x, with_bias=True)

    def gated(self, x: Tensor) -> Tensor:
        """silu(first projection) × second: [T, in] → [T, this rank's outputs / 2]."""
        return self.method.apply_gated(self, x)


class RowParallelLinear(ShardedLinear):
    """A projection cut by inputs. [T, this rank's inputs] → [T, out], this rank's part: over the ranks they add up to
    the projection. `TensorParallelGroup.add_rms_norm` sums them; whatever else reads one has to sum it first.

    With one rank it may be float32 parts [P, T, out], for the residual sum to add up.
    """

    def __init__(
        self, build: BuildContext, in_features: int, out_features: int, *, name: str, bias: bool = False
    ) -> None:
        group = build.group
        assert in_features % group.size == 0, "ModelConfig.check_tensor_parallel comes first"
        columns = in_features // group.size
        piece = LinearPiece(
            name=name,
            shape=(out_features, in_features),
            rows=slice(0, out_features),
            columns=slice(group.rank * columns, (group.rank + 1) * columns),
        )
        super().__init__(build, [piece], bias)
        self.out_features = out_features

    def forward(self, x: Tensor) -> Tensor:
        if self.group.size == 1:
            return self.method.apply_for_sum(self, x)
        with_bias = self.group.rank == 0  # every rank holds it, one adds it: it must enter the sum once
        place = self.group.partial_sum_buffer((x.shape[0], self.out_features), x.dtype)
        if place is None:
            return self.method.apply(self, x, with_bias=with_bias)
        return self.method.apply_into(self, x, place, with_bias=with_bias)


class VocabShard(WeightModule):
    """[vocab_size, H], cut by vocabulary over the ranks and padded so that it divides."""

    def __init__(self, build: BuildContext, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.group = build.group
        self.vocab_size = vocab_size
        self.shard_size = -(-vocab_size // self.group.size)
        self.start = self.group.rank * self.shard_size
        self.weight = nn.Parameter(torch.empty(self.shard_size, hidden_size, dtype=build.dtype), requires_grad=False)

    def weight_sources(self, path: str) -> Iterator[WeightSource]:
        start = min(self.start, self.vocab_size)
        end = min(self.start + self.shard_size, self.vocab_size)
        hidden_size = self.weight.shape[1]
        yield WeightSource(
            tensor=f"{path}.weight",
            shape=(self.vocab_size, hidden_size),
            read=(slice(start, end), slice(0, hidden_size)),
            parameter="weight",
            write=whole((end - start, hidden_size)),
        )


class VocabParallelEmbedding(VocabShard):
    """[T] ids → [T, H]."""

    def forward(self, ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return F.embedding(ids, self.weight)
        place = self.group.partial_sum_buffer((len(ids), self.weight.shape[1]), self.weight.dtype, first=True)
        return self.group.sum(embed_part(ids, self.weight, self.start, place))


class ParallelLMHead(VocabShard):
    """The output projection: [N, H] → [N, shard_size], of the tokens from `start` on; those past the vocabulary are
    padding."""

    def __init__(
        self,
        build: BuildContext,
        vocab_size: int,
        hidden_size: int,
        *,
        tied_to: VocabShard | None = None,
        copy_of: str | None = None,
    ) -> None:
        """`tied_to`: the embedding whose weight is used here too. `copy_of`: its dotted name in the whole model, where
        it is in another stage."""
        super().__init__(build, vocab_size, hidden_size)
        self.is_tied = tied_to is not None
        self.copy_of = copy_of
        if tied_to is not None:
            self.weight = tied_to.weight

    def weight_sources(self, path: str) -> Iterator[WeightSource]:
        return iter(()) if self.is_tied else super().weight_sources(self.copy_of or path)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)


def _length(part: slice) -> int:
    return int(part.stop) - int(part.start)
