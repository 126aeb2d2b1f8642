"""Quantisation: how a published format stores weights. Each format is a file beside this one. Torch-free.

A format's file reads what config.json says, and names the tensors that make up a weight. `join.py` finds these in a
checkpoint, and `models/stored_values.py` decodes them; neither knows any formats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from nvcli.core.config_types import KeptWeights
from nvcli.core.validation import is_integer, show
from nvcli.models.json_file import JsonFile
from nvcli.models.tensor_info import Packing

WORD_SIZES = (2, 4, 8)
"""Sizes of codes, in bits, of which a 32-bit word holds a whole number."""
FLOATS = ("BF16", "F16", "F32")


class QuantisationFile(JsonFile):
    """The section of config.json that says how a checkpoint is quantised. Errors name the file and the key."""

    def group_size(self, default: int | None) -> int | None:
        """Read `group_size`; None, or -1 in the files, stands for whole rows."""
        if self.values.get("group_size") is None:
            return default
        return None if self.values["group_size"] == -1 else self.positive("group_size")

    def block(self, key: str) -> tuple[int, int]:
        """Read the rows and columns that share a scale."""
        found: Any = self.values.get(key)
        if isinstance(found, str):  # as older files spell it: 128x128
            found = [int(size) if size.isdecimal() and len(size) < 9 else None for size in found.split("x")]
        if not (isinstance(found, list) and len(found) == 2 and all(is_integer(size, 1) for size in found)):
            raise self.error(key, f"{show(self.values.get(key))} is not a pair of sizes such as [128, 128]")
        return found[0], found[1]

    def bits(self, key: str, allowed: tuple[int, ...] = WORD_SIZES) -> int:
        """Read the size of a code."""
        bits = self.positive(key)
        if bits not in allowed:
            raise self.error(key, f"{bits} bits are not supported here, only {', '.join(map(str, allowed))}")
        return bits

    def names(self, *keys: str) -> tuple[str, ...]:
        """Read lists of names or patterns; an absent one is empty."""
        found: list[str] = []
        for key in keys:
            names = self.values.get(key) or []
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                raise self.error(key, f"{show(names)} is not a list of names")
            found += names
        return tuple(found)

    def one_of(self, key: str, default: str, supported: tuple[str, ...]) -> str:
        """Read the name of a variant, in lower case."""
        found = self.get(key, str, default)
        if found.lower() not in supported:
            raise self.error(key, f"{show(found)} is not supported, only {' and '.join(supported)}")
        return found.lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatParts:
    """The tensors of a flattened weight besides its codes and scales, by the last parts of their names."""

    table: str
    state: str
    nested_table: str
    """Present, as are `nested_scales`, if the scales are places in a table."""
    nested_scales: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightParts:
    """The tensors that make up a quantised weight [out, in], by the last parts of their names."""

    codes: str
    stored_as: tuple[str, ...]
    """safetensors' types of the codes."""
    scales: tuple[str, ...]
    """Possible names, of which a checkpoint has one."""
    scales_stored_as: tuple[str, ...] = FLOATS
    zeros: str | None = None
    groups: str | None = None
    """The index of each column's group, present if the columns of a group are not contiguous."""
    factor: str | None = None
    """A number by which all scales are multiplied."""
    divides: bool = False
    """Whether they are divided by it instead."""
    packing: Packing | None = None
    """How codes are packed; None: they are not. Zeros are packed likewise, but along the rows."""
    is_transposed: bool = False
    """Whether all are stored [in, out]."""
    unit: float = 1.0
    """A number by which all scales are multiplied."""
    columns: str | None = None
    """A number for each column, by which the values are multiplied, if a checkpoint has them."""
    flat: FlatParts | None = None
    """The other tensors of a flattened weight."""

    @property
    def has_four_bits(self) -> bool:
        """Whether codes have 4 bits each."""
        return self.packing is not None and self.packing.bits == 4


ONE_BY_ONE = WeightParts(
    codes="weight",
    stored_as=("F8_E4M3", "I8"),
    scales=("weight_scale", "weight_scale_inv", "scale"),
    scales_stored_as=(*FLOATS, "U8"),
    zeros="weight_zero_point",
)
"""Unpacked 8-bit codes. Checkpoints of any format may have some."""
EXPONENTS = ("U8",)
"""safetensors' type of scales that are exponents of 2."""
FP4_PAIRS = Packing(bits=4, dim=1, per_index=2)
"""Numbers of FP4, two neighbours of a row in a byte."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How the linear layers of a checkpoint are stored."""

    method: str
    """`quant_method` of config.json."""
    numbers: Literal["fp8", "fp4", "integer", "affine", "mxfp4", "table"]
    """The kind of its codes; `affine` are integers whose groups have offsets, `mxfp4` is FP4 of which ranks keep the
    stacks of experts, and `table` are numbers of a table."""
    bits: int
    label: str | None = None
    """The name of the format, for people; None: it follows from the other fields."""
    parts: tuple[WeightParts, ...] = (ONE_BY_ONE,)
    """The ways in which a weight may be stored."""
    weight_block: tuple[int, int] | None = None
    """(rows, columns) of a weight that share a scale, if config.json says so."""
    group_size: int | None = None
    """The number of columns of a row that share a scale, if not all of them do."""
    zero_offset: int = 0
    """A number that is added to stored zeros of packed codes."""
    needed: tuple[str, ...] = ()
    """Parts that integers must have according to config.json: without them, the codes would mean other numbers."""
    has_nvfp4_alone: bool = False
    """Whether all quantised weights are in NVFP4, with no factors besides its own, so that ranks can keep them."""
    has_fp8_beside: bool = False
    """Whether the layers besides experts in MXFP4 are in FP8; otherwise they are not quantised."""
    has_head: bool = False
    """Whether the LM head, or the embedding that it is tied to, is stored likewise, so that ranks can keep it. Of
    formats whose config.json does not say so, the files do (`stored_tensors.py`)."""
    makes_ternary: bool = False
    """Whether plain weights of the layers become ternary when they are loaded."""
    rounds_inputs: bool = False
    """Whether the layers round each row of their input to 8 bits."""
    left_alone: tuple[str, ...] = ()
    """Patterns of the layers that are not quantised (`module_names.py`)."""
    wide: tuple[str, ...] = ()
    """Patterns of the layers whose affine codes have more than 4 bits."""
    narrow_groups: tuple[str, ...] = ()
    """Patterns of the layers whose affine codes are in groups of 16 rather than 32."""
    names_decoder: bool = False
    """Whether patterns are names of modules alone, which are renamed as tensors are (`renamed`)."""

    def renamed(self, decoder_name: Callable[[str], str | None]) -> Quantisation:
        """Return the same, with the decoder's names in the lists of modules. `decoder_name` gives the name in the
        decoder of a tensor in the files; None: it has none."""

        def names(modules: tuple[str, ...]) -> tuple[str, ...]:
            found = (decoder_name(f"{module}.weight") for module in modules)
            return tuple(name.removesuffix(".weight") for name in found if name is not None)

        wide, narrow = names(self.wide), names(self.narrow_groups)
        return replace(self, left_alone=names(self.left_alone), wide=wide, narrow_groups=narrow)

    @property
    def kept_as(self) -> KeptWeights:
        """How ranks keep its weights by default, if memory and the GPU allow it; `none`: as plain weights."""
        if self.numbers == "fp8" or (self.numbers == "fp4" and not self.has_nvfp4_alone):
            return "fp8"
        if self.numbers == "affine":
            return "w4a16"
        return "w4a16" if self.bits == 4 and self.numbers != "table" else "none"

    @property
    def has_column_order(self) -> bool:
        """Whether the columns of a group are not contiguous (act-order)."""
        return any(parts.groups in self.needed for parts in self.parts)

    @property
    def name(self) -> str:
        """The name of the format, for people."""
        if self.label is not None:
            return self.label
        if self.numbers == "fp8":
            rows, columns = self.weight_block or (0, 0)
            return f"FP8, a scale for each {rows}×{columns} weights" if rows else "FP8"
        return f"{self.method}, {self.bits} bits"
