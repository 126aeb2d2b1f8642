"""The experts of a layer as gpt-oss's files hold them, in stacks of all experts: in bfloat16 as transformers writes
them, or in MXFP4 as they were published. Torch-free.

Row 2 i of an expert's gate-up matrix is row i of its gate projection, and row 2 i + 1 that of its up projection. The
bfloat16 stacks hold the matrices transposed, [experts, in, out]. The MXFP4 stacks hold blocks [experts, out, in / 32,
16] of two values a byte, and the blocks' scales [experts, out, in / 32] (`kernels/mxfp4.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from nvcli.errors import LoadError
from nvcli.kernels.expert_settings import MXFP4_BLOCK
from nvcli.models.safetensors_header import TensorInfo

_PROJECTIONS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_BLOCKS, _SCALES, _BIAS = "_blocks", "_scales", "_bias"


def split_interleaved(found: dict[str, TensorInfo], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Replace the stacks in `found` by each expert's tensors. `shapes` are those of the decoder's tensors, by name.

    Raises LoadError where a stack has another shape than its parts, and for one half of an MXFP4 tensor.
    """
    for name in list(found):
        parent, _, last = name.rpartition(".")
        stack = next((stack for stack in _PROJECTIONS if last in (stack, stack + _BIAS, stack + _BLOCKS)), None)
        if stack is None:
            continue
        kind = "bias" if last.endswith(_BIAS) else "weight"
        parts = [f"{part}.{kind}" for part in _PROJECTIONS[stack]]
        experts = _num_experts(parent, parts[0], shapes)
        if experts == 0:
            continue  # of a layer that the model does not have
        expert_shape = shapes[f"{parent}.0.{parts[0]}"]
        rows = expert_shape[0] * len(parts)
        info = found.pop(name)
        if last.endswith(_BLOCKS):
            scales = found.pop(f"{parent}.{stack}{_SCALES}", None)
            one = _of_blocks(info, scales, (experts, rows, *expert_shape[1:]))
        else:
            _check_shape(info, (experts, *expert_shape[1:], rows))
            one = replace(info, is_transposed=kind == "weight")
        for expert in range(experts):
            for number, part in enumerate(parts):
                target = f"{parent}.{expert}.{part}"
                if target in found:
                    raise LoadError(f"{info.file}: tensor {info.name} is there twice: {found[target].name} is the same")
                found[target] = replace(
                    one,
                    shape=expert_shape,
                    num_bytes=info.num_bytes // (experts * len(parts)),
                    expert=expert,
                    first_row=number,
                    row_step=len(parts),
                )


def _num_experts(parent: str, part: str, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Count the experts that the decoder has in a layer."""
    count = 0
    while f"{parent}.{count}.{part}" in shapes:
        count += 1
    return count


def _of_blocks(info: TensorInfo, scales: TensorInfo | None, shape: tuple[int, ...]) -> TensorInfo:
    """Describe a stack [experts, out, in] that is stored as blocks and scales."""
    if scales is None:
        raise LoadError(f"{info.file}: tensor {info.name} has no scales; download the checkpoint again")
    *outer, columns = shape
    if columns % MXFP4_BLOCK:
        raise LoadError(
            f"{info.file}: tensor {info.name} is of blocks of {MXFP4_BLOCK} values, and config.json asks for rows of "
            f"{columns}"
        )
    num_blocks = columns // MXFP4_BLOCK
    _check_shape(info, (*outer, num_blocks, MXFP4_BLOCK // 2))
    _check_shape(scales, (*outer, num_blocks))
    for one in (info, scales):
        if one.dtype != "U8":
            raise LoadError(f"{one.file}: tensor {one.name} is stored as {one.dtype}; MXFP4 is stored as U8")
    return replace(info, scales=scales)


def _check_shape(info: TensorInfo, shape: tuple[int, ...]) -> None:
    if info.shape != shape:
        raise LoadError(
            f"{info.file}: tensor {info.name} has shape {list(info.shape)}, config.json asks for {list(shape)}"
        )
