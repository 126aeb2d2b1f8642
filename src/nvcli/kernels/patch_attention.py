"""Attention of vision towers: patches attend to all of their segment, which is an image or a window of one. Plain torch
is the reference; CUDA tensors take Triton kernels that are held to it, for attention itself on GPUs that have one.

Queries, keys and values stay where the layer's projections left them. Shapes: P patches, H heads, D numbers of a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.patch_types import HeadNorms, Runs
from nvcli.kernels.rotary import apply_rope


@dataclass(frozen=True, slots=True)
class Segments:
    """The patches that attend to each other, which are all of a batch's."""

    runs: Runs
    tiles: Tensor | None
    """[tiles, 3] int32, the work list of the kernel for the GPU; None: it has none."""


def make_segments(runs: Runs, heads: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Segments:
    """Prepare attention within the segments of `runs`, with H heads of D numbers (`heads`)."""
    if device.type == "cuda":
        from nvcli.kernels.triton.attention import patch_attention

        if patch_attention.serves(heads, dtype, device):
            return Segments(runs, patch_attention.list_tiles(runs).pin_memory().to(device, non_blocking=True))
    return Segments(runs, None)


@with_kernel("elementwise.rotary")
def rotate_patches(qkv: Tensor, cos_sin: Tensor, norms: HeadNorms | None = None) -> None:
    """Rotate queries and keys in place, after `norms`. qkv: [P, 3, H, D], contiguous; cos_sin: [P, D] float32, cosines
    then sines of the D/2 angles, which turn number i of a head with number i + D/2."""
    if norms is not None:
        for number, weight in enumerate((norms.queries, norms.keys, None)[: 2 + norms.of_values]):
            qkv[:, number] = F.rms_norm(qkv[:, number], qkv.shape[3:], weight, norms.eps)
    both = qkv[:, :2]
    both.copy_(apply_rope(both.flatten(1, 2), cos_sin).view(both.shape))


def attend_segments(qkv: Tensor, segments: Segments) -> Tensor:
    """Attend within segments. qkv: [P, 3, H, D], contiguous → [P, H × D], contiguous."""
    if segments.tiles is not None:
        from nvcli.kernels.triton.attention import patch_attention

        return patch_attention.attend(qkv, segments.tiles)
    parts = []
    for first, count, size in segments.runs:
        run = qkv[first : first + count * size].view(count, size, *qkv.shape[1:])  # [count, size, 3, H, D]
        q, k, v = run.permute(2, 0, 3, 1, 4)
        parts.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(count * size, -1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
