"""Weights as ranks keep them, read from any checkpoint format: plain, in FP8 (`kernels/fp8.py`), or in 4 bits
(`kernels/w4.py`). If ranks keep the checkpoint's format, its codes and scales are used as they are."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from msgspec.structs import replace
from torch import Tensor

from nvcli.errors import LoadError
from nvcli.kernels.fp4_rows import count_exact_blocks, fp4_to_fp8, powers_of_rows
from nvcli.kernels.fp8 import quantise_weight
from nvcli.kernels.fp8_types import FP8, FP8_MAX
from nvcli.kernels.mxfp4 import powers_of_scales
from nvcli.kernels.w4 import (
    LARGEST_FP4_SCALE,
    LARGEST_HALF,
    join_block_scales,
    join_halves,
    join_scales,
    pack,
    pack_mxfp4,
)
from nvcli.kernels.weight_formats import AFFINE_KINDS, FP8_BLOCK, MXFP4_KINDS, FP8Scaling, W4Format
from nvcli.models.adapters.merge import read_values
from nvcli.models.gguf.types import AFFINE_TYPES
from nvcli.models.rounded_rows import RowTally
from nvcli.models.stacked_values import StoredStack, decode_stack, has_one_scale, read_stack, scales_of, stack_key
from nvcli.models.stored_values import OpenFiles
from nvcli.models.tensor_info import MXFP4, TensorInfo
from nvcli.models.weights import WeightSource

_FP8_CODES = "F8_E4M3"
_COUNTED_ROWS = 512
"""Rows of each stack of FP4 of which is counted what FP8 rounds, which costs next to nothing."""


class KeptPart(NamedTuple):
    """A part of a weight [rows, columns], as ranks keep it."""

    weight: Tensor
    """Values, codes [rows, columns] e4m3, or words of 4-bit codes [rows, columns / 4]."""
    scales: Tensor | None = None
    """[rows] or [rows / 128, columns / 128] float32, or for 4 bits [groups, rows]."""
    order: Tensor | None = None
    """[columns] int64: the checkpoint's index of each kept column; None: columns keep their order."""


def read_kept(files: OpenFiles, info: TensorInfo, source: WeightSource, device: torch.device) -> KeptPart:
    """Read what a rank keeps of a tensor.

    Raises LoadError if the checkpoint's 4-bit weights are not as config.json says, and SafetensorError and OSError for
    files that cannot be read.
    """
    if source.scales is None:
        values = in_order(read_values(files, info, source.read, device), source.tensor.row_order)
        if source.tensor.column_order is not None:
            values = values[:, torch.tensor(source.tensor.column_order, device="cpu")]
        offset, factor = source.tensor.offset, source.tensor.factor
        return KeptPart(values if (offset, factor) == (0.0, 1.0) else (values.float() + offset) * factor)
    scaling = source.scales.scaling
    if isinstance(scaling, W4Format):
        read = _read_affine if scaling.kind in AFFINE_KINDS else _read_w4
        return read(files, info, source, scaling, device)
    return _read_fp8(files, info, source, scaling, device)


def read_kept_together(
    files: OpenFiles,
    infos: Sequence[TensorInfo],
    source: WeightSource,
    device: torch.device,
    pairs: Tensor,
    tally: RowTally,
) -> KeptPart:
    """Read what a rank keeps of several tensors, whose `together_key` is the same; `source` is that of one of them, and
    `pairs` are the device's `byte_pairs`. `tally` counts some of the rows of FP4 that become FP8. The result is what
    `read_kept` returns for each tensor, with a dimension for the tensors before the others."""
    info, count, stack = infos[0], len(infos), read_stack(files, infos, source.read, device)
    if source.scales is None:
        return KeptPart(_parted(decode_stack(stack, info, count, pairs), count))
    scaling = source.scales.scaling
    if isinstance(scaling, W4Format):
        if scaling.kind in MXFP4_KINDS:
            assert stack.scales is not None
            _check_exponents(files, infos, stack.scales)
        return _stack_in_w4(stack, scaling, count)
    if has_kept_codes(info, source):
        codes, scales = stack.codes, _parted(scales_of(stack, count), count)
        scales = scales if scaling == "block" else scales.squeeze(2).expand(count, len(codes) // count)
        return KeptPart(_parted(codes, count), scales)
    if stack.scales is None:
        codes, scales = quantise_weight(stack.codes, scaling)
        return KeptPart(_parted(codes, count), scales.view(count, -1))
    factors, bare = stack.factors, stack._replace(factors=None)
    if info.codes is not None and info.codes.numbers == "fp4":
        small = scales_of(bare, count).float()
        small = small.repeat_interleave(len(stack.codes) // len(small), 0)
        packed = stack.codes.contiguous()
        codes, powers = fp4_to_fp8(packed, small)
        sample = [part[:_COUNTED_ROWS] for part in (packed, small, codes, powers)]
        tally.add(count_exact_blocks(*sample), small.shape[1])
    else:
        codes, powers = _move_to_fp8(decode_stack(bare, info, count, pairs))
    scales = powers.view(count, -1)
    return KeptPart(_parted(codes, count), scales if factors is None else scales * factors.unsqueeze(1))


def together_key(info: TensorInfo, source: WeightSource) -> Hashable | None:
    """Return what a tensor has in common with those that `read_kept_together` can read with it; None: it is read
    alone."""
    tensor = source.tensor
    is_in_order = tensor.row_order is None and tensor.column_order is None
    if not is_in_order or (tensor.offset, tensor.factor) != (0.0, 1.0):
        return None
    scaling, codes = None if source.scales is None else source.scales.scaling, info.codes
    if isinstance(scaling, W4Format):
        can_stack = scaling.kind != "integer" and codes is not None and codes.numbers == "fp4"
    else:
        can_stack = scaling is None or has_kept_codes(info, source)
        can_stack = can_stack or (scaling == "channel" and (codes is None or codes.has_small_scales))
    key = stack_key(info, source.read) if can_stack else None
    return None if key is None else (scaling, key)


def has_kept_codes(info: TensorInfo, source: WeightSource) -> bool:
    """Whether the rank keeps the checkpoint's codes and scales as they are."""
    if info.codes is None or info.dtype != _FP8_CODES or source.scales is None or info.changes:
        return False
    if info.codes.zeros is not None or info.codes.columns is not None:
        return False
    rows, columns = source.read
    if source.scales.scaling == "channel":
        high, wide = info.codes.block
        is_of_rows = not info.codes.has_small_scales and wide >= columns.stop
        return bool(is_of_rows and (high == 1 or has_one_scale(info.codes)))
    order = source.tensor.row_order
    if info.codes.block != (FP8_BLOCK, FP8_BLOCK) or (order is not None and FP8_BLOCK % len(order)):
        return False
    return bool(info.rows.is_whole and info.rows.of(rows.start) % FP8_BLOCK == 0)


def _read_fp8(
    files: OpenFiles, info: TensorInfo, source: WeightSource, scaling: FP8Scaling, device: torch.device
) -> KeptPart:
    order = source.tensor.row_order
    if not has_kept_codes(info, source):
        if scaling == "block" or not info.has_small_scales or info.changes:
            values = in_order(read_values(files, info, source.read, device).to(device), order)
            return KeptPart(*quantise_weight(values, scaling))
        codes = None if info.codes is None else replace(info.codes, factor=None)
        bare, factor = replace(info, codes=codes), files.read_factor(info, device)
        kept, powers = _move_to_fp8(in_order(files.read(bare, source.read, device).to(device), order))
        return KeptPart(kept, powers if factor is None else powers * factor)
    stored = files.read_codes(info, source.read, device)
    kept = in_order(stored.codes.view(torch.uint8), order).view(FP8)
    if scaling == "block":
        is_power = stored.scales.dtype == torch.uint8
        return KeptPart(kept, powers_of_scales(stored.scales) if is_power else stored.scales)
    return KeptPart(kept, in_order(stored.scales.expand(len(kept), 1).squeeze(1), order))


def _move_to_fp8(values: Tensor) -> tuple[Tensor, Tensor]:
    """Convert numbers with scales for small blocks to FP8 with a power of 2 for each row: codes, and powers [rows].

    Numbers that e4m3 represents exactly, as most of MXFP8's and FP4's, thus lose nothing; others are rounded as in any
    FP8 weight.
    """
    powers = powers_of_rows(values.float().abs().amax(-1))
    codes = (values / powers.unsqueeze(-1)).clamp_(-FP8_MAX, FP8_MAX).to(FP8)
    return codes, powers


def _read_w4(
    files: OpenFiles, info: TensorInfo, source: WeightSource, kept: W4Format, device: torch.device
) -> KeptPart:
    is_mxfp4, factor = kept.kind in MXFP4_KINDS, None
    has_blocks = info.form is not None and info.form.blocks == MXFP4 and is_mxfp4
    if not has_blocks and (info.codes is None or info.packing is None or info.packing.bits != 4):
        raise _not_listed(info)
    if kept.kind == "nvfp4":  # the scales of blocks stay as they are
        factor = files.read_factor(info, device)
    bare = replace(info.codes, factor=None) if kept.kind == "nvfp4" and info.codes is not None else info.codes
    codes, scales, zeros, group_of = files.read_codes(replace(info, codes=bare), source.read, device)
    order: Tensor | None = None
    assert source.scales is not None
    if source.scales.order_row is not None:
        order = group_of.argsort(stable=True)
        codes, group_of = codes[:, order], group_of[order]
    groups = group_of.view(-1, kept.group)
    if (groups != groups[:, :1]).any():
        raise LoadError(
            f"{info.file}: tensor {info.name} does not group its columns as config.json says, so it cannot be kept in "
            "4 bits: use quantization: none"
        )
    if is_mxfp4:
        _check_exponents(files, [info], scales)
    shape, rows = (len(codes), len(groups)), source.tensor.row_order
    codes, scales = (in_order(one, rows) for one in (codes, _of_groups(scales, groups, shape)))
    if is_mxfp4:
        return KeptPart(*pack_mxfp4(codes, scales, kept), order)
    if factor is not None:
        return KeptPart(pack(codes, kept), join_block_scales(scales.to(FP8), factor.expand(len(codes)), kept))
    assert zeros is not None
    return KeptPart(pack(codes, kept), join_scales(scales, in_order(_of_groups(zeros, groups, shape), rows)), order)


def _read_affine(
    files: OpenFiles, info: TensorInfo, source: WeightSource, kept: W4Format, device: torch.device
) -> KeptPart:
    """Read a weight in blocks of a GGUF file. Codes of fewer bits than ranks keep are moved, so that their zeros are
    where ranks have them."""
    found = None if info.form is None else AFFINE_TYPES.get(info.form.blocks or "")
    if found is None or found.bits > kept.bits or found.group % kept.group:
        raise _not_listed(info)
    codes, scales, offsets = files.read_blocks(info, source.read, device, kept.group)
    assert offsets is not None
    if float(torch.maximum(scales.abs(), offsets.abs()).max()) > LARGEST_HALF:
        files.scales.check()
        raise LoadError(
            f"{info.file}: tensor {info.name} has scales above {LARGEST_HALF:,.0f}, which are too large to keep its "
            f"{kept.bits} bits: use quantization: none"
        )
    order = source.tensor.row_order
    codes, scales, offsets = (in_order(one, order) for one in (codes + (kept.zero - found.zero), scales, offsets))
    return KeptPart(pack(codes, kept), join_halves(scales, offsets))


def _not_listed(info: TensorInfo) -> LoadError:
    return LoadError(
        f"{info.file}: tensor {info.name} is stored as {info.dtype}, but config.json does not list it among those that "
        "are not quantised: use quantization: none"
    )


def _check_exponents(files: OpenFiles, infos: Sequence[TensorInfo], scales: Tensor) -> None:
    """Raise LoadError if a weight in MXFP4 cannot be kept so. scales: those of all weights, one after the other."""
    largest = scales.reshape(len(infos), -1).amax(1)
    if int(largest.max()) <= LARGEST_FP4_SCALE:
        return
    files.scales.check()
    info = infos[int(largest.argmax())]
    name = info.name if info.codes is None else info.codes.scales.name
    raise LoadError(
        f"{info.file}: tensor {name} has scales above {LARGEST_FP4_SCALE}, which are too large to "
        "keep its weight in 4 bits: use quantization: none"
    )


def _parted(stack: Tensor, count: int) -> Tensor:
    """Give the matrices of a stack a dimension: [count × rows, columns] → [count, rows, columns]."""
    return stack.view(count, -1, stack.shape[1])


def _stack_in_w4(stack: StoredStack, kept: W4Format, num_weights: int) -> KeptPart:
    """Return weights in FP4 as ranks keep them."""
    assert stack.scales is not None
    codes = torch.stack((stack.codes & 15, stack.codes >> 4), dim=-1).flatten(1)
    if kept.kind in MXFP4_KINDS:
        words, joined = pack_mxfp4(codes, stack.scales, kept)
    else:
        assert stack.factors is not None
        factors = stack.factors.repeat_interleave(len(codes) // num_weights)
        words, joined = pack(codes, kept), join_block_scales(stack.scales.to(FP8), factors, kept)
    return KeptPart(_parted(words, num_weights), joined.view(len(joined), num_weights, -1).transpose(0, 1))


def _of_groups(grid: Tensor, groups: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return the scale or zero [rows, groups] of each kept group. `groups` [groups, columns per group] gives the
    checkpoint's group of each of its columns."""
    return (grid if grid.shape[1] == 1 else grid[:, groups[:, 0]]).expand(shape)


def in_order(values: Tensor, order: Sequence[int] | None) -> Tensor:
    """Reorder the rows of each head. values: [heads × len(order), ...] → the same shape."""
    if order is None:
        return values
    indices = torch.tensor(order, device="cpu")
    return values.view(-1, len(order), *values.shape[1:])[:, indices].flatten(0, 1)
