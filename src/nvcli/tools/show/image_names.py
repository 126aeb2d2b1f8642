"""Images of rows as text: what they are named by, and in place of their bytes in base64 their type and size."""

from __future__ import annotations

import re
from typing import Any

from nvcli.core.validation import shorten

_DATA_URL = re.compile(r'data:([^,;\s"]{0,100})(?:;[^,;\s"]{1,100}){0,9}?;base64,([\w+/%=\\-]*)')
_NAMING_KEYS = ("image", "image_url", "image_pil", "path", "url", "pdf")
_SHOWN_CHARS = 200


def without_base64(text: str) -> str:
    """Return a text with the type and the size of each `data:` URL in place of its bytes."""
    return _DATA_URL.sub(_described, text)


def image_name(value: Any) -> str:
    """Return a name for what a row names an image by: a path, a URL, or an object that holds one."""
    if isinstance(value, dict):
        value = value.get("url", value.get("path"))
    name = without_base64(value) if isinstance(value, str) else "in bytes" if value is None else str(value)
    return f"[image {shorten(name, _SHOWN_CHARS)}]"


def part_name(part: dict[str, Any]) -> str:
    """Return a part of a content as text: its text, or of anything else its type and what it is named by."""
    if isinstance(text := part.get("text"), str):
        return text
    kind = str(part.get("type", ""))
    value = next((part[key] for key in _NAMING_KEYS if part.get(key) is not None), None)
    if kind == "pdf":
        pages = "" if part.get("pages") is None else f", pages {part['pages']}"
        return f"[PDF {shorten(without_base64(str(value)), _SHOWN_CHARS)}{shorten(pages)}]"
    return f"[{shorten(kind)}]" if value is None else image_name(value)


def _described(found: re.Match[str]) -> str:
    data = found[2].replace("\\", "").replace("%3D", "=")
    return f"data:{found[1]}, {len(data.rstrip('=')) * 3 // 4:,} bytes"
