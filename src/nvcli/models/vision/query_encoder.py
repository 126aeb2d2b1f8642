"""QueryEncoder: layers in which learned queries read the tokens of an image, one after another (DeepSeek-OCR 2,
https://arxiv.org/abs/2601.20552).

Tokens attend to each other; queries to all tokens, and to the queries before them. The queries become the decoder's
tokens.
"""

from __future__ import annotations

from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvcli.kernels.patch_attention import rotate_patches
from nvcli.kernels.patch_types import Runs
from nvcli.models.parallel import BuildContext
from nvcli.models.vision.tower_parts import GatedMLP, Linear, Norm, Weights
from nvcli.models.vision.vision_config import QKV, QueryEncoderConfig


class QueryEncoder(nn.Module):
    """The tokens of images → as many tokens of the decoder: [N, H] → [N, O]."""

    def __init__(self, build: BuildContext, path: str, config: QueryEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.queries = nn.ModuleList(Weights(build, f"{path}.queries{number}") for number in range(len(config.sides)))
        self.layers = nn.ModuleList(_Layer(build, f"{path}.{number}", config) for number in range(config.depth))
        self.norm, self.projection = Norm(build, f"{path}.norm", config.eps), Linear(build, f"{path}.projection")

    def forward(self, x: Tensor, images: Runs) -> Tensor:
        """Read `images`, runs of tokens whose numbers are squares of `QueryEncoderConfig.sides`."""
        parts = []
        for first, count, size in images:
            queries = self.queries[self.config.sides.index(isqrt(size))].get_parameter("weight")
            tokens = x[first : first + count * size].view(count, size, -1)
            both = torch.cat([tokens, queries.expand(count, -1, -1)], dim=1)
            angles, mask = self._angles(2 * size, x.device).repeat(count, 1), _mask(size, x.device)
            state = both.flatten(0, 1)
            for layer in self.layers:
                state = layer(state, angles, mask)
            parts.append(self.projection(self.norm(state.view(both.shape)[:, size:].flatten(0, 1))))
        return torch.cat(parts)

    def _angles(self, count: int, device: torch.device) -> Tensor:
        """Return cosines and then sines of places from 0 on: [count, head size] float32."""
        config = self.config
        half = config.hidden_size // config.num_heads // 2
        exponents = torch.arange(half, dtype=torch.float32, device=device) / half
        places = torch.arange(count, dtype=torch.float32, device=device)
        angles = torch.outer(places, 1.0 / config.rope_theta**exponents)
        return torch.cat([angles.cos(), angles.sin()], dim=1)


def _mask(size: int, device: torch.device) -> Tensor:
    """Return which of as many tokens and queries each of them reads: [2 size, 2 size] bool."""
    mask = torch.ones(2 * size, 2 * size, dtype=torch.bool, device=device).tril()
    mask[:size, :size] = True
    return mask


class _Layer(nn.Module):
    """Attention and a gated MLP, with norms before both."""

    def __init__(self, build: BuildContext, path: str, config: QueryEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.norm1, self.norm2 = (Norm(build, f"{path}.{name}", config.eps) for name in ("norm1", "norm2"))
        self.qkv, self.proj = (
            Linear(build, *(f"{path}.attn.{name}" for name in QKV)),
            Linear(build, f"{path}.attn.proj"),
        )
        self.mlp = GatedMLP(build, f"{path}.mlp")

    def forward(self, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        """Compute the layer: [tokens and queries of all images, H] → the same shape."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        parts = self.qkv(self.norm1(x)).view(len(x), heads + 2 * kv_heads, -1).split([heads, kv_heads, kv_heads], dim=1)
        qkv = torch.stack([part.repeat_interleave(heads // part.shape[1], dim=1) for part in parts], dim=1)
        rotate_patches(qkv, angles)
        q, k, v = qkv.view(-1, len(mask), *qkv.shape[1:]).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(x.shape)
        x = x + self.proj(mixed)
        out: Tensor = x + self.mlp(self.norm2(x))
        return out
