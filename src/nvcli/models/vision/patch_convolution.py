"""PatchConvolution: mixes each patch of an image with those around it (LFM3-VL)."""

from __future__ import annotations

from torch import Tensor, nn

from nvcli.models.parallel import BuildContext
from nvcli.models.vision.tower_parts import Linear, Weights


class PatchConvolution(nn.Module):
    """Gated patches, each channel convolved by itself, and gated again: [P, H] → [P, H]."""

    def __init__(self, build: BuildContext, path: str) -> None:
        super().__init__()
        self.in_proj, self.out_proj = Linear(build, f"{path}.in_proj"), Linear(build, f"{path}.out_proj")
        self.kernel = Weights(build, f"{path}.spatial_conv")

    def forward(self, x: Tensor, neighbours: Tensor) -> Tensor:
        """Convolve patches with their `neighbours` (`PatchGrid.neighbours`), in float32."""
        before, after, values = self.in_proj(x).chunk(3, dim=-1)
        gated = x.new_zeros(len(x) + 1, x.shape[1])  # the last is read as number -1
        gated[:-1] = before * values
        weights = self.kernel.weight.flatten(1).t().float()
        total = sum(gated[places] * weight for places, weight in zip(neighbours.unbind(1), weights, strict=True))
        assert not isinstance(total, int)
        out: Tensor = self.out_proj(after * total.to(x.dtype))
        return out
