"""Attention within segments of patches on Hopper GPUs: what the kernel serves, its work list, and its launch."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nvcli.kernels.patch_types import Runs
from nvcli.kernels.triton.attention.attention_fold import LOG2_E
from nvcli.kernels.triton.launch.multiprocessors import num_multiprocessors
from nvcli.kernels.triton.launch.triton_version import has_known_gluon

_ROWS, _BODY = 128, 64  # those of the kernel, whose module is not imported where Gluon is unknown
_TAILS = (0, 16, 32, 64)


def serves(heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> bool:
    """Tell whether the kernel serves H heads of D numbers, as TMA reads them, on a GPU."""
    _, head_dim = heads
    return (
        _BODY <= head_dim <= _BODY + _TAILS[-1]
        and head_dim % 8 == 0
        and dtype.itemsize == 2
        and torch.cuda.get_device_capability(device) == (9, 0)
        and has_known_gluon()
    )


def list_tiles(runs: Runs) -> Tensor:
    """List the tiles of all segments, those of the longest first: [tiles, TILE_FIELDS] int32."""
    parts = []
    for first, count, size in sorted(runs, key=lambda run: -run[2]):
        begins = first + size * np.arange(count)[:, None]
        tiles = begins + np.arange(0, size, _ROWS)
        parts.append(np.stack(np.broadcast_arrays(tiles, begins, begins + size), axis=-1).reshape(-1, 3))
    return torch.from_numpy(np.concatenate(parts).astype(np.int32))


def attend(qkv: Tensor, tiles: Tensor) -> Tensor:
    """See `nvcli.kernels.patch_attention.attend_segments`."""
    from nvcli.kernels.triton.attention.hopper_patch_kernel import BODY, KEYS, hopper_patch_kernel
    from nvcli.kernels.triton.launch.descriptors import describe_kept

    num_patches, _, num_heads, head_dim = qkv.shape
    assert qkv.is_contiguous()
    tail = next(size for size in _TAILS if head_dim <= _BODY + size)
    rows = qkv.view(num_patches, -1)
    body = describe_kept(rows, (KEYS.value, BODY.value))
    behind = describe_kept(rows, (KEYS.value, tail), swizzle_bytes=2 * tail) if tail else None
    out = torch.empty(num_patches, num_heads * head_dim, dtype=qkv.dtype, device=qkv.device)
    programs = min(len(tiles) * num_heads, num_multiprocessors(qkv.device))
    scale = head_dim**-0.5 * LOG2_E
    hopper_patch_kernel[(programs,)](
        qkv, body, behind, out, tiles, len(tiles), scale, num_heads, head_dim, tail, num_warps=4
    )
    return out
