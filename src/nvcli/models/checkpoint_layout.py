"""CheckpointLayout: how a family's published files name and fuse the tensors of its decoder. Torch-free.

The decoder's tensors have one set of names (`geometry.py`): those of a Llama checkpoint, for every tensor that Llama
has. A layout maps a family's names to these, and nothing else knows the family's: loader and checks see a checkpoint's
tensors under the decoder's names (`locate_tensors`), each of them possibly a range of rows of a tensor in the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from typing import Literal, NamedTuple

from msgspec.structs import replace

from nvcli.models.gguf.files import is_gguf
from nvcli.models.gguf.tensors import join_latents
from nvcli.models.quantisation.join import join_parts, twice
from nvcli.models.quantisation.quantisation import Quantisation
from nvcli.models.tensor_info import LowRankChange, RowPlaces, RowsFactor, TensorInfo, TernaryChange, fused_places
from nvcli.models.tensor_spec import EXPERTS, FUSED, PAIRED, TensorSpec

_PART = re.compile(r"^model\.layers\.(\d+)\.(\w+)(?:\.(\d+)(?=\.))?")
"""A layer's number, a name in it, and the number of the part of the layer that it belongs to."""
_FUSED_QKV = ("qkv_proj", "qvk_proj")
_TEXT_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.backbone.", "backbone."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
    ("score.", "score."),
)
"""Prefixes of the text model's tensor names in multimodal checkpoints: (in older or newer files, in the decoder)."""
_OF_HEADS = ("lm_head.", "score.", "prediction.")
"""Prefixes of the names of heads, which files of a bare decoder do not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerNames:
    """How files name the tensors of a vision tower."""

    prefixes: tuple[tuple[str, str], ...]
    """Prefixes of their names: (in the file, with or without `model.` before it; in the model)."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of names that differ after the prefix: (in the file, in the model)."""
    left: tuple[str, ...] = ()
    """Prefixes, in the model, of tensors that are left on disk."""

    def find(self, stored: str) -> str | None:
        """Return the model's name of a tensor in the files; None if it is not the tower's."""
        own = stored.removeprefix("model.")
        for prefix, wanted in self.prefixes:
            if own.startswith(prefix):
                name = own.removeprefix(prefix)
                for found, to in self.renamed:
                    name = name.replace(found, to)
                return wanted + name
        return None


class RowFactors(NamedTuple):
    """Factors of a weight's rows: a vector from the checkpoint times a number, or the squares of these."""

    weight: str
    """The decoder's name of the weight."""
    vector: str
    scaling: float = 1.0
    is_squared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointLayout:
    """Differences between the names in a family's files and the decoder's own."""

    starts: tuple[tuple[str, str], ...] = ()
    """Beginnings of names that differ: (in the file, in the decoder); the first that fits counts."""
    renamed: tuple[tuple[str, str], ...] = ()
    """Parts of names that differ otherwise: (in the file, in the decoder)."""
    qkv_groups: int = 1
    """The groups in which the rows of fused queries, keys and values lie: one, or one for each KV head."""
    parts_per_layer: int = 1
    """The layers of the decoder that each layer of the files is: files number those after the names of blocks and
    norms."""
    undivided: tuple[str, ...] = ()
    """The decoder's names of blocks that have no such number, and belong to the first of these layers."""
    is_part: bool = False
    """Whether the checkpoint holds more than the text model. The rest is left on disk."""
    left: tuple[str, ...] = ()
    """Name prefixes of other tensors that are left on disk."""
    tower: TowerNames | None = None
    """The names of a vision tower's tensors; older files may have the decoder's own names beside them."""
    has_tower: bool = False
    """Whether the tower's tensors are read."""
    of_head: tuple[str, ...] = ()
    """Name prefixes, in the files, of the tensors of a head that drafts tokens. They are read in any case."""
    transposes_linear: bool = False
    """Whether files hold plain weights of linear layers as matrices [in, out] (transformers' Conv1D)."""
    transposes_experts: Literal["none", "some", "all"] = "none"
    """Whether files hold unquantised stacks of experts as matrices [in, out]: some of them, as their shapes tell, or
    all."""
    interleaves_experts: bool = False
    """Whether gate and up rows alternate in stacks of experts, and unquantised stacks hold matrices [in, out]."""
    flattens_experts: bool = False
    """Whether files hold a projection of all experts as one matrix [experts × intermediate size, hidden]."""
    longer: tuple[str, ...] = ()
    """The decoder's names of tensors that may have more rows in files; those after the decoder's are left out."""
    shared: tuple[tuple[str, str], ...] = ()
    """Beginnings of names of tensors that files hold once for several layers, or under other numbers: (the decoder's,
    those in the files). All tensors under the latter are listed, those of the layers that have their own names too."""
    products: tuple[tuple[str, str], ...] = ()
    """Weights to which a product of two matrices is added: (the weight in the decoder, which may fuse several, the
    beginning of the names of the matrices, the one that reads the input first)."""
    row_factors: tuple[RowFactors, ...] = ()
    is_headless: bool = False
    """Whether the LM head is left on disk, and the decoder's names may lack `model.` in the files."""

    def decoder_name(self, stored: str) -> str | None:
        """Return the decoder's name of a tensor in the files, or None for one that is not the text model's."""
        stored = self.with_own_start(stored)
        name: str | None = stored
        is_of_head = stored.startswith(self.of_head)
        in_tower = None if self.tower is None else self.tower.find(stored)
        if is_of_head:
            pass
        elif in_tower is not None:
            assert self.tower is not None
            return in_tower if self.has_tower and not in_tower.startswith(self.tower.left) else None
        elif self.is_part:
            names = (stored, f"model.{stored}") if self.is_headless else (stored,)
            matches = (
                to + each.removeprefix(prefix)
                for each in names
                for prefix, to in _TEXT_PREFIXES
                if each.startswith(prefix)
            )
            name = next(matches, stored if self.tower and stored.startswith("model.") else None)
        elif self.is_headless and not stored.startswith(_OF_HEADS):
            name = "model." + stored.removeprefix("model.")
        if self.is_headless and name is not None and name.startswith("lm_head."):
            return None
        if name is not None and not is_of_head and name.startswith(self.left):
            return None
        for found, wanted in self.renamed if name is not None else ():
            assert name is not None
            name = name.replace(found, wanted)
        if name is not None and self.parts_per_layer > 1:
            name = _PART.sub(self._of_part, name, count=1)
        return name

    def with_own_start(self, stored: str) -> str:
        """Return the name of a tensor in the files, with the beginning that the decoder has for its own."""
        start = next(((found, wanted) for found, wanted in self.starts if stored.startswith(found)), ("", ""))
        return start[1] + stored.removeprefix(start[0])

    def num_groups(self, fused: str, rows: int) -> int:
        """Return the number of groups in which the parts of a fused tensor lie. `rows`: those of its first part."""
        if PAIRED in fused:
            return rows
        return self.qkv_groups if fused.split(".")[-2] in _FUSED_QKV else 1

    def reads_part_of(self, stored: str) -> bool:
        """Whether a tensor in the files belongs to a vision tower that is read."""
        return self.has_tower and self.tower is not None and self.tower.find(stored) is not None

    def _of_part(self, found: re.Match[str]) -> str:
        """Return the start of the decoder's name of a tensor whose layer in the files has several parts."""
        layer, block, part = found.groups()
        return f"model.layers.{int(layer) * self.parts_per_layer + int(part or 0)}.{block}"

    def stored_modules(self, module: str) -> list[str]:
        """Return the names that a module of the decoder may have in the files, on its own or fused with others."""
        parent, _, last = module.rpartition(".")
        fused = [f"{parent}.{name}" for name, parts in FUSED.items() if last in parts]
        names = []
        for name in (module, *fused):
            if self.parts_per_layer > 1 and (match := _PART.match(name)):
                layer, part = divmod(int(match[1]), self.parts_per_layer)
                number = "" if match[2] in self.undivided else f".{part}"
                name = f"model.layers.{layer}.{match[2]}{number}{name[match.end(2) :]}"
            for found, wanted in reversed(self.renamed):
                name = name.replace(wanted, found)
            prefixes = [each for each in _TEXT_PREFIXES if self.is_part and name.startswith(each[1])]
            names += [name, *(found + name.removeprefix(wanted) for found, wanted in prefixes if found != wanted)]
        names += [found + each.removeprefix(to) for each in names for found, to in self.starts if each.startswith(to)]
        return [each for each in names if (own := self.with_own_start(each)) == each or own in names]


def starts_after(prefix: str, starts: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return `CheckpointLayout.starts` of a model whose files put `prefix` before all names but the LM head's, and of
    its bare decoder, whose files do not."""
    return tuple((before + found, wanted) for found, wanted in starts.items() for before in (prefix, ""))


PLAIN_LAYOUT = CheckpointLayout()
"""The decoder's own names, whether projections are fused or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedTensors:
    """A checkpoint's tensors under the decoder's names."""

    tensors: Mapping[str, TensorInfo]
    left: tuple[str, ...] = ()
    """Names, as in the files, of tensors outside the text model."""
    other_parts: tuple[str, ...] = ()
    """The parts that are not read at all, once for each of their tensors."""
    other_bytes: int = 0
    has_tower: bool = False
    """Whether a vision tower is read, too."""

    @property
    def note(self) -> str | None:
        """Return the note for the user about tensors that stay on disk; None if there are none."""
        if not self.other_parts:
            return None
        parts = ", ".join(dict.fromkeys(self.other_parts))
        read = "what reads text and images" if self.has_tower else "the text part of the model"
        return (
            f"only {read} is loaded: {len(self.other_parts):,} tensors ({self.other_bytes / 2**30:,.1f} GiB) of other "
            f"parts ({parts}) are left on disk"
        )


def locate_tensors(
    layout: CheckpointLayout,
    stored: Mapping[str, TensorInfo],
    wanted: Iterable[TensorSpec],
    quantisation: Quantisation | None = None,
) -> LocatedTensors:
    """Find the tensors of a checkpoint (`stored`, by the names in its files) under the decoder's names.

    `wanted` are the tensors of the whole decoder, and `quantisation` is how the checkpoint's linear layers are stored.
    Raises LoadError if a fused tensor does not have as many rows as its parts together, or if the parts of a quantised
    weight do not fit together.
    """
    found: dict[str, TensorInfo] = {}
    left: dict[str, TensorInfo] = {}
    wanted = tuple(wanted)
    for name, info in stored.items():
        decoder_name = layout.decoder_name(name)
        if decoder_name is None:
            left[name] = info
        else:
            found[decoder_name] = info
    if quantisation is not None:
        join_parts(found, quantisation)
    join_latents(found)
    shapes = {name: tensor.stored_shape for tensor in wanted for name in tensor.stored_names}
    for name, info in found.items():
        if layout.transposes_linear and name.endswith("_proj.weight") and info.codes is None and info.flat is None:
            found[name] = info = replace(info, shape=info.shape[::-1], is_transposed=True)
        rows = shapes[name][0] if name in layout.longer else 0
        if rows and info.shape[0] > rows:
            num_bytes = info.num_bytes * rows // info.shape[0]
            found[name] = replace(info, shape=(rows, *info.shape[1:]), rows=RowPlaces(first=0), num_bytes=num_bytes)
        elif info.flat is not None:
            found[name] = _with_shape(info, [shapes[part] for part in (name, *fused_parts(name)) if part in shapes])
        elif name in shapes and info.shape == (1, *shapes[name]):  # a stack of one
            found[name] = replace(info, shape=shapes[name], expert=0)
        elif shapes.get(name) == (1,) and info.shape == ():  # a single number
            found[name] = replace(info, shape=(1,))
        elif info.stored is not None and len(shape := shapes.get(name, ())) == 1 and _is_vector(info.shape, shape[0]):
            found[name] = replace(info, shape=shape, stored=replace(info.stored, shape=shape))
    for name in [name for name in found if name not in shapes]:
        if parts := [part for part in fused_parts(name) if part in shapes]:
            _split(found, found.pop(name), parts, shapes, layout.num_groups(name, shapes[parts[0]][0]))
        elif (experts := stacked_parts(name, shapes)) and layout.flattens_experts:
            _unflatten(found, found.pop(name), [name for (name,) in experts], shapes)
        elif experts:
            info = found.pop(name)
            _unstack(found, info, experts, shapes, layout, is_paired=layout.interleaves_experts or PAIRED in name)
    products = [
        (name, {factor: found.pop(factor, None) for factor in (f"{beginning}.0.weight", f"{beginning}.1.weight")})
        for name, beginning in layout.products
    ]
    _share(found, layout.shared)
    for name, factors in products:
        _add_product(found, name, factors, shapes)
    for of_rows in layout.row_factors:
        _add_row_factors(found, of_rows)
    if quantisation is not None and quantisation.makes_ternary:
        for name in {tensor.name for tensor in wanted if tensor.kept_with and len(tensor.shape) == 2} & found.keys():
            found[name] = replace(found[name], changes=(TernaryChange(),))
    others = {name: info for name, info in left.items() if not layout.reads_part_of(name)}
    return LocatedTensors(
        tensors=found,
        left=tuple(left),
        other_parts=tuple(_part(layout.with_own_start(name)) for name in others),
        other_bytes=sum(info.num_bytes for info in others.values()),
        has_tower=layout.has_tower,
    )


def _is_vector(shape: tuple[int, ...], size: int) -> bool:
    """Whether a tensor of this shape is a vector of `size` numbers among dimensions of 1."""
    return len(shape) > 1 and max(shape) == math.prod(shape) == size


def _with_shape(info: TensorInfo, shapes: Sequence[tuple[int, ...]]) -> TensorInfo:
    """Give a flattened weight its shape: that of all weights `shapes` [out, in] that it has, one above the other."""
    if not shapes:
        return info
    shape = (sum(rows for rows, _ in shapes), shapes[0][1])
    if math.prod(shape) != info.shape[0]:
        raise info.error(f"has {info.shape[0]:,} numbers, config.json asks for {list(shape)}")
    return replace(info, shape=shape)


def fused_parts(name: str) -> tuple[str, ...]:
    """Return the names of the tensors that the tensor `name` fuses; empty if it is not a fused one."""
    parent, _, kind = name.rpartition(".")
    parent, _, last = parent.rpartition(".")
    return tuple(f"{parent}.{part}.{kind}" for part in FUSED.get(last, ()))


def stacked_parts(name: str, shapes: Mapping[str, tuple[int, ...]]) -> list[list[str]]:
    """Return the names of each expert's tensors in the stack `name`; empty if it is not a stack of known experts."""
    parent, is_stack, last = name.partition(f".{EXPERTS}.")
    projection, _, kind = last.partition(".")
    parts = FUSED.get(projection, (projection,))
    experts = ([f"{parent}{is_stack}{expert}.{part}.{kind or 'weight'}" for part in parts] for expert in count())
    return list(takewhile(lambda names: is_stack and names[0] in shapes, experts))


def _unstack(
    found: dict[str, TensorInfo],
    info: TensorInfo,
    experts: Sequence[Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    layout: CheckpointLayout,
    *,
    is_paired: bool,
) -> None:
    """Put each expert's tensors of a stack into `found`. `is_paired`: whether their rows alternate."""
    rows = sum(shapes[part][0] for part in experts[0])
    tells_by_shape = layout.transposes_experts == "some" and info.shape[1:2] != (rows,)
    is_other = layout.interleaves_experts or layout.transposes_experts == "all" or tells_by_shape
    is_plain = info.codes is None and not is_gguf(info.file.name)  # which are [out, in] whatever the family
    is_transposed = is_other and is_plain and len(info.shape) == 3
    num_experts, *shape = info.shape or (0,)
    if num_experts != len(experts):
        raise info.error(f"has shape {list(info.shape)}, config.json asks for {len(experts)} experts")
    shape = shape[::-1] if is_transposed else shape
    for expert, parts in enumerate(experts):
        one = replace(info, shape=tuple(shape), num_bytes=info.num_bytes // num_experts, expert=expert)
        one = replace(one, is_transposed=is_transposed or info.is_transposed)
        num_groups = rows // len(parts) if is_paired else 1
        _split(found, one, parts, shapes, num_groups)


def _unflatten(
    found: dict[str, TensorInfo], info: TensorInfo, experts: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Put each expert's matrix out of those that lie one above the other into `found`."""
    rows, columns = shape = shapes[experts[0]]
    is_transposed = experts[0].endswith(".down_proj.weight")
    size, width = (columns, rows) if is_transposed else (rows, columns)
    if info.shape != (len(experts) * size, width):
        raise info.error(
            f"has shape {list(info.shape)}, config.json asks for {len(experts)} experts of {[size, width]}"
        )
    whole = replace(info, shape=shape, num_bytes=info.num_bytes // len(experts), is_transposed=is_transposed)
    for number, name in enumerate(experts):
        first = number * size
        places = {"first_column": first} if is_transposed else {"rows": RowPlaces(first=first)}
        found[name] = replace(whole, **places)


def _split(
    found: dict[str, TensorInfo],
    info: TensorInfo,
    parts: Sequence[str],
    shapes: Mapping[str, tuple[int, ...]],
    num_groups: int = 1,
) -> None:
    """Put the parts of a fused tensor into `found`. `num_groups`: see `fused_places`."""
    lengths = [shapes[part][0] for part in parts]
    expected = sum(lengths)
    if not info.shape or info.shape[0] != expected:
        raise info.error(
            f"has shape {list(info.shape)}, config.json asks for {expected} rows ({' + '.join(map(str, lengths))})"
        )
    for part, rows, places in zip(parts, lengths, fused_places(lengths, num_groups), strict=True):
        if part in found:
            raise twice(info, found[part])
        found[part] = replace(
            info,
            shape=(rows, *info.shape[1:]),
            rows=places,
            num_bytes=info.num_bytes * rows // expected,
        )


def _share(found: dict[str, TensorInfo], shared: Sequence[tuple[str, str]]) -> None:
    """Put tensors under the names of all layers that have them (`CheckpointLayout.shared`), in place of copies that
    files may have there."""
    stored = dict(found)
    by_beginning = {beginning: [name for name in stored if name.startswith(beginning)] for _, beginning in shared}
    beginnings = tuple({beginning for pair in shared for beginning in pair})
    for name in stored:
        if name.startswith(beginnings):
            del found[name]
    for beginning, stored_beginning in shared:
        for name in by_beginning[stored_beginning]:
            found[beginning + name.removeprefix(stored_beginning)] = stored[name]


def _add_row_factors(found: dict[str, TensorInfo], factors: RowFactors) -> None:
    """Multiply the rows of a weight by factors. What is missing is named when the decoder's tensors are checked."""
    info = found.get(factors.weight)
    if info is None:
        return
    vector = found.pop(factors.vector, None)
    if vector is None:
        raise info.error(f"has factors of its rows, {factors.vector}, which are missing from the checkpoint")
    if vector.shape != info.shape[:1]:
        raise vector.error(f"has shape {list(vector.shape)}, {info.name} asks for {list(info.shape[:1])}")
    change = RowsFactor(values=vector, scaling=factors.scaling, is_squared=factors.is_squared)
    found[factors.weight] = replace(info, changes=(*info.changes, change))


def _add_product(
    found: dict[str, TensorInfo],
    name: str,
    factors: Mapping[str, TensorInfo | None],
    shapes: Mapping[str, tuple[int, ...]],
) -> None:
    """Add the product of two matrices (by their names, the one that reads the input first) to weights that `name`
    fuses, or to the one that it names."""
    parts = fused_parts(f"{name}.weight") or (f"{name}.weight",)
    if any(part not in found for part in parts):
        return  # they are named when the decoder's own tensors are checked
    down, up = factors.values()
    if down is None or up is None:
        missing = next(factor for factor, info in factors.items() if info is None)
        raise found[parts[0]].error(f"has a product added to it, whose matrix {missing} is missing from the checkpoint")
    lengths = [shapes[part][0] for part in parts]
    rank, wanted = down.shape[0], ([down.shape[0], shapes[parts[0]][1]], [sum(lengths), down.shape[0]])
    for info, shape in zip((down, up), wanted, strict=True):
        if list(info.shape) != shape:
            raise info.error(f"has shape {list(info.shape)}, its product of rank {rank} asks for {shape}")
    up = replace(up, shape=up.shape[::-1], is_transposed=not up.is_transposed)
    for part, features in zip(parts, fused_places(lengths), strict=True):
        info = found[part]
        if info.codes is not None or info.flat is not None or info.form is not None:
            raise info.error(f"is quantised, and {down.name} changes it, which is not supported; use plain weights")
        found[part] = replace(info, changes=(LowRankChange(up=up, down=down, scaling=1.0, features=features),))


def _part(name: str) -> str:
    """Return the part of a model that a tensor belongs to: the first meaningful word of its name."""
    words = name.split(".")
    if words[:2] == ["model", "layers"]:
        return ".".join(words[:3])
    return words[1] if words[0] == "model" and len(words) > 1 else words[0]
