"""Images in the values of tables and Python programs, as the texts by which rows name images.

Bytes and Pillow's images become `data:` URLs, so that a row stays plain text on its way to the process that decodes
it. A struct of the Hugging Face hub's datasets, `{"bytes": …, "path": …}`, is its bytes, or else its path.
"""

from __future__ import annotations

import io
import sys
from base64 import b64encode
from collections.abc import Mapping
from typing import Any

from nvcli.errors import RowError

MAX_PIXELS = 100_000_000
"""The most pixels of an image as it is stored."""
OF_BYTES = "data:;base64,"
"""How the name of an image begins that was given as bytes."""
_BYTES, _PATH = "bytes", "path"


def named_images(value: Any, key: str) -> Any:
    """Return a value with the images in it, or in a list, as texts that name them; anything else unchanged. Raises
    RowError for an image of Pillow that is too large or that Pillow cannot read."""
    if isinstance(value, list | tuple):
        return [named_images(each, key) for each in value]
    if isinstance(value, Mapping) and value.keys() <= {_BYTES, _PATH}:
        data, path = value.get(_BYTES), value.get(_PATH)
        return named_images(data, key) if data is not None else value if path is None else path
    if isinstance(value, bytes | bytearray | memoryview):
        return _data_url(value)
    return _data_url(_ppm(value, key)) if _is_pillow_image(value) else value


def with_named_images(messages: Any) -> Any:
    """Return messages with the images in their parts as texts that name them. What is no message stays as it is."""
    if not isinstance(messages, list | tuple):
        return messages
    return [
        {**message, "content": [_named_part(part) for part in content]}
        if isinstance(message, Mapping) and isinstance(content := message.get("content"), list | tuple)
        else message
        for message in messages
    ]


def _named_part(part: Any) -> Any:
    if not isinstance(part, Mapping) or (isinstance(kind := part.get("type"), str) and kind == "text"):
        return part
    return {key: named_images(value, key) for key, value in part.items()}


def _is_pillow_image(value: Any) -> bool:
    pillow = sys.modules.get("PIL.Image")  # whoever has such an image has imported it
    return pillow is not None and isinstance(value, pillow.Image)


def _ppm(image: Any, key: str) -> bytes:
    """Return an image of Pillow as transformers' `load_image` takes it, in a format that costs no compression."""
    from PIL import ImageOps

    if image.width * image.height > MAX_PIXELS:
        size = f"{image.width:,} × {image.height:,}"
        raise RowError("invalid_image", f"the image in `{key}` has {size} pixels; allowed: {MAX_PIXELS:,} together")
    out = io.BytesIO()
    try:
        ImageOps.exif_transpose(image).convert("RGB").save(out, "PPM")
    except Exception as error:  # it may read its file only now
        raise RowError("invalid_image", f"the image in `{key}` cannot be read: {error}") from None
    return out.getvalue()


def _data_url(data: bytes | bytearray | memoryview) -> str:
    return OF_BYTES + b64encode(data).decode()
