"""Thumbnails are small pictures of what the model read."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest
from PIL import Image

from nvcli.job.images.pixel_memory import PixelMemory, Pixels
from nvcli.job.images.thumbnail import thumbnail
from nvcli.models.vision.image_size import Fit


@pytest.mark.parametrize(("tile", "size", "first"), [(0, (32, 96), 400), (200, (96, 96), 400), (200, (96, 96), 0)])
def test_a_thumbnail_shows_the_image_without_its_tiles(tile: int, size: tuple[int, int], first: int) -> None:
    """`first`: the row in memory where the image begins, if it has tiles."""
    memory = PixelMemory()
    written = np.zeros((600, 200, 3), dtype=np.uint8)
    written[first : first + 200, :, 1] = 200
    with open(memory.path.partition("#")[0], "r+b") as file:
        file.seek(4096)
        file.write(written.tobytes())
    memory.reserve(8192)
    grid = (2, 1) if tile else (0, 0)
    fit = Fit(height=tile or 600, width=200, tile=(tile, tile), grid=grid, has_whole_first=first == 0)
    url = thumbnail(Pixels(memory, 4096, fit, b""))
    head, _, data = url.partition(",")
    picture = Image.open(io.BytesIO(base64.b64decode(data)))
    assert (head, picture.format, picture.size) == ("data:image/jpeg;base64", "JPEG", size)
    top, bottom = (picture.getpixel((5, y)) for y in (5, 90))
    assert abs(bottom[1] - 200) < 9
    assert abs(top[1] - (200 if tile else 0)) < 9
    assert len(url) < 4000
