"""Rotary angles: the frequencies of each rope type, and the table of cosines and sines made from them.

The formulas are those of transformers' `modeling_rope_utils.py` (default, linear, llama3, and YaRN after
https://arxiv.org/abs/2309.00071), in float32 and in the same order, so that float32 logits agree.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nvcli.models.rope_config import RopeConfig
from nvcli.models.weights import DerivedModule


def rope_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Compute (inverse frequencies [D/2] float32 on the CPU, the factor on cosines and sines)."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, head_dim), rope.yarn_attention_factor
    assert rope.rope_type == "default"
    return inv_freq, 1.0


class RotaryTable(DerivedModule):
    """Cosines and sines of every position: positions [T] → [T, D] float32, D/2 cosines then D/2 sines."""

    table: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int) -> None:
        super().__init__()
        self.rope = rope
        self.head_dim = head_dim
        self.register_buffer("table", torch.empty(max_positions, head_dim, dtype=torch.float32), persistent=False)

    def derive(self, device: torch.device) -> None:
        inv_freq, attention_factor = rope_frequencies(self.rope, self.head_dim)
        positions = torch.arange(self.table.shape[0], dtype=torch.float32, device=device)
        angles = torch.outer(positions, inv_freq.to(device))
        table = torch.empty(self.table.shape, dtype=self.table.dtype, device=device)  # see `materialize` in loader.py
        first, second = table.chunk(2, dim=-1)
        torch.mul(angles.cos(), attention_factor, out=first)
        torch.mul(angles.sin(), attention_factor, out=second)
        self.table = table

    def forward(self, positions: Tensor) -> Tensor:
        return self.table.index_select(0, positions)


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    old_length = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    is_low = wavelength > old_length / rope.low_freq_factor
    is_high = wavelength < old_length / rope.high_freq_factor
    scaled = torch.where(is_low, inv_freq / rope.factor, inv_freq)
    smooth = (old_length / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where(~is_high & ~is_low, smoothed, scaled)


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    def dimension_of(rotations: float) -> float:
        """The dimension whose angle turns that often over the original length."""
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp would be infinitely steep
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    pos_freqs = rope.theta ** (torch.arange(0, head_dim, 2, device="cpu").to(torch.float32) / head_dim)
    extrapolated, interpolated = 1.0 / pos_freqs, 1.0 / (rope.factor * pos_freqs)
    keep = 1 - ramp
    return interpolated * (1 - keep) + extrapolated * keep
