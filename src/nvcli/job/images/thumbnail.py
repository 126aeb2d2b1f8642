"""Thumbnails of prepared images, made from their pixels: no untrusted file is read again."""

from __future__ import annotations

import io
from base64 import b64encode

from nvcli.job.images.pixel_memory import Pixels

_SIDE = 96
"""The most pixels of a side."""
_QUALITY = 70


def thumbnail(pixels: Pixels) -> str:
    """Return the `data:` URL of a small JPEG picture of an image; of one in tiles, of the last tile, which is the whole
    image."""
    from PIL import Image

    data, height = pixels.read(), pixels.tile or pixels.height
    picture = Image.frombytes("RGB", (pixels.width, height), data[-height * pixels.width * 3 :])
    picture.thumbnail((_SIDE, _SIDE))
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=_QUALITY)
    return "data:image/jpeg;base64," + b64encode(out.getvalue()).decode()
