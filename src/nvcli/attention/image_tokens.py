"""ImageTokens: the tokens of a batch that stand for parts of images, and what takes the place of their embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class WholeImage:
    """Tokens of an image in a batch that attend to all of the image's, those behind them included."""

    first_row: int
    """The first of their rows in the batch's tokens, which follow each other."""
    num_tokens: int
    request: int
    """The row of their request in the batch."""
    position: int
    """The position of the first of them in the request."""

    @property
    def end(self) -> int:
        """The position behind the image's last token."""
        return self.position + self.num_tokens


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """N tokens of a batch."""

    rows: Tensor
    """[N] int64, their rows in the batch."""
    embeddings: Tensor
    """[N, H], what the decoder reads in place of their own embeddings."""
    deep: tuple[Tensor, ...] = ()
    """[N, H] for each of the decoder's first layers: what is added to the residual stream behind it."""
    whole: tuple[WholeImage, ...] = ()
    """The images whose tokens attend to all of the image's; each ends in this batch."""
