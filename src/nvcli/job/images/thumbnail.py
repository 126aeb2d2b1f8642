"""Thumbnails of prepared images, made from their pixels: no untrusted file is read again."""

from __future__ import annotations

import io
from base64 import b64encode

from nvcli.job.images.pixel_memory import Pixels

_SIDE = 96
"""The most pixels of a side."""
_QUALITY = 70


def thumbnail(pixels: Pixels) -> str:
    """Return the `data:` URL of a small JPEG picture of an image, or of its last tile if tiles alone are read."""
    from PIL import Image

    height, width = pixels.fit.pictures[0 if pixels.fit.has_whole_first else -1]
    size = 3 * height * width
    data = pixels.read()
    picture = Image.frombytes("RGB", (width, height), data[:size] if pixels.fit.has_whole_first else data[-size:])
    picture.thumbnail((_SIDE, _SIDE))
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=_QUALITY)
    return "data:image/jpeg;base64," + b64encode(out.getvalue()).decode()
