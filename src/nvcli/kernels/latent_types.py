"""LatentHeads: the heads of latent attention, without tensors. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentHeads:
    """The heads of latent attention on a rank."""

    num_heads: int
    plain_dim: int
    rope_dim: int
    latent_dim: int
    is_interleaved: bool
    """Whether neighbouring numbers are rotated as pairs; otherwise number i is paired with i + R/2."""
