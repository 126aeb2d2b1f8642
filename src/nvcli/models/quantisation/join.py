"""Joining the tensors that make up a quantised weight in a checkpoint's files. Torch-free.

Files hold a weight's codes, its scales, and possibly its zeros and the group of each column as separate tensors with a
common name prefix. Each format gives their names (`WeightParts`).
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from nvcli.errors import LoadError
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.quantisation.quantisation import FLOATS, FP4_PAIRS, FlatParts, Quantisation, WeightParts
from nvcli.models.tensor_info import TERNARY, Codes, FlatCodes, Numbers, Packing, TensorInfo

_WEIGHT = "weight"
_NUMBERS: dict[str, Numbers] = {"F8_E4M3": "fp8", "U8": "fp4"}
"""The kind of numbers that each of these types holds; other types hold integers."""
_UNUSED = (
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
    "input_global_scale",
    "activation_scale",
    "activation_scale_inv",
    "weight_shape",
    "weight_format",
)
"""Tensors beside a weight that are not used: activations, if quantised, get scales from their own values. Output scales
of the key and value projections are those of a KV cache (`kv_scales.py`)."""


def join_parts(found: dict[str, TensorInfo], quantisation: Quantisation) -> None:
    """Replace the parts of each quantised weight in `found` (name → tensor) with the weight.

    Raises LoadError if a part is missing, or its shape or type does not match the codes.
    """
    parts_of: dict[str, list[WeightParts]] = {}
    for parts in quantisation.parts:
        parts_of.setdefault(parts.codes, []).append(parts)
    lasts = {name.rpartition(".")[2] for name in found}
    unused = [last for last in _UNUSED if last in lasts]
    for name, codes in list(found.items()):
        parent, _, last = name.rpartition(".")
        if last not in parts_of:
            continue  # another tensor
        fitting = [parts for parts in parts_of[last] if codes.dtype in parts.stored_as or last != _WEIGHT]
        if not fitting:
            continue  # a plain weight
        weight = _join(found, parent, fitting[0], quantisation)
        is_kv = parent.endswith((".k_proj", ".v_proj"))
        for beside in unused if is_kv else (*unused, "output_scale"):
            found.pop(f"{parent}.{beside}", None)
        target = f"{parent}.{_WEIGHT}"
        if target in found:
            raise twice(weight, found[target])
        found[target] = weight


def twice(info: TensorInfo, other: TensorInfo) -> LoadError:
    """Return the error for two tensors of a checkpoint that are the same tensor of the model."""
    return info.error(f"appears twice: {other.name} is the same tensor")


def _join(found: dict[str, TensorInfo], parent: str, parts: WeightParts, quantisation: Quantisation) -> TensorInfo:
    codes = found.pop(f"{parent}.{parts.codes}")
    numbers: Numbers = "fp4" if parts.packing is FP4_PAIRS else _NUMBERS.get(codes.dtype, "integer")
    if parts.packing is TERNARY:
        numbers = "integer"
    if numbers == "integer":
        for part in quantisation.needed:
            if f"{parent}.{part}" not in found:
                raise _missing(codes, part)
    name = next((name for name in parts.scales if f"{parent}.{name}" in found), None)
    if name is None:
        raise _missing(codes, " or ".join(parts.scales))
    if parts.flat is not None:
        return _join_flat(found, parent, codes, found.pop(f"{parent}.{name}"), parts.flat)
    shape = _shape(_of_type(codes, parts.stored_as), parts)
    if parts.packing is FP4_PAIRS:
        codes = codes.seen_as("U8")
    scales = _of_type(found.pop(f"{parent}.{name}"), parts.scales_stored_as)
    zeros, groups, columns = (
        None if part is None else found.pop(f"{parent}.{part}", None)
        for part in (parts.zeros, parts.groups, parts.columns)
    )
    factor = None if parts.factor is None else _pop_factor(found, codes, parent, parts.factor)
    if groups is not None:
        _check_shape(_of_type(groups, ("I32",)), shape[-1:])
    if columns is not None:
        _check_shape(_of_type(columns, FLOATS), shape[-1:])
    scales, block = _join_scales(codes, scales, shape, parts, quantisation, has_groups=groups is not None)
    zero = 0
    if zeros is not None:
        zeros = _join_zeros(codes, scales, zeros, parts)
        zero = 0 if parts.packing is None else quantisation.zero_offset
    elif parts.packing is not None and numbers == "integer":
        zero = 1 if parts.packing is TERNARY else 1 << (parts.packing.bits - 1)
    tensors = [one for one in (codes, scales, zeros, groups, factor, columns) if one is not None]
    return replace(
        codes,
        shape=shape,
        num_bytes=sum(one.num_bytes for one in tensors),
        is_transposed=parts.is_transposed,
        packing=parts.packing,
        codes=Codes(
            numbers=numbers,
            block=block,
            scales=scales,
            zeros=zeros,
            zero=zero,
            groups=groups,
            factor=factor,
            divides=parts.divides,
            unit=parts.unit,
            columns=columns,
        ),
    )


def _join_flat(
    found: dict[str, TensorInfo], parent: str, codes: TensorInfo, scales: TensorInfo, parts: FlatParts
) -> TensorInfo:
    """Return a flattened weight, whose shape is not known yet: all numbers in one dimension."""
    nested = [found.pop(f"{parent}.{name}", None) for name in (parts.nested_table, parts.nested_scales)]
    others = [found.pop(f"{parent}.{name}", None) for name in (parts.table, parts.state)]
    table, state = others
    if table is None or state is None:
        raise _missing(codes, parts.table if table is None else parts.state)
    is_nested = scales.dtype == "U8"
    if is_nested and None in nested:
        raise _missing(codes, parts.nested_table if nested[0] is None else parts.nested_scales)
    nested_table, nested_scales = (None if one is None or not is_nested else _of_type(one, ("F32",)) for one in nested)
    if len(codes.shape) != 2 or codes.shape[1] != 1 or not codes.shape[0]:
        raise _mismatch(codes, "[bytes, 1]")
    num_codes = 2 * codes.shape[0]
    flat = FlatCodes(
        num_codes=num_codes,
        table=_of_type(table, ("F32",)),
        scales=_of_type(scales, ("F32", "U8")),
        state=_of_type(state, ("U8",)),
        nested_table=nested_table,
        nested_scales=nested_scales,
    )
    return replace(codes, shape=(num_codes,), dtype="F32", flat=flat)


def _pop_factor(found: dict[str, TensorInfo], codes: TensorInfo, parent: str, name: str) -> TensorInfo:
    """Return the number that all scales of a weight are multiplied or divided by."""
    factor = found.pop(f"{parent}.{name}", None)
    if factor is None:
        raise _missing(codes, name)
    if not all(length == 1 for length in factor.shape):
        raise _mismatch(factor, "a single number")
    return _of_type(factor, FLOATS)


def _shape(codes: TensorInfo, parts: WeightParts) -> tuple[int, ...]:
    """Return the shape of the weight [out, in], or of a stack of weights, that the codes encode."""
    packing = parts.packing
    has_blocks = packing is not None and packing.block_size > 1
    shape = list(codes.shape[:-1] if has_blocks else codes.shape)
    may_be_stack = packing is None and not parts.is_transposed
    if len(shape) not in ((3,) if has_blocks else (2, 3) if may_be_stack else (2,)) or not all(codes.shape):
        raise _mismatch(codes, "[rows, columns]")
    if packing is not None and has_blocks and codes.shape[-1] != packing.block_size:
        raise _mismatch(codes, f"blocks of {packing.block_size} bytes")
    if parts.is_transposed:
        shape.reverse()
    if packing is not None:
        shape[packing.dim - 2] *= packing.per_index
    return tuple(shape)


def _join_scales(
    codes: TensorInfo,
    scales: TensorInfo,
    shape: tuple[int, ...],
    parts: WeightParts,
    quantisation: Quantisation,
    *,
    has_groups: bool,
) -> tuple[TensorInfo, tuple[int, int]]:
    """Return the scales [out, groups] of a weight, and the rows and columns that share one."""
    *outer, rows, columns = shape
    if len(scales.shape) == 4 and scales.shape[1] == scales.shape[3] == 1:
        scales = replace(scales, shape=scales.shape[::2], has_ones=True)
    if parts.is_transposed:
        scales = replace(scales, shape=scales.shape[::-1], is_transposed=True)
    block = (1, quantisation.group_size or columns)
    if quantisation.weight_block is not None and parts.packing is None:
        block = quantisation.weight_block
    expected = (*outer, ceil_div(rows, block[0]), ceil_div(columns, block[1]))
    if has_groups and len(scales.shape) == 2 and scales.shape[0] == rows and scales.shape[1]:
        return scales, (1, 0)
    if parts.packing in (None, TERNARY) and all(length == 1 for length in scales.shape):
        return scales, block if quantisation.weight_block is not None and scales.shape == expected else (rows, columns)
    if (parts.packing is None or expected[-1] == 1) and scales.shape in ((rows,), (rows, 1)):
        return scales, (1, columns)
    if scales.shape == expected:
        return scales, block
    stored, wanted = (list(one[::-1] if parts.is_transposed else one) for one in (scales.shape, expected))
    raise scales.error(
        f"has shape {stored}, and a scale for each {block[0]} × {block[1]} of {codes.name} {list(shape)} asks for "
        f"{wanted}"
    )


def _join_zeros(codes: TensorInfo, scales: TensorInfo, zeros: TensorInfo, parts: WeightParts) -> TensorInfo:
    """Return the zeros of a weight, as many as its scales, packed along the rows where codes are packed."""
    if parts.packing is None:
        _check_shape(_of_type(zeros, (codes.dtype,)), scales.shape)
        return zeros
    rows, groups = scales.shape[0], scales.shape[-1]
    packing = Packing.in_words(parts.packing.bits, 0, parts.packing.order)
    expected = (ceil_div(rows, packing.per_index), groups)
    _check_shape(_of_type(zeros, parts.stored_as), expected[::-1] if parts.is_transposed else expected)
    return replace(zeros, shape=(rows, groups), packing=packing, is_transposed=parts.is_transposed)


def _missing(codes: TensorInfo, part: str) -> LoadError:
    return codes.error(f"has no {part}, which config.json asks for; download both again")


def _of_type(info: TensorInfo, types: Sequence[str]) -> TensorInfo:
    if info.dtype not in types:
        raise info.error(f"is stored as {info.dtype}; supported here: {', '.join(types)}")
    return info


def _check_shape(info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        raise _mismatch(info, str(list(shape)))


def _mismatch(info: TensorInfo, expected: str) -> LoadError:
    return info.error(f"has shape {list(info.shape)}, its weight asks for {expected}")
