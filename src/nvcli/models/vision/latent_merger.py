"""LatentMerger: layers in which learned latents read the patches of an image, and become its tokens, as many whatever
its size (Perceiver resampler, https://arxiv.org/abs/2204.14198, as in Idefics 2)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvcli.kernels.patch_types import Runs
from nvcli.models.parallel import BuildContext
from nvcli.models.vision.tower_parts import GatedMLP, Linear, Norm, Weights
from nvcli.models.vision.vision_config import QKV, LatentsConfig, VisionConfig


class LatentMerger(nn.Module):
    """The patches of images → their tokens: [P, H] → [images × latents, O]."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig) -> None:
        super().__init__()
        latents, eps = config.merger.latents, config.merger.eps
        assert latents is not None
        self.projection = GatedMLP(build, path)
        self.latents, self.norm = Weights(build, f"{path}.latents"), Norm(build, f"{path}.norm", eps)
        self.layers = nn.ModuleList(
            _Layer(build, f"{path}.layers.{number}", latents, eps) for number in range(latents.depth)
        )

    def forward(self, x: Tensor, images: Runs) -> Tensor:
        """Read `images`, runs of patches."""
        context, parts = self.projection(x), []
        for first, count, size in images:
            own = context[first : first + count * size].view(count, size, -1)
            state = self.latents.weight.expand(count, -1, -1)
            for layer in self.layers:
                state = layer(state, own)
            parts.append(self.norm(state.flatten(0, 1)))
        return torch.cat(parts)


class _Layer(nn.Module):
    """Attention of latents to patches and to each other, and a gated MLP, with norms before both."""

    def __init__(self, build: BuildContext, path: str, config: LatentsConfig, eps: float) -> None:
        super().__init__()
        self.config = config
        self.norm1, self.context_norm, self.norm2 = (
            Norm(build, f"{path}.{name}", eps) for name in ("norm1", "context_norm", "norm2")
        )
        query, *others = (f"{path}.attn.{name}" for name in QKV)
        self.query, self.keys_values = Linear(build, query), Linear(build, *others)
        self.proj, self.mlp = Linear(build, f"{path}.attn.proj"), GatedMLP(build, f"{path}.mlp")

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        """Compute the layer: [images, latents, O], [images, patches, O] → [images, latents, O]."""
        count, heads, kv_heads = len(x), self.config.num_heads, self.config.num_kv_heads
        normed = self.norm1(x.flatten(0, 1)).view(x.shape)
        read = torch.cat([self.context_norm(context.flatten(0, 1)).view(context.shape), normed], dim=1)
        queries = self.query(normed).view(count, -1, heads, self.config.head_dim).transpose(1, 2)
        both = self.keys_values(read).view(count, -1, 2, kv_heads, self.config.head_dim).permute(2, 0, 3, 1, 4)
        keys, values = both.repeat_interleave(heads // kv_heads, dim=2)
        mixed = F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2).flatten(2)
        x = x + self.proj(mixed)
        out: Tensor = x + self.mlp(self.norm2(x.flatten(0, 1))).view(x.shape)
        return out
