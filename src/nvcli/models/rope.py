"""Rotary angles: the frequencies of each rope type, and the table of cosines and sines made from them.

The formulas are those of transformers' `modeling_rope_utils.py` (default, linear, llama3, longrope, proportional, and
YaRN after https://arxiv.org/abs/2309.00071), in float32 and in the same order, so that float32 logits agree.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nvcli.models.parallel import BuildContext, TensorShard
from nvcli.models.rope_config import LEARNED_FREQUENCIES, RopeConfig
from nvcli.models.weights import DerivedModule


def rope_frequencies(rope: RopeConfig, head_dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Compute (inverse frequencies [rotary_dim / 2] float32 on the CPU, the factor on cosines and sines).

    `max_positions` is the length of the longest sequence of the run, by which longrope chooses its factors. Up to a
    model's own length, which no run exceeds, dynamic rope equals default rope.
    """
    dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    if rope.rope_type == "longrope":
        is_long = max_positions > rope.original_max_position_embeddings
        factors = torch.tensor(rope.long_factors if is_long else rope.short_factors, dtype=torch.float32, device="cpu")
        attention_factor = rope.long_attention_factor if is_long else rope.attention_factor
        return 1.0 / (factors * rope.theta**exponents), attention_factor
    inv_freq = 1.0 / (rope.theta**exponents)
    if rope.rope_type == "linear":
        return inv_freq / rope.factor, 1.0
    if rope.rope_type == "proportional":
        inv_freq[int(rope.partial_rotary_factor * head_dim // 2) :] = 0.0
        return inv_freq / rope.factor, 1.0
    if rope.rope_type == "llama3":
        return _llama3(rope, inv_freq), 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope, dim), rope.attention_factor
    assert rope.rope_type in ("default", "dynamic")
    return inv_freq, 1.0


class RotaryTable(DerivedModule):
    """Cosines and sines of every position: positions [T] → [T, D] float32, D/2 cosines then D/2 sines.

    They are in the order of `RopeConfig.row_order`; dimensions that are not rotated have an angle of 0.
    """

    table: Tensor

    def __init__(self, rope: RopeConfig, head_dim: int, max_positions: int, axes: tuple[int, ...] = ()) -> None:
        """`axes`: which of its positions turns each frequency, where tokens have several (`VisionConfig.axes`)."""
        super().__init__()
        self.axes = axes[: head_dim // 2]
        self.columns: list[Tensor] = []
        """The columns of the table that are turned by each of a token's positions but its first, once it is
        derived."""
        self.rope = rope
        self.head_dim = head_dim
        self.register_buffer("table", torch.empty(max_positions, head_dim, dtype=torch.float32), persistent=False)

    def derive(self, device: torch.device) -> None:
        num_positions = self.table.shape[0]
        inv_freq, attention_factor = rope_frequencies(self.rope, self.head_dim, num_positions)
        positions = torch.arange(num_positions, dtype=torch.float32, device=device)
        angles = torch.outer(positions, inv_freq.to(device))
        table = torch.empty(self.table.shape, dtype=self.table.dtype, device=device)  # see `materialize` in loader.py
        turned = len(inv_freq)
        cosines, sines = table.chunk(2, dim=-1)
        cosines[:, turned:], sines[:, turned:] = 1.0, 0.0
        torch.mul(angles.cos(), attention_factor, out=cosines[:, :turned])
        torch.mul(angles.sin(), attention_factor, out=sines[:, :turned])
        self.table = table
        half = self.head_dim // 2
        by_axis = [[column for column, of in enumerate(self.axes) if of == axis] for axis in (1, 2, 3)]
        self.columns = [torch.tensor([*of, *(half + n for n in of)], device=device) for of in by_axis]

    def forward(self, positions: Tensor) -> Tensor:
        """Look up positions: [T], or [3 or 4, T] where each token has several."""
        if positions.dim() == 1:
            return self.table.index_select(0, positions)
        angles = self.table.index_select(0, positions[0])
        for columns, of_axis in zip(self.columns, positions[1:], strict=False):
            angles.index_copy_(1, columns, self.table.index_select(0, of_axis)[:, columns])
        return angles


class LearnedAngles(TensorShard, DerivedModule):
    """Cosines and sines as `RotaryTable` gives them, of frequencies that the checkpoint changes (`is_learned`):
    positions [T] → [T, D] float32."""

    frequencies: Tensor

    def __init__(self, build: BuildContext, rope: RopeConfig, head_dim: int) -> None:
        super().__init__(build, LEARNED_FREQUENCIES)
        self.rope, self.head_dim, self.max_positions = rope, head_dim, build.max_positions
        self.factor = 1.0
        self.register_buffer("frequencies", torch.empty(head_dim // 2, dtype=torch.float32), persistent=False)

    def derive(self, device: torch.device) -> None:
        frequencies, self.factor = rope_frequencies(self.rope, self.head_dim, self.max_positions)
        self.frequencies = frequencies.to(device)

    def forward(self, positions: Tensor) -> Tensor:
        angles = torch.outer(positions.float(), self.frequencies * self.weight.exp())
        return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(self.factor)


def _llama3(rope: RopeConfig, inv_freq: Tensor) -> Tensor:
    old_length = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    is_low = wavelength > old_length / rope.low_freq_factor
    is_high = wavelength < old_length / rope.high_freq_factor
    scaled = torch.where(is_low, inv_freq / rope.factor, inv_freq)
    smooth = (old_length / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smoothed = (1 - smooth) * scaled / rope.factor + smooth * scaled
    return torch.where(~is_high & ~is_low, smoothed, scaled)


def _yarn(rope: RopeConfig, dim: int) -> Tensor:
    def dimension_of(rotations: float) -> float:
        """Return the dimension whose angle makes that many rotations over the original length."""
        length = rope.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp would be infinitely steep
    ramp = ((torch.arange(dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)).clamp(0, 1)
    pos_freqs = rope.theta ** (torch.arange(0, dim, 2, device="cpu").to(torch.float32) / dim)
    extrapolated, interpolated = 1.0 / pos_freqs, 1.0 / (rope.factor * pos_freqs)
    keep = 1 - ramp
    return interpolated * (1 - keep) + extrapolated * keep
