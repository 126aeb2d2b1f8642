"""EarlyMerger: makes one patch of each square of them, between two layers of a tower (MiniCPM-V 4.6)."""

from __future__ import annotations

from torch import Tensor, nn

from nvcli.kernels.patch_attention import Segments
from nvcli.models.parallel import BuildContext
from nvcli.models.vision.tower_attention import TowerAttention
from nvcli.models.vision.tower_parts import Linear, Norm, side_by_side
from nvcli.models.vision.vision_config import VisionConfig


class EarlyMerger(nn.Module):
    """Attention among the patches of each square, and the mean of its results with an MLP of them: [P, H] →
    [P / early_merge², H]."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig) -> None:
        super().__init__()
        self.count = config.early_merge**2
        self.norm1, self.norm = (Norm(build, f"{path}.{name}", config.eps) for name in ("norm1", "norm"))
        self.attention = TowerAttention(build, f"{path}.attn", config)
        self.first, self.second = Linear(build, f"{path}.linear_fc1"), Linear(build, f"{path}.linear_fc2")
        self.activation = config.activation

    def forward(self, x: Tensor, segments: Segments) -> Tensor:
        """Merge the patches of each segment, which follow each other."""
        squares = side_by_side(x + self.attention(self.norm1(x), None, segments), self.count)
        merged: Tensor = self.second(self.first.activated(self.norm(squares), self.activation))
        return merged.add_(squares.view(len(squares), self.count, -1).mean(1))
