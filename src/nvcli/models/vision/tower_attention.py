"""TowerAttention: the attention of patches to those of their segment."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nvcli.kernels.patch_attention import Segments, attend_segments, rotate_patches
from nvcli.kernels.patch_types import HeadNorms
from nvcli.models.parallel import BuildContext
from nvcli.models.vision.tower_parts import Linear, Norm
from nvcli.models.vision.vision_config import QKV, VisionConfig


class TowerAttention(nn.Module):
    """Attention among patches, with the projections around it: [P, H] → [P, H]."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv = Linear(build, *(f"{path}.{name}" for name in QKV))
        self.proj = Linear(build, f"{path}.proj")
        self.head_norms = nn.ModuleList(
            Norm(build, f"{path}.{name}", config.eps) for name in ("q_norm", "k_norm") if config.qk_norm
        )

    def forward(self, x: Tensor, angles: Tensor | None, segments: Segments) -> Tensor:
        """Attend within each segment, heads turned by `angles` where there are some."""
        qkv, heads, kv_heads = self.qkv(x), self.config.num_heads, self.config.num_kv_heads
        if kv_heads:
            queries, *others = qkv.view(len(x), heads + 2 * kv_heads, -1).split([heads, kv_heads, kv_heads], dim=1)
            qkv = torch.cat([queries, *(part.repeat_interleave(heads // kv_heads, 1) for part in others)], dim=1)
        qkv = qkv.view(len(x), 3, heads, -1)
        norms = None
        if self.config.qk_norm == "head":
            queries, keys = (norm.get_parameter("weight") for norm in self.head_norms)
            assert angles is not None, "norms of heads go with their rotation"
            norms = HeadNorms(queries, keys, self.config.eps, self.config.norms_values)
        elif self.config.qk_norm:
            for part, norm in zip((qkv[:, 0], qkv[:, 1]), self.head_norms, strict=True):
                part.copy_(norm(part.flatten(1)).view(part.shape))
        if angles is not None:
            rotate_patches(qkv, angles, norms)
        out: Tensor = self.proj(attend_segments(qkv, segments))
        return out
