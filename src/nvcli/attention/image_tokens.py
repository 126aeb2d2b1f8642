"""ImageTokens: the tokens of a batch that stand for parts of images, and what takes the place of their embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ImageGroup:
    """Images that are attended together in the layers of one kind."""

    rows: Tensor
    """[n × t] int64, the rows of their tokens in the batch."""
    block_ids: Tensor
    """[n × L / block size] int64, the blocks of their keys."""
    is_behind: Tensor
    """[n, L] bool, the keys after the image's last, which may be anything."""
    mask: Tensor
    """[n, 1, t, L], 0 or -inf, added to the scores."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """N tokens of a batch."""

    rows: Tensor
    """[N] int64, their rows in the batch."""
    embeddings: Tensor | None
    """[N, H], what the decoder reads in place of their own embeddings; None in pipeline stages after the first, which
    get the residual stream."""
    deep: tuple[Tensor, ...] = ()
    """[N, H] for each deep output of the tower: what is added to the residual stream."""
    whole: Mapping[tuple[int | None, int], Sequence[ImageGroup]] = field(default_factory=dict)
    """The images whose tokens attend to all of the image's, each of which ends in this batch, by the window and the KV
    group of the layers in which they do (`whole_images.plan_both_ways`)."""
