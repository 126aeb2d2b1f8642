"""The numbers of a weight whose codes are places in a table, with a scale for each block of the flattened weight
(bitsandbytes, QLoRA: https://arxiv.org/abs/2305.14314)."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nvcli.core.validation import show
from nvcli.errors import LoadError
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.json_file import JsonFile
from nvcli.models.seen_scales import SeenScales
from nvcli.models.tensor_info import FlatCodes, TensorInfo

_MOST_BYTES = 10_000
"""The longest description of a weight."""


class ReadsTensors(Protocol):
    """Reads parts of the files' tensors."""

    scales: SeenScales

    def read_stored(self, info: TensorInfo, part: Sequence[slice]) -> Tensor: ...


class _Blocks(NamedTuple):
    size: int
    """Neighbours of the flattened weight that share a scale."""
    nested_size: int
    """Neighbouring scales that share a scale of their own, if scales are codes."""
    offset: float
    """A number that is added to such scales."""


def read_flat(files: ReadsTensors, info: TensorInfo, part: Sequence[slice], device: torch.device) -> Tensor:
    """Read the values of a part that is not empty, [rows, columns] float32. Raises LoadError if the description of the
    weight does not fit it."""
    flat = info.flat
    assert flat is not None
    assert info.rows.is_whole, "OpenFiles.read takes the rows"
    columns = info.shape[1]
    blocks = _read_blocks(files, info, flat)
    rows = info.rows.span(part[0])
    first, last = rows.start * columns, rows.stop * columns
    stored = files.read_stored(info, (slice(first // 2, ceil_div(last, 2)), slice(0, 1))).to(device).flatten()
    codes = torch.stack((stored >> 4, stored & 15), dim=-1).flatten()[first % 2 :][: last - first]
    table = files.read_stored(flat.table, (slice(0, 16),)).to(device).float()
    files.scales.add([flat.table], table, is_signed=True)
    first_block, last_block = first // blocks.size, ceil_div(last, blocks.size)
    scales = _read_scales(files, flat, blocks, slice(first_block, last_block), device)
    block_of = torch.arange(first, last, device=device).floor_divide_(blocks.size).sub_(first_block)
    values = table[codes.int()] * scales[block_of]
    return values.view(-1, columns)[:, part[1]]


def _read_scales(files: ReadsTensors, flat: FlatCodes, blocks: _Blocks, part: slice, device: torch.device) -> Tensor:
    """Read the scales of some blocks, in float32."""
    scales = files.read_stored(flat.scales, (part,)).to(device)
    if flat.nested_table is None or flat.nested_scales is None:
        scales = scales.float()
        files.scales.add([flat.scales], scales)
        return scales
    table = files.read_stored(flat.nested_table, (slice(0, 256),)).to(device).float()
    first = part.start // blocks.nested_size
    outer_part = slice(first, ceil_div(part.stop, blocks.nested_size))
    outer = files.read_stored(flat.nested_scales, (outer_part,)).to(device).float()
    files.scales.add([flat.nested_table], table, is_signed=True)
    files.scales.add([flat.nested_scales], outer)
    outer_of = torch.arange(part.start, part.stop, device=device).floor_divide_(blocks.nested_size).sub_(first)
    return table[scales.int()] * outer[outer_of] + blocks.offset


def _read_blocks(files: ReadsTensors, info: TensorInfo, flat: FlatCodes) -> _Blocks:
    """Read the description of a weight, which is JSON, and check that its tensors are as many."""
    state = flat.state
    if len(state.shape) != 1:
        raise _damaged(state, f"has shape {list(state.shape)}, and belongs in one dimension")
    if not 0 < math.prod(state.shape) <= _MOST_BYTES:
        raise _damaged(state, f"has {math.prod(state.shape):,} bytes")
    try:
        found = json.loads(bytes(files.read_stored(state, (slice(0, state.shape[0]),)).tolist()))
    except (ValueError, RecursionError) as error:
        raise _damaged(state, f"is not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise _damaged(state, f"holds {show(found)} where a JSON object belongs")
    described = JsonFile(state.file, found, f"{state.name}: ")
    nested_size = described.positive("nested_blocksize") if flat.nested_scales is not None else 1
    offset = described.get("nested_offset", float) if flat.nested_scales is not None else 0.0
    blocks = _Blocks(described.positive("blocksize"), nested_size, offset)
    shape, numbers = found.get("shape"), flat.num_codes
    if not isinstance(shape, list) or len(shape) != 2 or shape[1] != info.shape[1] or shape[0] * shape[1] != numbers:
        raise described.error("shape", f"{show(shape)} is not that of {info.name}, whose rows have {info.shape[1]}")
    num_scales = ceil_div(numbers, blocks.size)
    for tensor, wanted in (
        (flat.table, 16),
        (flat.scales, num_scales),
        (flat.nested_table, 256),
        (flat.nested_scales, ceil_div(num_scales, nested_size)),
    ):
        if tensor is not None and tensor.shape != (wanted,):
            raise tensor.error(f"has shape {list(tensor.shape)}, its weight asks for [{wanted}]")
    return blocks


def _damaged(state: TensorInfo, problem: str) -> LoadError:
    return state.error(f"{problem}; download it again")
