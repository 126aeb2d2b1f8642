"""TensorSpec: one tensor of a model, how ranks share it and what they keep of it. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal

from nvcli.kernels.weight_formats import FP8Scaling, StoredGroups, W4Format, scale_shape
from nvcli.kernels.whole_numbers import ceil_div

StoredDtype = Literal["float32", "bfloat16", "float16"]
KeptDtype = StoredDtype | Literal["float8_e4m3fn", "int32"]
DTYPE_BYTES: dict[KeptDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "int32": 4}
"""Bytes of one element."""

PAIRED = "gate_up_pairs"
"""A fused projection whose parts' rows alternate."""
FUSED = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "qvk_proj": ("q_proj", "v_proj", "k_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    PAIRED: ("gate_proj", "up_proj"),
    "in_proj": ("in_proj_z", "in_proj_x", "in_proj_B", "in_proj_C", "in_proj_dt"),
    "qkvzba_proj": ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"),
    "xz_proj": ("in_proj_x", "in_proj_z"),
    "bcx_proj": ("b_proj", "c_proj", "x_proj"),
    "conv1d": ("conv1d_x", "conv1d_B", "conv1d_C"),
    "qkv_conv1d": ("q_conv1d", "k_conv1d", "v_conv1d"),
}
"""Projections that files may hold as one tensor, which concatenates their rows."""

EXPERTS = "experts"
"""The name of a layer's experts in its MLP; an expert's number follows it."""

Part = Literal["embeddings", "attention", "MLP", "experts", "norms", "LM head", "classifier", "draft head", "vision"]
"""The items of a memory report under which weights are counted. Experts are those that a router chooses; the router
itself and a shared expert belong to the MLP, and a table that says which experts a token has to the embeddings. A head
that drafts tokens is one item, and so is a tower that reads images."""


class Sharding(Enum):
    """How the ranks of a tensor-parallel group share a tensor."""

    REPLICATED = "replicated"
    """Every rank holds all of it."""
    ROWS = "rows"
    """Each rank holds some of the rows of [out, in], or of a bias [out]."""
    COLUMNS = "columns"
    """Each rank holds some of the columns of [out, in]."""
    EXPERTS = "experts"
    """Each rank holds some of the experts of [experts, …], each of them whole."""
    VOCAB = "vocab"
    """Each rank holds some of the rows of [vocabulary, hidden], padded so that all hold equally many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One tensor of a checkpoint, or one for each expert of a layer, and what each rank keeps of it."""

    name: str
    shape: tuple[int, ...]
    """With `is_of_experts` [experts, out, in], or for biases [experts, out]."""
    sharding: Sharding
    dtype: KeptDtype
    """The type in which ranks keep it. The checkpoint may have another one."""
    part: Part
    max_shards: int | None = None
    """The most pieces that it can be cut into: with more ranks, neighbours hold the same piece. None: no limit."""
    row_order: tuple[int, ...] | None = None
    """The order in which ranks keep the rows of each head (`RopeConfig.row_order`); None: that of the checkpoint."""
    column_order: tuple[int, ...] | None = None
    """The order in which ranks keep the columns; None: that of the checkpoint."""
    offset: float = 0.0
    factor: float = 1.0
    """Ranks keep (the checkpoint's values + offset) × factor."""
    scaling: FP8Scaling | None = None
    """The scaling of a weight that ranks keep in FP8, with scales in float32; None: they keep it in another type."""
    w4: StoredGroups | None = None
    """How the checkpoint groups its 4-bit codes, if ranks keep these (`dtype` is then the type of the values); None:
    ranks keep it in another type."""
    is_of_experts: bool = False
    """Whether a checkpoint stores it separately for each expert, under the names of `stored_name`."""
    in_linear_layer: bool = True
    """Whether, if it is a matrix that ranks cut, a linear layer multiplies by it, to whose product single rows may have
    additions (LoRA)."""
    kept_with: tuple[str, ...] = ()
    """The projections, by the last parts of their names and including this one, that ranks keep together in FP8 or 4
    bits; empty: it is never kept so."""

    def whole(self) -> TensorSpec:
        """Return the tensor as one of which every rank holds all."""
        return replace(self, sharding=Sharding.REPLICATED, max_shards=None)

    def stored_name(self, expert: int | None) -> str:
        """Return its name in a checkpoint; `expert` selects one expert's tensor if it is of experts."""
        assert self.is_of_experts == (expert is not None)
        return self.name if expert is None else self.name.replace(f".{EXPERTS}.", f".{EXPERTS}.{expert}.")

    @property
    def stored_names(self) -> Iterator[str]:
        """Yield all its names in a checkpoint."""
        experts = range(self.shape[0]) if self.is_of_experts else (None,)
        return (self.stored_name(expert) for expert in experts)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of the tensor under each of these names."""
        return self.shape[1:] if self.is_of_experts else self.shape

    def shard(self, rank: int, size: int) -> tuple[slice, ...]:
        """Return the part that rank `rank` of `size` has. It is empty where a vocabulary has fewer rows."""
        whole = tuple(slice(0, length) for length in self.shape)
        if self.sharding is Sharding.REPLICATED:
            return whole
        if self.sharding is Sharding.VOCAB:
            num_rows = self.shape[0]
            rows = ceil_div(num_rows, size)
            return slice(min(rank * rows, num_rows), min((rank + 1) * rows, num_rows)), *whole[1:]
        shard = rank * self._num_shards(size) // size
        length = self.kept_shape(size)[self._axis]
        part = slice(shard * length, (shard + 1) * length)
        return *whole[: self._axis], part, *whole[self._axis + 1 :]

    def kept_shape(self, size: int) -> tuple[int, ...]:
        """Return the shape that each of `size` ranks keeps, including padding."""
        if self.sharding is Sharding.REPLICATED:
            return self.shape
        if self.sharding is Sharding.VOCAB:
            return ceil_div(self.shape[0], size), *self.shape[1:]
        length = self.shape[self._axis] // self._num_shards(size)
        return *self.shape[: self._axis], length, *self.shape[self._axis + 1 :]

    def kept_bytes(self, size: int) -> int:
        """Return the bytes that each of `size` ranks keeps, including padding and scales."""
        shape = self.kept_shape(size)
        if (w4 := self.w4_format(size)) is not None:
            *outer, rows, columns = shape
            order_bytes = 4 * columns if self.w4 is not None and self.w4.has_order else 0
            return math.prod(outer) * w4.num_bytes(rows, columns) + order_bytes
        num_bytes = math.prod(shape) * DTYPE_BYTES[self.dtype]
        if self.scaling is None:
            return num_bytes
        *outer, rows, columns = shape
        num_scales = math.prod((*outer, *scale_shape(rows, columns, self.scaling)))
        return num_bytes + num_scales * DTYPE_BYTES["float32"]

    @property
    def is_multiplied_in_fp8(self) -> bool:
        """Whether products with it take activations in FP8."""
        return self.scaling is not None or (self.w4 is not None and self.w4.kind == "mxfp4 for fp8")

    def w4_format(self, size: int) -> W4Format | None:
        """Return how each of `size` ranks keeps it in 4 bits; None: they keep it in another type."""
        if self.w4 is None:
            return None
        *_, rows, columns = self.kept_shape(size)
        of_last = self.shape[:1] if self.sharding is Sharding.VOCAB else ()  # whose last rank has fewer
        kept = self.w4.kept(columns, rows, *of_last)
        assert kept is not None, "ModelConfig.check_tensor_parallel comes first"
        return kept

    @property
    def _axis(self) -> int:
        """The dimension that is cut."""
        if self.sharding is Sharding.EXPERTS:
            return 0
        return (self.sharding is Sharding.COLUMNS) + self.is_of_experts

    def _num_shards(self, size: int) -> int:
        num_shards = size if self.max_shards is None else min(size, self.max_shards)
        assert self.shape[self._axis] % num_shards == 0, "ModelConfig.check_tensor_parallel comes first"
        return num_shards


def matrix(
    name: str,
    shape: tuple[int, ...],
    sharding: Sharding,
    dtype: StoredDtype,
    part: Part,
    kept_with: tuple[str, ...] = (),
) -> TensorSpec:
    """Return a weight [out, in], or one of more dimensions."""
    return TensorSpec(
        name=f"{name}.weight", shape=shape, sharding=sharding, dtype=dtype, part=part, kept_with=kept_with
    )


def vector(name: str, size: int, sharding: Sharding, part: Part, dtype: StoredDtype = "float32") -> TensorSpec:
    """Return a vector [size], which is kept in the type in which it is used."""
    return TensorSpec(name=name, shape=(size,), sharding=sharding, dtype=dtype, part=part)


def with_bias(weight: TensorSpec, *, bias: bool) -> Iterator[TensorSpec]:
    """Yield a projection's weight, and its bias [out], or [experts, out], if it has one."""
    yield weight
    if bias:
        sharding = Sharding.REPLICATED if weight.sharding is Sharding.COLUMNS else weight.sharding
        name = weight.name.replace(".weight", ".bias")
        yield replace(weight, name=name, shape=weight.shape[:-1], sharding=sharding)
