"""VisionTower: images to the embeddings of their tokens, in plain torch (`VisionConfig`).

It is held to transformers' towers (`modeling_qwen2_5_vl.py`, `modeling_qwen3_vl.py`). Shapes: P patches, H hidden
size, N tokens, O the decoder's hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nvcli.models.parallel import BuildContext, TensorShards
from nvcli.models.vision.patch_grid import PatchGrid, Runs, patch_grid
from nvcli.models.vision.vision_config import TOWER, VisionConfig

_EPS = 1e-6
_THETA = 10_000.0


@dataclass(frozen=True, slots=True)
class PixelScale:
    """How the processor of a checkpoint scales pixels: (value × factor − mean) / std, by channel."""

    factor: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


class VisionTower(nn.Module):
    """The tower of a model, which every rank of the first stage holds whole."""

    def __init__(self, build: BuildContext, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.batch_invariant = build.batch_invariant
        self.patch_embed = _Linear(build, f"{TOWER}.patch_embed.proj")
        self.positions = _Weights(build, f"{TOWER}.pos_embed") if config.num_positions else None
        self.blocks = nn.ModuleList(_Block(build, f"{TOWER}.blocks.{n}", config) for n in range(config.depth))
        self.merger = _Merger(build, f"{TOWER}.merger", config, norms_squares=False)
        self.deepstack = nn.ModuleList(
            _Merger(build, f"{TOWER}.deepstack_merger_list.{n}", config, norms_squares=True)
            for n in range(len(config.deepstack_layers))
        )

    def forward(self, images: Sequence[Tensor], scale: PixelScale) -> list[Tensor]:
        """Return the embeddings of each image's tokens, [N, outputs × O]: first those of the merger, then those of
        each deepstack layer. `images`: [height, width, 3] uint8, whole tokens high and wide, on the tower's device.

        Under `batch_invariant` each image is computed by itself, so that its bits depend on no other.
        """
        if self.batch_invariant and len(images) > 1:
            return [output for image in images for output in self([image], scale)]
        side = self.config.patch_size
        grids = [(image.shape[0] // side, image.shape[1] // side) for image in images]
        patches = torch.cat([self._patches(image, scale) for image in images])
        sizes = [rows * columns // self.config.merge_size**2 for rows, columns in grids]
        return list(torch.split(self._compute(patches, patch_grid(self.config, grids)), sizes))

    def _patches(self, image: Tensor, scale: PixelScale) -> Tensor:
        """Cut an image into patches of scaled values, in the type of the weights: [P, values of a patch]."""
        config = self.config
        side, merge = config.patch_size, config.merge_size
        values = image.float().mul_(scale.factor)
        values.sub_(values.new_tensor(scale.mean)).div_(values.new_tensor(scale.std))
        height, width, channels = values.shape
        rows, columns = height // (side * merge), width // (side * merge)
        squares = values.to(self.patch_embed.weight.dtype).view(rows, merge, side, columns, merge, side, channels)
        patches = squares.permute(0, 3, 1, 4, 6, 2, 5)  # rows and columns of tokens, then of patches, channel, pixels
        frames = patches.unsqueeze(5).expand(*patches.shape[:5], config.temporal_patch_size, side, side)
        return frames.reshape(-1, config.patch_values)

    def _compute(self, patches: Tensor, grid: PatchGrid) -> Tensor:
        config, device = self.config, patches.device
        squares = config.merge_size**2
        order = _on_device(grid.order, device)
        if order is not None:
            patches = patches.view(len(order), -1)[order].view(patches.shape)
        x = self.patch_embed(patches)
        if self.positions is not None:
            taps, weights = _on_device(grid.taps, device), _on_device(grid.tap_weights, device)
            assert taps is not None
            assert weights is not None
            x = x + (F.embedding(taps, self.positions.weight) * weights[:, :, None]).sum(1).to(x.dtype)
        angles = self._angles(grid, device)
        deep: list[Tensor] = []
        for number, block in enumerate(self.blocks):
            has_windows = config.window_tokens and number not in config.full_layers
            x = block(x, angles, grid.windows if has_windows else grid.images)
            if number in config.deepstack_layers:
                deep.append(self.deepstack[config.deepstack_layers.index(number)](x))
        ordered = [deep[config.deepstack_layers.index(layer)] for layer in sorted(config.deepstack_layers)]
        merged: Tensor = torch.cat([self.merger(x), *ordered], dim=1)
        assert len(merged) * squares == len(patches)
        inverse = _on_device(grid.inverse, device)
        return merged if inverse is None else merged[inverse]

    def _angles(self, grid: PatchGrid, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of the patches' rows and columns: [P, 1, head size / 2] float32 each."""
        half = self.config.hidden_size // self.config.num_heads // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=device) / half
        places = _on_device(grid.places, device)
        assert places is not None
        angles = (places.float()[:, :, None] * (1.0 / _THETA**exponents)).flatten(1)
        return angles.cos()[:, None], angles.sin()[:, None]


def _on_device(array: np.ndarray | None, device: torch.device) -> Tensor | None:
    if array is None:
        return None
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


class _Weights(TensorShards):
    """A weight, and a bias where the tower has one."""

    bias: nn.Parameter | None

    def __init__(self, build: BuildContext, name: str) -> None:
        super().__init__(build, {"weight": f"{name}.weight", "bias": f"{name}.bias"})


class _Linear(_Weights):
    """A projection: [P, in] → [P, out]."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.flatten(1), self.bias)


class _Norm(_Weights):
    """A layer norm, or without a bias an RMS norm in float32: [P, H] → [P, H]."""

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, _EPS)
        values = x.float()
        values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + _EPS)
        return self.weight * values.to(x.dtype)


class _Block(nn.Module):
    """An attention layer with its MLP: [P, H] → [P, H]."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm1, self.norm2 = (_Norm(build, f"{path}.{name}") for name in ("norm1", "norm2"))
        self.qkv, self.proj = (_Linear(build, f"{path}.attn.{name}") for name in ("qkv", "proj"))
        up, down = config.mlp_names
        self.up = nn.ModuleList(_Linear(build, f"{path}.mlp.{name}") for name in up)
        self.down = _Linear(build, f"{path}.mlp.{down}")
        self.is_gated = config.is_gated

    def forward(self, x: Tensor, angles: tuple[Tensor, Tensor], runs: Runs) -> Tensor:
        x = x + self.proj(self._attend(self.norm1(x), angles, runs))
        inner = self.norm2(x)
        inner = F.silu(self.up[0](inner)) * self.up[1](inner) if self.is_gated else _gelu(self.up[0](inner))
        out: Tensor = x + self.down(inner)
        return out

    def _attend(self, x: Tensor, angles: tuple[Tensor, Tensor], runs: Runs) -> Tensor:
        """Attend within each segment of `runs`: [P, H] → [P, H]."""
        q, k, v = self.qkv(x).view(len(x), 3, self.num_heads, -1).unbind(1)
        q, k = _rotated(q, *angles), _rotated(k, *angles)
        parts = []
        for first, count, size in runs:
            end = first + count * size
            one, other, values = (
                part[first:end].view(count, size, self.num_heads, -1).transpose(1, 2) for part in (q, k, v)
            )
            mixed = F.scaled_dot_product_attention(one, other, values)
            parts.append(mixed.transpose(1, 2).reshape(end - first, -1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rotated(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, second * cosines + first * sines], dim=-1).to(x.dtype)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


class _Merger(nn.Module):
    """Makes one vector of each token's patches: [P, H] → [N, O]."""

    def __init__(self, build: BuildContext, path: str, config: VisionConfig, *, norms_squares: bool) -> None:
        """`norms_squares`: the norm is over all patches of a token together."""
        super().__init__()
        norm, first, second = config.merger_names
        self.width, self.norms_squares = config.hidden_size * config.merge_size**2, norms_squares
        self.norm = _Norm(build, f"{path}.{norm}")
        self.first, self.second = _Linear(build, f"{path}.{first}"), _Linear(build, f"{path}.{second}")

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x.view(-1, self.width)) if self.norms_squares else self.norm(x).view(-1, self.width)
        out: Tensor = self.second(F.gelu(self.first(x)))
        return out
