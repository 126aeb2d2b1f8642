"""Reads a part of a message that stands for pages of a PDF file, as a part for each page's image."""

from __future__ import annotations

from typing import Any

from nvcli.core.prompt_image import MAX_PROMPT_IMAGES
from nvcli.core.validation import InvalidValue, is_integer, show
from nvcli.errors import RowError

PDF = "pdf"
"""The type of such a part."""
PAGE, DPI = "page", "dpi"
"""The number of a page, from 1, and its resolution in dots an inch, beside the name of the file."""
FILE = "file"
"""Beside a page of an input that is a PDF file itself: that file (`job.input.pdf_source.PdfFile`)."""
FIRST_PAGE = "first_page"
"""In place of `PAGE`: all pages from this one, as many as the file has."""
_NAMING_KEYS = ("path", PDF, "url")
DEFAULT_DPI, _MOST_DPI = 200, 1200
_MOST_PAGES = 1_000_000
_FORM = '{"type": "pdf", "path": PATH, "pages": "1-3"}'
_PAGES_FORM = 'pages from 1, such as "2", "1-3,7" or "5-" for the fifth and all after it'


def pdf_pages(part: dict[str, Any], name: str) -> tuple[str, list[dict[str, Any]]]:
    """Return the file that a part names, and what each of its pages has beside it: `PAGE` or `FIRST_PAGE`, and `DPI`.

    `name` is where the part stands in the row. Raises InvalidValue, and RowError for too many pages.
    """
    file = next((part[key] for key in _NAMING_KEYS if part.get(key) is not None), None)
    if not isinstance(file, str) or not file:
        raise InvalidValue((), f"`{name}` is {show(part)}; allowed: {_FORM}")
    dpi = part.get(DPI, DEFAULT_DPI)
    if not is_integer(dpi, 1, _MOST_DPI):
        raise InvalidValue((), f"`{name}.{DPI}` is {show(dpi)}; allowed: 1 to {_MOST_DPI}")
    return file, [{**page, DPI: dpi} for page in _pages(part.get("pages"), f"{name}.pages")]


def _pages(value: Any, name: str) -> list[dict[str, int]]:
    """Return the pages that `pages` names, each as `PAGE` or, at the end of what has no end, as `FIRST_PAGE`."""
    if value is None:
        return [{FIRST_PAGE: 1}]
    found: list[dict[str, int]] = []
    for piece in str(value).split(","):
        first, dash, last = (text.strip() for text in piece.partition("-"))
        if isinstance(value, bool) or not _is_page(first) or (last and not _is_page(last)):
            raise InvalidValue((), f"`{name}` is {show(value)}; allowed: {_PAGES_FORM}")
        if dash and not last:
            found.append({FIRST_PAGE: int(first)})
            continue
        pages = range(int(first), int(last or first) + 1)
        if not pages:
            raise InvalidValue((), f"`{name}` is {show(value)}, and {first} is after {last}; allowed: {_PAGES_FORM}")
        if len(found) + len(pages) > MAX_PROMPT_IMAGES:
            raise RowError(
                "invalid_image", f"`{name}` is {show(value)}; allowed: {MAX_PROMPT_IMAGES} pages, as images of a row"
            )
        found += [{PAGE: page} for page in pages]
    return found


def _is_page(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= len(str(_MOST_PAGES)) and 1 <= int(text) <= _MOST_PAGES
