"""Quantised weights in a checkpoint's files: which tensors make up a weight [out, in], and how they hold it.

Files hold a weight's codes beside scales, and maybe zeros and the group of each column, as tensors of their own whose
names begin alike. `join_parts` makes one tensor of them, whose values `quantised_values.py` reads.

    weight, weight_scale or weight_scale_inv, weight_zero_point         FP8, and integers of 8 bits one by one
    weight_packed, weight_scale, weight_zero_point, weight_g_idx        compressed-tensors' words
    qweight, scales, qzeros, g_idx                                      GPTQ's and AWQ's words
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from nvcli.errors import LoadError
from nvcli.kernels.weight_formats import WORD_BITS, Packing
from nvcli.models.quantisation.description import Quantisation
from nvcli.models.safetensors_header import TensorInfo

_WEIGHT = "weight"
_INTEGERS = {"qweight": "scales", "weight_packed": "weight_scale"}
"""The names of packed codes, and the name of the scales beside them."""
_CODES = {"F8_E4M3", "I8"}
_SCALE_NAMES = ("weight_scale", "weight_scale_inv")
_FLOATS = {"F16", "BF16", "F32"}
_UNUSED = (
    "input_scale",
    "input_scale_ub",
    "input_zero_point",
    "activation_scale",
    "activation_scale_inv",
    "weight_shape",
)
"""What is stored beside a weight and not used: activations are quantised by their own values, if they are. The scales
of what keys' and values' projections give are those of a KV cache (`kv_scales.py`)."""


def join_parts(found: dict[str, TensorInfo], quantisation: Quantisation) -> None:
    """Replace the parts of each quantised weight in `found`, by name, by the weight.

    Raises LoadError where a part is missing, or has another shape or type than the codes ask for.
    """
    for name in list(found):
        parent, _, last = name.rpartition(".")
        if last in _INTEGERS or (last == _WEIGHT and found[name].dtype == "I8"):
            scales = (_INTEGERS[last],) if last in _INTEGERS else ()
            _check_parts(found, name, (*scales, *quantisation.needed))
        if last == "qweight":
            weight = _words(found, parent, quantisation)
        elif last == "weight_packed":
            weight = _compressed_words(found, parent, quantisation)
        elif last == _WEIGHT and found[name].dtype in _CODES:
            weight = _scaled(found, parent, quantisation)
        else:
            continue
        is_kv = parent.endswith((".k_proj", ".v_proj"))
        for unused in _UNUSED if is_kv else (*_UNUSED, "output_scale"):
            found.pop(f"{parent}.{unused}", None)
        target = f"{parent}.{_WEIGHT}"
        if target in found:
            raise LoadError(f"{weight.file}: tensor {weight.name} is there twice: {found[target].name} is the same")
        num_bytes = weight.num_bytes + sum(part.num_bytes for part in weight.parts.values())
        found[target] = replace(weight, num_bytes=num_bytes)


def _check_parts(found: dict[str, TensorInfo], name: str, parts: Sequence[str]) -> None:
    """Raise LoadError where codes lack one of the tensors that their format and config.json want beside them."""
    parent = name.rpartition(".")[0]
    for part in parts:
        if f"{parent}.{part}" not in found:
            raise LoadError(
                f"{found[name].file}: tensor {found[name].name} has no {part}, which config.json asks for; download "
                "both again"
            )


def _scaled(found: dict[str, TensorInfo], parent: str, quantisation: Quantisation) -> TensorInfo:
    """Codes of 8 bits one by one."""
    codes = found.pop(f"{parent}.{_WEIGHT}")
    rows, columns = _matrix(codes)
    name = next((name for name in _SCALE_NAMES if f"{parent}.{name}" in found), None)
    if name is None:
        raise LoadError(f"{codes.file}: tensor {codes.name} has no {' or '.join(_SCALE_NAMES)}; download it again")
    scales = _float(found.pop(f"{parent}.{name}"))
    block = _block_of(codes, scales, (rows, columns), quantisation)
    parts = {"scales": scales}
    if zeros := found.pop(f"{parent}.weight_zero_point", None):
        if zeros.shape != scales.shape or zeros.dtype != codes.dtype:
            raise _mismatch(zeros, f"{codes.dtype} {list(scales.shape)}")
        parts["zeros"] = zeros
    return replace(codes, packing=Packing(kind="scaled", bits=8, block=block), parts=parts)


def _block_of(
    codes: TensorInfo, scales: TensorInfo, shape: tuple[int, int], quantisation: Quantisation
) -> tuple[int, int]:
    """Return the rows and columns that share a scale, of a weight [rows, columns] that config.json describes."""
    rows, columns = shape
    if all(length == 1 for length in scales.shape):
        return rows, columns
    if scales.shape in ((rows,), (rows, 1)):
        return 1, columns
    block = quantisation.weight_block or (1, quantisation.group_size or columns)
    if scales.shape == (-(-rows // block[0]), -(-columns // block[1])):
        return block
    raise LoadError(
        f"{scales.file}: tensor {scales.name} has shape {list(scales.shape)}, which is not that of a scale for each "
        f"{block[0]} × {block[1]} of {codes.name} {[rows, columns]}"
    )


def _compressed_words(found: dict[str, TensorInfo], parent: str, quantisation: Quantisation) -> TensorInfo:
    codes = _integer(found.pop(f"{parent}.weight_packed"))
    per_word = WORD_BITS // quantisation.bits
    rows, num_words = _matrix(codes)
    columns = num_words * per_word
    scales = _float(found.pop(f"{parent}.weight_scale"))
    parts = {"scales": scales}
    groups = found.pop(f"{parent}.weight_g_idx", None)
    block = _block_of(codes, scales, (rows, columns), quantisation)
    if zeros := found.pop(f"{parent}.weight_zero_point", None):
        expected = (-(-rows // per_word), scales.shape[-1])
        if zeros.shape != expected:
            raise _mismatch(zeros, str(list(expected)))
        parts["zeros"] = _integer(zeros)
    return _with_groups(codes, "compressed", (rows, columns), block, parts, groups, quantisation)


def _words(found: dict[str, TensorInfo], parent: str, quantisation: Quantisation) -> TensorInfo:
    """GPTQ's and AWQ's words, whose first dimension is the columns of the weight."""
    codes = _integer(found.pop(f"{parent}.qweight"))
    first, second = _matrix(codes)
    per_word = WORD_BITS // quantisation.bits
    is_awq = quantisation.words == "awq"
    rows, columns = (second * per_word, first) if is_awq else (second, first * per_word)
    scales = _float(found.pop(f"{parent}.scales"))
    if len(scales.shape) != 2 or scales.shape[1] != rows or not scales.shape[0]:
        raise _mismatch(scales, f"[groups, {rows}]")
    num_groups = scales.shape[0]
    groups = found.pop(f"{parent}.g_idx", None)
    group_size = quantisation.group_size or columns
    if groups is None and num_groups != -(-columns // group_size):
        raise _mismatch(scales, f"{[-(-columns // group_size), rows]}")
    parts = {"scales": scales}
    if zeros := found.pop(f"{parent}.qzeros", None):
        expected = (num_groups, -(-rows // per_word))
        if zeros.shape != expected:
            raise _mismatch(zeros, str(list(expected)))
        parts["zeros"] = _integer(zeros)
    kind: Literal["awq", "gptq"] = "awq" if is_awq else "gptq"
    return _with_groups(codes, kind, (rows, columns), (1, group_size), parts, groups, quantisation)


def _with_groups(
    codes: TensorInfo,
    kind: Literal["gptq", "awq", "compressed"],
    shape: tuple[int, int],
    block: tuple[int, int],
    parts: dict[str, TensorInfo],
    groups: TensorInfo | None,
    quantisation: Quantisation,
) -> TensorInfo:
    if groups is not None:
        if groups.shape != (shape[1],):
            raise _mismatch(groups, str([shape[1]]))
        parts["groups"] = _integer(groups)
        block = (block[0], 0)
    packing = Packing(kind=kind, bits=quantisation.bits, block=block, zero_offset=quantisation.zero_offset)
    return replace(codes, shape=shape, packing=packing, parts=parts)


def _matrix(info: TensorInfo) -> tuple[int, int]:
    if len(info.shape) != 2 or not all(info.shape):
        raise _mismatch(info, "[rows, columns]")
    return info.shape[0], info.shape[1]


def _integer(info: TensorInfo) -> TensorInfo:
    return _of_type(info, {"I32"})


def _float(info: TensorInfo) -> TensorInfo:
    return _of_type(info, _FLOATS)


def _of_type(info: TensorInfo, types: set[str]) -> TensorInfo:
    if info.dtype not in types:
        raise LoadError(
            f"{info.file}: tensor {info.name} is stored as {info.dtype}; supported here: {', '.join(sorted(types))}"
        )
    return info


def _mismatch(info: TensorInfo, expected: str) -> LoadError:
    return LoadError(f"{info.file}: tensor {info.name} has shape {list(info.shape)}, its weight asks for {expected}")
