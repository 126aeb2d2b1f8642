"""ImageTokens: the tokens of a batch that stand for parts of images, and what takes the place of their embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """N tokens of a batch."""

    rows: Tensor
    """[N] int64, their rows in the batch."""
    embeddings: Tensor
    """[N, H], what the decoder reads in place of their own embeddings."""
    deep: tuple[Tensor, ...] = ()
    """[N, H] for each of the decoder's first layers: what is added to the residual stream behind it."""
