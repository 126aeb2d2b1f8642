"""Tensor parallelism: the layers whose weights are sharded over a group of ranks
(`worker/distributed/tensor_parallel.py`).

A column-parallel layer owns rows of the weight (outputs). A row-parallel layer owns columns (inputs), and its output is
this rank's part of a sum over the ranks. The next norm takes it, and does that sum, the residual sum and the norm in
one operation. The group is passed in; nothing here is global. The model's tensors (`geometry.py`) say which part a rank
has. Shapes: T tokens, `in`/`out` features of the whole layer.

A linear layer's `LinearMethod` stores its pieces and multiplies by them. A factory chooses it for each layer when the
model is built, which is where quantised weights come in. The layer adds the LoRA products of single rows after its own
product.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvcli.kernels.activation import ACTIVATE_AND_MUL, Activation
from nvcli.kernels.embedding import embed_part
from nvcli.kernels.fp8_types import Activations
from nvcli.kernels.invariant_linear import invariant_linear
from nvcli.kernels.linear import gated_linear, linear, linear_for_sum
from nvcli.kernels.lora import activate_with_low_rank, add_low_rank
from nvcli.kernels.lora_types import AdaptedLayer, AdapterBank, AdapterRows
from nvcli.kernels.w4 import w4_linear, w4_rows
from nvcli.kernels.weight_formats import FP8Scaling
from nvcli.models.layer_config import LearnedPositions
from nvcli.models.tensor_spec import StoredDtype, TensorSpec
from nvcli.models.weights import (
    DerivedModule,
    WeightModule,
    WeightSource,
    empty_parameter,
    empty_w4,
    length,
    stacked_rows,
)
from nvcli.worker.distributed.stage import Stage
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearPiece:
    """One of the projections that a linear layer fuses, and which part of it this rank has."""

    weight: TensorSpec
    """[out, in]."""
    bias: TensorSpec | None
    """[out]."""
    rows: slice
    columns: slice


class ShardedLinear(WeightModule):
    """y = x Wᵀ + b over this rank's pieces, stacked by rows."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    weight_scale: nn.Parameter
    """Present only if the weight is in FP8 or 4 bits (`linear_methods.py`)."""
    column_order: nn.Parameter
    """[pieces, columns] int32; present only if 4-bit columns have an order of their own."""
    low_rank: tuple[AdapterBank, AdaptedLayer] | None = None
    """The LoRA adapters on the device, and their matrices for the layer, set when adapters get their places; None: no
    adapter changes the layer."""

    def __init__(self, build: BuildContext, path: str, projections: Sequence[str | LinearPiece]) -> None:
        """Build the layer. `path` is its dotted name in the model; the projections are its siblings in the checkpoint.
        A projection whose rows on this rank are not contiguous is given as its pieces."""
        super().__init__()
        self.group = build.group
        parent = path.rpartition(".")[0]
        self.pieces = tuple(
            linear_piece(build, f"{parent}.{one}") if isinstance(one, str) else one for one in projections
        )
        self.method = build.linear_method(self.pieces)
        self.method.create(self)
        self.takes_adapters = build.has_adapters

    def empty_bias(self) -> nn.Parameter | None:
        """Return memory for the biases of all pieces, in which those without one have zeros; None: none has one."""
        bias = next((piece.bias for piece in self.pieces if piece.bias is not None), None)
        return None if bias is None else empty_parameter(bias, sum(length(piece.rows) for piece in self.pieces))

    def input_scaling(self, adapters: AdapterRows | None = None) -> FP8Scaling | None:
        """Return how the preceding operation should quantise the input for rows with these adapters, if it does not
        keep the values, too; None: not at all."""
        return self.method.input_scaling if adapters is None or self.low_rank is None else None

    def add_adapters(self, out: Tensor, x: Activations, adapters: AdapterRows | None) -> None:
        """Add the products of `x` [T, columns] with the rows' adapters to the layer's product `out` [T, rows], which is
        contiguous."""
        if adapters is not None and self.low_rank is not None:
            add_low_rank(out, values_of(x), adapters, *self.low_rank)

    def weight_sources(self) -> Iterator[WeightSource]:
        return self.method.sources(self)

    def weight_problem(self) -> str | None:
        return self.method.weight_problem(self)


def values_of(x: Activations) -> Tensor:
    """Return the values of a layer's input, which what quantises keeps for layers that read them, too."""
    values = x if isinstance(x, Tensor) else x.values
    assert values is not None
    return values


class LinearMethod(ABC):
    """How a linear layer stores its weight, reads it from a checkpoint and multiplies by it. Unless a method says
    otherwise, the weight is in the type in which the model's tensors are kept."""

    def create(self, layer: ShardedLinear) -> None:
        """Give `layer` its parameters, for its pieces."""
        rows = sum(length(piece.rows) for piece in layer.pieces)
        first = layer.pieces[0]
        layer.weight = empty_parameter(first.weight, rows, length(first.columns))
        layer.bias = layer.empty_bias()

    def sources(self, layer: ShardedLinear) -> Iterator[WeightSource]:
        """Yield the sources of the parameters."""
        yield from stacked_rows("weight", ((piece.weight, (piece.rows, piece.columns)) for piece in layer.pieces))
        yield from stacked_rows("bias", ((piece.bias, (piece.rows,)) for piece in layer.pieces))

    def weight_problem(self, layer: ShardedLinear) -> str | None:
        """Say why the loaded weights cannot be used together, and what to do; None if they can."""
        return None

    @abstractmethod
    def apply(self, layer: ShardedLinear, x: Activations, *, with_bias: bool, out: Tensor | None = None) -> Tensor:
        """Multiply: [T, columns] → [T, rows] of this rank, in `out` (contiguous) if given."""

    @property
    def input_scaling(self) -> FP8Scaling | None:
        """How the method quantises its input, so that the preceding operation may do it; None: not at all."""
        return None

    def apply_gated(
        self, layer: ShardedLinear, x: Activations, activation: Activation, scaling: FP8Scaling | None = None
    ) -> Activations:
        """Compute activation(gate) × up, for a layer that fuses the two. [T, columns] → [T, rows / 2].

        The result may be quantised if the next layer asks for it by its `scaling`.
        """
        return ACTIVATE_AND_MUL[activation](self.apply(layer, x, with_bias=True))

    def apply_for_sum(self, layer: ShardedLinear, x: Activations, residual: Tensor | None) -> Tensor | None:
        """Multiply for the residual sum in a layer without a bias: [T, columns] → what to add to `residual` [T, rows],
        as [T, rows] or float32 parts [P, T, rows], or None if it has been added in place. Without a `residual` it never
        is."""
        return self.apply(layer, x, with_bias=False)


class PlainLinearMethod(LinearMethod):
    """Unquantised weights."""

    def apply(self, layer: ShardedLinear, x: Activations, *, with_bias: bool, out: Tensor | None = None) -> Tensor:
        assert isinstance(x, Tensor), "only FP8 layers take quantised rows"
        return linear(x, layer.weight, layer.bias if with_bias else None, out)

    def apply_gated(
        self, layer: ShardedLinear, x: Activations, activation: Activation, scaling: FP8Scaling | None = None
    ) -> Activations:
        if layer.bias is None:
            assert isinstance(x, Tensor)
            return gated_linear(x, layer.weight, activation)
        return super().apply_gated(layer, x, activation)

    def apply_for_sum(self, layer: ShardedLinear, x: Activations, residual: Tensor | None) -> Tensor | None:
        assert isinstance(x, Tensor)
        return linear_for_sum(x, layer.weight, residual)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """The context in which a model's layers are built. Model files pass it on without looking inside."""

    group: TensorParallelGroup
    tensors: Mapping[str, TensorSpec]
    """The tensors of the stage, by name."""
    linear_method: Callable[[Sequence[LinearPiece]], LinearMethod]
    """Chooses the method of one layer, from its pieces (`linear_methods.py`)."""
    max_positions: int
    """Rotary tables cover positions below it."""
    hidden_size: int
    """The size of the residual stream."""
    stage: Stage
    """The part of the model that is built."""
    dtype: StoredDtype
    """The model's type."""
    has_fp8_units: bool = True
    """Whether products with FP8 weights may quantise activations; otherwise these stay plain."""
    batch_invariant: bool = False
    """Whether a token's results must be bitwise identical in every batch."""
    has_adapters: bool = False
    """Whether rows may have LoRA adapters."""
    attention_dp: bool = False
    """Whether each rank computes the attention of its own rows (`RowsOfRanks`)."""

    @property
    def has_own_rows(self) -> bool:
        """Whether the ranks have different rows outside of the blocks that they share."""
        return self.attention_dp and self.group.size > 1

    def of_own_rows(self) -> BuildContext:
        """Return the context of what a rank computes of its own rows alone, with whole weights."""
        return replace(self, group=TensorParallelGroup.single()) if self.has_own_rows else self

    @property
    def product(self) -> Callable[..., Tensor]:
        """The product x Wᵀ + b for weights outside a `ShardedLinear`: [T, in], [out, in], maybe [out] → [T, out]."""
        return invariant_linear if self.batch_invariant else F.linear


class ColumnParallelLinear(ShardedLinear):
    """Projections of the same input, each sharded by outputs, multiplied as one. [T, in] → [T, this rank's outputs]."""

    def forward(self, x: Activations, adapters: AdapterRows | None = None) -> Tensor:
        out = self.method.apply(self, x, with_bias=True)
        self.add_adapters(out, x, adapters)
        return out

    def gated(
        self,
        x: Activations,
        activation: Activation = "silu",
        scaling: FP8Scaling | None = None,
        adapters: AdapterRows | None = None,
    ) -> Activations:
        """Compute activation(first projection) × second: [T, in] → [T, this rank's outputs / 2], which may be quantised
        if the next layer asks for it by its `scaling`."""
        if adapters is None or self.low_rank is None:
            return self.method.apply_gated(self, x, activation, scaling)
        gate_up = self.method.apply(self, x, with_bias=True)
        return activate_with_low_rank(gate_up, values_of(x), adapters, *self.low_rank, activation)


class RowParallelLinear(ShardedLinear):
    """A projection sharded by inputs. [T, this rank's inputs] → [T, out], this rank's part; the parts of all ranks add
    up to the projection. `TensorParallelGroup.add_rms_norm` sums them; any other reader has to sum them first.

    On a single rank, the result may be float32 parts [P, T, out] for the residual sum to add up, or None if the layer
    has added it to the residual stream itself.
    """

    def __init__(self, build: BuildContext, path: str) -> None:
        super().__init__(build, path, (path.rpartition(".")[2],))
        self.out_features = self.pieces[0].weight.shape[0]

    def forward(self, x: Activations, residual: Tensor | None, adapters: AdapterRows | None = None) -> Tensor | None:
        """Compute the projection. `residual` is the stream [T, out] that it may be added to; None: it must not be added
        yet."""
        if self.group.size > 1:
            buffer = self.group.partial_sum_buffer((x.shape[0], self.out_features), x.dtype)
            return self.part(x, buffer, adapters)
        if self.bias is None:
            delta = self.method.apply_for_sum(self, x, residual)
        else:
            delta = self.method.apply(self, x, with_bias=True)
        target = residual if delta is None else delta[0] if delta.dim() == 3 else delta
        assert target is not None, "without a residual nothing has been added to it"
        self.add_adapters(target, x, adapters)
        return delta

    def part(self, x: Activations, out: Tensor | None = None, adapters: AdapterRows | None = None) -> Tensor:
        """Compute this rank's part [T, out] of a sum, in `out` (contiguous) or in memory of its own."""
        # Every rank holds the bias, but only one adds it: it must enter the sum once.
        part = self.method.apply(self, x, with_bias=self.group.rank == 0, out=out)
        self.add_adapters(part, x, adapters)
        return part


class TensorShards(WeightModule):
    """A module whose parameters each hold this rank's part of one tensor, or all of it."""

    weight: nn.Parameter

    def __init__(self, build: BuildContext, names: Mapping[str, str]) -> None:
        """Create the parameters. `names`: parameter → tensor. A parameter whose tensor the model lacks is None."""
        super().__init__()
        self.group = build.group
        self.tensors: dict[str, TensorSpec] = {}
        for parameter, name in names.items():
            if (tensor := build.tensors.get(name)) is not None:
                self.tensors[parameter] = tensor
                self.register_parameter(parameter, empty_parameter(tensor, *tensor.kept_shape(self.group.size)))
            else:
                self.register_parameter(parameter, None)

    def weight_sources(self) -> Iterator[WeightSource]:
        for parameter, tensor in self.tensors.items():
            yield from stacked_rows(parameter, [(tensor, tensor.shard(self.group.rank, self.group.size))])


class TensorShard(TensorShards):
    """A module with one parameter, `weight`: this rank's part of a tensor, or all of it."""

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__(build, {"weight": name})
        assert self.tensors, name


class VocabShard(TensorShards):
    """A rank's M rows of an embedding or an LM head [vocabulary, H], in the model's type, or in the 4 or 8 bits that a
    checkpoint has (`kernels/w4.py`)."""

    weight_scale: nn.Parameter
    """Present only if the weight is in such bits."""

    def __init__(self, build: BuildContext, names: Mapping[str, str]) -> None:
        """Create the parameters. `names`: see `TensorShards`; `weight` is among them."""
        super().__init__(build, names)
        tensor = self.tensors["weight"]
        self.dtype, self.hidden_size = getattr(torch, tensor.dtype), tensor.shape[1]
        self.format = tensor.w4_format(self.group.size)
        if self.format is not None:
            self.weight, self.weight_scale = empty_w4(tensor.kept_shape(self.group.size), self.format)

    def weight_sources(self) -> Iterator[WeightSource]:
        for source in super().weight_sources():
            if self.format is None or source.parameter != "weight":
                yield source
            else:
                yield source.in_w4("weight_scale", self.format)


class VocabParallelEmbedding(VocabShard):
    """[T] ids → [T, H], sharded by vocabulary over the ranks and padded to divide evenly. Ranks may have different ids
    (`BuildContext.has_own_rows`)."""

    def __init__(self, build: BuildContext, path: str) -> None:
        super().__init__(build, {"weight": f"{path}.weight"})
        self.has_own_rows = build.has_own_rows

    def forward(self, ids: Tensor) -> Tensor:
        if self.group.size == 1:
            return self._look_up(ids) if self.format is not None else F.embedding(ids, self.weight)
        if self.has_own_rows:
            return self.group.scatter_sum(self._look_up(self.group.gather_rows(ids)))
        buffer = self.group.partial_sum_buffer((len(ids), self.hidden_size), self.dtype, first=True)
        return self.group.sum(self._look_up(ids, buffer))

    def _look_up(self, ids: Tensor, out: Tensor | None = None) -> Tensor:
        """Look up the ids that this rank has, in `out` if that is given; others get zeros."""
        start = self.group.rank * len(self.weight)
        if self.format is None:
            return embed_part(ids, self.weight, start, out)
        out = torch.empty(len(ids), self.hidden_size, dtype=self.dtype, device=ids.device) if out is None else out
        return w4_rows(ids, self.weight, self.weight_scale, self.format, start, out)


class PositionEmbedding(TensorShard):
    """[T] positions → [T, H], which every rank looks up by itself."""

    def __init__(self, build: BuildContext, path: str, config: LearnedPositions) -> None:
        super().__init__(build, f"{path}.weight")
        self.offset = config.offset

    def forward(self, positions: Tensor) -> Tensor:
        return F.embedding(positions, self.weight[self.offset :])


class SinusoidalPositions(DerivedModule):
    """[T] positions → [T, H]: sines, then cosines, of angles that fall from each number to the next."""

    table: Tensor

    def __init__(self, build: BuildContext, first: int) -> None:
        """`first`: the number by which position 0 counts."""
        super().__init__()
        self.first = first
        table = torch.empty(build.max_positions, build.hidden_size, dtype=getattr(torch, build.dtype))
        self.register_buffer("table", table, persistent=False)

    def derive(self, device: torch.device) -> None:
        count, size = self.table.shape
        half = size // 2
        frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -(math.log(10000) / max(1, half - 1)))
        angles = torch.outer(torch.arange(self.first, self.first + count, dtype=torch.float32), frequencies)
        table = torch.cat((angles.sin(), angles.cos()), dim=1)
        self.table = table.to(device, self.table.dtype)

    def forward(self, positions: Tensor) -> Tensor:
        return self.table.index_select(0, positions)


class ParallelLMHead(VocabShard):
    """The output projection: [N, H] → [N, M], for this rank's M tokens, starting at rank × M. Tokens past the
    vocabulary are padding."""

    bias: nn.Parameter | None

    def __init__(self, build: BuildContext, names: Mapping[str, str], *, tied_to: VocabShard | None = None) -> None:
        """Build the head. `names`: see `VocabShard`; `tied_to`: an embedding in this stage whose weight it shares."""
        super().__init__(build, names)
        self.product = build.product
        self.is_tied = tied_to is not None
        if tied_to is not None:
            self.weight = tied_to.weight
            if self.format is not None:
                self.weight_scale = tied_to.weight_scale

    def weight_sources(self) -> Iterator[WeightSource]:
        return (one for one in super().weight_sources() if not (self.is_tied and one.parameter == "weight"))

    def forward(self, hidden: Tensor) -> Tensor:
        if self.format is not None:
            return w4_linear(hidden, self.weight, self.weight_scale, self.format, self.bias)
        return self.product(hidden, self.weight, self.bias)


def linear_piece(build: BuildContext, name: str) -> LinearPiece:
    """Return this rank's piece of a projection."""
    weight = build.tensors[f"{name}.weight"]
    rows, columns = weight.shard(build.group.rank, build.group.size)
    return LinearPiece(weight=weight, bias=build.tensors.get(f"{name}.bias"), rows=rows, columns=columns)
