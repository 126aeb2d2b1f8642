"""An image process: decodes images with Pillow, draws pages of PDF files with PDFium, resizes both for the model, and
writes their pixels where ranks read them.

Images are untrusted. So this runs in a process of its own with little memory, reads few formats, and checks the size of
an image before decoding it.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterator
from hashlib import blake2b
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nvcli.core.system.host_memory import limit_more_memory
from nvcli.core.system.pixel_file import PixelFile
from nvcli.errors import first_line
from nvcli.job.images.pdf_page import PdfPage, Unreadable, check_pixels, count_pages, opened_page
from nvcli.models.vision.image_processor import ImageProcessor, Resampling
from nvcli.models.vision.image_size import Fit

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.Image import Resampling as PillowFilter

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_MAX_BYTES = 2 << 30
"""The most memory of the process beside what it has at its start."""


class Question(msgspec.Struct, frozen=True):
    """An image to prepare, and the model's image processor with the limits of its size."""

    image: Path | bytes
    processor: ImageProcessor
    file: str
    """The memory for its pixels (`PixelMemory.path`)."""
    offset: int
    """The place of its first pixel there."""
    page: PdfPage | None = None
    """The page, if `image` is a PDF file."""


class PageCount(msgspec.Struct, frozen=True):
    """A PDF file whose pages are to be counted."""

    source: Path | bytes


class Prepared(msgspec.Struct, frozen=True, array_like=True):
    """A prepared image, or why it cannot be read.

    Its pixels are written as [height, width, 3] bytes, first those of its tiles row by row, if it has any.
    """

    fit: Fit = Fit(height=0, width=0)
    key: bytes = b""
    """A digest of the pixels and their shape."""
    num_pages: int = 0
    """The answer to a `PageCount`."""
    problem: str = ""
    has_no_memory: bool = False
    """Whether the problem is that there was no memory for its pixels."""


def main(argument: None, control: Connection) -> None:
    """Report with an empty message that the process is ready, and answer each `Question` or `PageCount` by a
    `Prepared`."""
    from PIL import Image  # its import must not count towards the limit

    Image.preinit()
    Image.MAX_IMAGE_PIXELS = None  # looked at below, before anything is decoded
    warnings.simplefilter("ignore")
    limit_more_memory(_MAX_BYTES)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())  # libtiff writes there whatever it finds wrong
    encode = msgspec.msgpack.Encoder().encode
    control.send_bytes(b"")
    pixels: PixelFile | None = None
    while True:
        question: Question | PageCount = control.recv()
        if pixels is None and isinstance(question, Question):
            pixels = PixelFile(question.file)
        control.send_bytes(encode(answer(question, pixels)))


def answer(question: Question | PageCount, file: PixelFile | None) -> Prepared:
    """Prepare one image, or count pages, for which `file` may be None. Never raises because of an image."""
    try:
        if isinstance(question, PageCount):
            return Prepared(num_pages=count_pages(question.source))
        assert file is not None
        return _prepare(question, file)
    except Unreadable as error:
        return Prepared(problem=str(error))
    except MemoryError:
        return Prepared(problem=f"it takes more than {_MAX_BYTES >> 30} GiB to decode")
    except Exception as error:  # Pillow raises whatever a damaged file leads to
        return Prepared(problem=f"cannot be read: {first_line(error) or type(error).__name__}")


def _prepare(question: Question, file: PixelFile) -> Prepared:
    image, fit = _decoded(question) if question.page is None else _drawn(question, question.page)
    pixels = b"".join(part.tobytes() for part in _resized(image, fit, question.processor.resampling))
    try:
        file.write(pixels, question.offset)
    except OSError as error:
        problem = f"there is no memory for its pixels ({len(pixels):,} bytes): {error}"
        return Prepared(problem=problem, has_no_memory=True)
    digest = blake2b(pixels, digest_size=16)
    digest.update(msgspec.msgpack.encode((fit.pictures, fit.grid, fit.layout)))
    return Prepared(fit=fit, key=digest.digest())


def _decoded(question: Question) -> tuple[Image, Fit]:
    """Return an image, and the size to give it. Raises Unreadable, and whatever Pillow raises."""
    from PIL import Image as images
    from PIL import ImageOps, UnidentifiedImageError

    data = question.image if isinstance(question.image, bytes) else question.image.read_bytes()
    if not data:
        raise Unreadable("it is empty")
    try:
        opened = images.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        if b"%PDF-" in data[:1024]:
            raise Unreadable('it is a PDF file; name it in a part {"type": "pdf", "path": …}') from None
        raise Unreadable(f"it is in none of the formats {', '.join(FORMATS)}, or damaged") from None
    with opened:
        check_pixels(opened.height, opened.width)
        image = ImageOps.exif_transpose(opened).convert("RGB")
    return image, _fit(question.processor, image.height, image.width)


def _drawn(question: Question, page: PdfPage) -> tuple[Image, Fit]:
    """Return a page, not much larger than it gets, and the size that an image of its resolution gets. Raises
    Unreadable."""
    with opened_page(question.image, page) as opened:
        fit = _fit(question.processor, *opened.size)
        return opened.draw(*fit.canvas), fit


def _fit(processor: ImageProcessor, height: int, width: int) -> Fit:
    try:
        return processor.rule.fit(height, width)
    except ValueError as error:
        raise Unreadable(str(error)) from None


def _resized(image: Image, fit: Fit, resampling: Resampling) -> Iterator[Image]:
    """Yield the tiles and the whole image, as the model reads them."""
    from PIL.Image import Resampling as Filter

    resample, margin = Filter[resampling.upper()], fit.margin
    if fit.parts:
        yield from _quarters_and_whole(image, fit, resample)
        return
    if fit.square is not None:
        image = _in_middle(image, max(image.size), max(image.size), fit.square)
    if fit.is_squared:
        image = image.crop((0, 0, max(image.size), max(image.size)))
    if fit.first is not None:
        image = image.resize(fit.first[::-1], resample=resample)
    if fit.has_whole_first:
        yield image.resize((fit.width, fit.height), resample=resample)
    if fit.grid != (0, 0):
        height, width = fit.canvas
        canvas = image.resize((fit.picture or fit.canvas)[::-1], resample=resample)
        if fit.is_centred:
            canvas = _in_middle(canvas, height, width, (0, 0, 0))
        down, across = height // fit.grid[0], width // fit.grid[1]
        tall, wide = fit.tile if fit.cut is None else (down, across)
        for top in range(0, height, down):
            for left in range(0, width, across):
                part = canvas.crop((left, top, left + wide, top + tall))
                yield part if fit.cut is None else part.resize(fit.tile[::-1], resample=resample)
        image = image if fit.first is None else canvas
    if fit.is_middle:
        top, left = (image.height - fit.height) // 2, (image.width - fit.width) // 2
        yield image.crop((left, top, left + fit.width, top + fit.height))
        return
    if not fit.height or fit.has_whole_first:
        return
    if fit.whole_first is not None:
        image = image.resize(fit.whole_first[::-1], resample=resample)
    if fit.shown is not None:
        yield _in_middle(image.resize(fit.shown[::-1], resample=resample), fit.height, fit.width, fit.frame)
        return
    picture = fit.picture if fit.grid == (0, 0) else None
    whole = image.resize((fit.width + margin, fit.height + margin) if picture is None else picture[::-1], resample)
    yield whole.crop((0, 0, fit.width, fit.height))  # black where the image has ended, as in tiles


def _quarters_and_whole(image: Image, fit: Fit, resample: PillowFilter) -> Iterator[Image]:
    """Yield the quarters of an image, if they are read, and the image itself, as `Fit.parts` says."""
    width, height = image.size
    columns, rows = ((0, width // 2), (width // 2, width)), ((0, height // 2), (height // 2, height))
    quarters = [(left, top, right, bottom) for top, bottom in rows for left, right in columns]
    boxes = [*quarters, (0, 0, width, height)][-len(fit.parts) :]
    for box, size, (tall, wide) in zip(boxes, fit.parts, fit.pictures, strict=True):
        yield image.crop(box).resize(size[::-1], resample=resample).crop((0, 0, wide, tall))


def _in_middle(image: Image, height: int, width: int, colour: tuple[int, int, int]) -> Image:
    """Return a picture of one colour with an image in its middle."""
    from PIL import Image as images

    picture = images.new("RGB", (width, height), colour)
    picture.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
    return picture
