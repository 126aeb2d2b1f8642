"""Pages of PDF files as images, through pypdfium2. Only image processes use it: PDFium is C++ that parses untrusted
files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from nvcli.job.rows.image_values import MAX_PIXELS

if TYPE_CHECKING:
    from PIL.Image import Image

ENCRYPTED = "the file is encrypted; save it without its password"
_POINTS_PER_INCH = 72


class Unreadable(Exception):
    """An image, a page or a file that cannot be read, and why."""


class PdfPage(msgspec.Struct, frozen=True):
    """A page of a file."""

    number: int
    """Counted from 1."""
    dpi: int
    """Its resolution, in dots an inch."""


class OpenedPage:
    """A page, ready to be drawn."""

    def __init__(self, page: Any, dpi: int) -> None:
        """`page` is pypdfium2's. Raises Unreadable for one without an area."""
        self._page, self._dots = page, dpi / _POINTS_PER_INCH
        self._width, self._height = page.get_size()
        if not (self._width > 0 and self._height > 0):
            raise Unreadable("it has no area")

    @property
    def size(self) -> tuple[int, int]:
        """The height and width in pixels at the page's resolution."""
        return max(1, round(self._height * self._dots)), max(1, round(self._width * self._dots))

    def draw(self, height: int, width: int) -> Image:
        """Draw the page at its resolution, or if that is smaller, so that no side is shorter than these pixels. Raises
        Unreadable for too many pixels."""
        scale = min(self._dots, max(height / self._height, width / self._width))
        check_pixels(round(self._height * scale), round(self._width * scale))
        drawn: Image = self._page.render(scale=scale, rev_byteorder=True).to_pil().convert("RGB")
        return drawn


def check_pixels(height: int, width: int) -> None:
    """Raise Unreadable for an image that is too large to decode."""
    if height * width > MAX_PIXELS:
        raise Unreadable(f"it has {width:,} × {height:,} pixels; allowed: {MAX_PIXELS:,} together")


def count_pages(source: Path | bytes) -> int:
    """Return the number of pages of a file. Raises Unreadable."""
    with _opened(source) as document:
        return len(document)


@contextmanager
def opened_page(source: Path | bytes, page: PdfPage) -> Iterator[OpenedPage]:
    """Open a page, with what is filled into its forms. Raises Unreadable for a file or a page that cannot be read."""
    with _opened(source) as document:
        if page.number > len(document):
            raise Unreadable(f"the file has {len(document):,} pages")
        document.init_forms()
        yield OpenedPage(document[page.number - 1], page.dpi)


@contextmanager
def _opened(source: Path | bytes) -> Iterator[Any]:
    """Open a document. Raises Unreadable, also for what PDFium says of it while it is open."""
    try:
        import pypdfium2
    except ImportError:
        raise Unreadable("pages of PDF files need pypdfium2: pip install 'nvcli[pdf]'") from None
    try:
        with pypdfium2.PdfDocument(BytesIO(source) if isinstance(source, bytes) else source) as document:
            yield document
    except pypdfium2.PdfiumError as error:
        if "password" in str(error).lower():
            raise Unreadable(ENCRYPTED) from None
        if not (len(source) if isinstance(source, bytes) else source.stat().st_size):
            raise Unreadable("the file is empty") from None
        raise Unreadable(f"cannot be read: {error}") from None
