"""The messages about a replica's weights, from the parent to every rank and back, between steps."""

from __future__ import annotations

import msgspec


class LoadWeights(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Replace the weights by those of another checkpoint of the same architecture, and wake up if asleep."""

    path: str
    """The checkpoint's folder."""


class Sleep(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Give the memory of the KV cache and the weights back."""

    level: int
    """1: keep a copy of the weights in host memory; 2: drop them."""


class Wake(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Take the memory again, and put the weights back. Changes nothing unless asleep."""


WeightsChange = LoadWeights | Sleep | Wake
"""They come while no step is in flight and no request is unfinished."""


class WeightsChanged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to a `WeightsChange`, of a rank or of all of a replica."""

    error_kind: str = ""
    """The class name of the error (`nvcli.errors`) for which nothing was changed; empty: it was."""
    message: str = ""
    """The error's message."""
