"""Made-up images for a benchmark: prepared as those of rows are, which is timed, and put before made-up prompts.

A few photos are prepared, whose pixels all requests share under digests of their own: an engine computes each image
anew, as if no two were alike, and the pixels take little memory.
"""

from __future__ import annotations

import io
import time
from base64 import b64encode
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from hashlib import blake2b

import msgspec
import numpy as np

from nvcli.core.messages import unpack
from nvcli.engine.request import Request
from nvcli.errors import ConfigError
from nvcli.job.images.pixel_memory import Pixels
from nvcli.job.images.row_images import RowImages
from nvcli.job.rows.conversation import IMAGE

_ROUNDS = 4
"""Photos for each process that prepares them, in the time that is taken."""
_QUALITY = 90
_GRAIN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchImages:
    """The images of a benchmark's prompts."""

    per_prompt: int
    size: tuple[int, int]
    """Width and height in pixels."""
    num_tokens: int
    """Tokens of each."""
    num_processes: int
    prepared_per_second: float
    """Images that these processes decode and prepare in a second, with nothing beside them."""


class MadeUpImages:
    """Images for the prompts of a workload, whose pixels are there as long as this is."""

    def __init__(self, reader: RowImages, *, token_id: int, per_prompt: int, size: tuple[int, int], seed: int) -> None:
        """Prepare photos by `reader`, which is closed then. Raises ConfigError for a size that the model refuses, and
        what `RowImages.read` raises."""
        self._token_id, self._seed = token_id, seed
        rng = np.random.default_rng(seed)
        count = reader.processes.count
        with closing(reader):
            started = [_url(rng, size) for _ in range(count)]
            self._pixels = _prepared(reader, started, size)
            photos = [_url(rng, size) for _ in range(_ROUNDS * count)]
            begin = time.perf_counter()
            held = _prepared(reader, photos, size)
            seconds = time.perf_counter() - begin
            del held
            self._chosen = [self._pixels[number % count] for number in range(per_prompt)]
            ids, self._images = reader.expand(reader.bare_prompt(self._chosen), self._chosen)
        self._ids = ids
        self.figures = BenchImages(
            per_prompt=per_prompt,
            size=size,
            num_tokens=len(ids) // per_prompt,
            num_processes=count,
            prepared_per_second=len(photos) / seconds,
        )

    @property
    def num_tokens(self) -> int:
        """Tokens of a prompt's images."""
        return len(self._ids)

    def add_to(self, requests: Sequence[Request]) -> list[Request]:
        """Return requests with images before their prompts; only samples of one prompt have the same ones."""
        return [self._with_images(request) for request in requests]

    def _with_images(self, request: Request) -> Request:
        images = [
            msgspec.structs.replace(image, key=_key(self._seed, request.row, number))
            for number, image in enumerate(self._images.images)
        ]
        other = 0 if self._token_id else 1  # in place of an image's token that was drawn by chance
        ids = [*self._ids, *(other if token == self._token_id else token for token in unpack(request.prompt_ids))]
        packed = replace(self._images, images=images).packed(ids)
        return msgspec.structs.replace(request, prompt_ids=packed, images=images, image_token_id=self._token_id)


def _key(seed: int, row: int, number: int) -> bytes:
    return blake2b(b"%d %d %d" % (seed, row, number), digest_size=16).digest()


def _prepared(reader: RowImages, photos: Sequence[str], size: tuple[int, int]) -> list[Pixels]:
    found = reader.read([[{"type": IMAGE, IMAGE: photo}] for photo in photos])
    prepared = [pixels for each in found if isinstance(each, list) for pixels in each]
    problem = next((each for each in found if not isinstance(each, list)), None)
    if problem is not None:
        width, height = size
        raise ConfigError(f"--image-size {width}x{height}: {problem.message}")
    return prepared


def _url(rng: np.random.Generator, size: tuple[int, int]) -> str:
    return "data:;base64," + b64encode(make_photo(rng, size)).decode()


def make_photo(rng: np.random.Generator, size: tuple[int, int]) -> bytes:
    """Make a JPEG of this width and height about as large as a photo of it: smooth colours with grain."""
    from PIL import Image

    width, height = size
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize(size, Image.Resampling.BICUBIC), dtype=np.int16)
    grain = rng.integers(-_GRAIN, _GRAIN + 1, (height, width, 1), dtype=np.int16)
    out = io.BytesIO()
    Image.fromarray(np.clip(smooth + grain, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=_QUALITY)
    return out.getvalue()
