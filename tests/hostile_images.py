"""Files of images, valid in every way that formats allow, and what strangers make of them."""

from __future__ import annotations

import io
import random
import re
import struct
import zlib
from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image

_NUMBER = re.compile(rb"-?\d+(\.\d+)?")
_NUMBERS = (b"0", b"-1", b"1", b"65536", b"2147483647", b"4294967296", b"99999999999999999999", b"1e999", b"0.000001")


def picture(mode: str = "RGB", height: int = 33, width: int = 47, seed: int = 0) -> Image.Image:
    """An image of smooth colours in a mode of Pillow."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (3, 4, 3), dtype=np.uint8))
    large = small.resize((width, height), Image.Resampling.BICUBIC)
    if mode.startswith("I;16"):
        return Image.fromarray(np.asarray(large.convert("L")).astype(np.uint16) * 257)
    return large.convert(mode)


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def valid_images() -> dict[str, bytes]:
    """Files by what is special about them."""
    others = [picture(seed=seed) for seed in (1, 2)]
    exif = Image.Exif()
    exif[0x0112] = 6
    found = {
        f"{kind} {mode}": encoded(picture(mode), kind)
        for kind, modes in {
            "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
            "JPEG": ("L", "RGB", "CMYK"),
            "WEBP": ("RGB", "RGBA"),
            "GIF": ("L", "P"),
            "BMP": ("1", "L", "P", "RGB", "RGBA"),
            "TIFF": ("1", "L", "P", "RGB", "RGBA", "CMYK", "LAB", "I;16", "F"),
            "PPM": ("1", "L", "RGB"),
        }.items()
        for mode in modes
    }
    transparent = picture("P")
    found |= {
        "PNG transparent palette": encoded(transparent, "PNG", transparency=0),
        "PNG animated": encoded(picture(), "PNG", save_all=True, append_images=others),
        "PNG turned": encoded(picture(), "PNG", exif=exif),
        "JPEG turned": encoded(picture(), "JPEG", exif=exif),
        "JPEG progressive": encoded(picture(), "JPEG", progressive=True),
        "WEBP lossless": encoded(picture("RGBA"), "WEBP", lossless=True),
        "WEBP animated": encoded(picture(), "WEBP", save_all=True, append_images=others),
        "GIF animated": encoded(picture("P"), "GIF", save_all=True, append_images=others),
        "TIFF pages": encoded(picture(), "TIFF", save_all=True, append_images=others),
    }
    for way in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"):
        found[f"TIFF {way}"] = encoded(picture(), "TIFF", compression=way)
    return found


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, *, lines: int | None = None, before: bytes = b"") -> bytes:
    """A black image of any size, of which `lines` are there."""
    body = zlib.compress(bytes((width // 8 + 2) * (height if lines is None else lines)))
    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    start = b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + before
    return start + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def bombs() -> dict[str, bytes]:
    """Small files that would take much memory or time, or that say so."""
    gif = bytearray(encoded(picture("P"), "GIF"))
    gif[6:10] = b"\xff\xff\xff\xff"
    bmp = bytearray(encoded(picture(), "BMP"))
    bmp[18:26] = struct.pack("<ii", 2**31 - 1, 2**31 - 1)
    text = _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(100_000_000)))
    profile = _chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(100_000_000)))
    return {
        "PNG of 3.6 billion pixels": png(60_000, 60_000, lines=10),
        "PNG of the largest size": png(2**31 - 1, 2**31 - 1, lines=0),
        "PNG of 90 million pixels": png(9_000, 10_000),
        "PNG with a long text": png(50, 50, before=text),
        "PNG with a large profile": png(50, 50, before=profile),
        "GIF with a large screen": bytes(gif),
        "BMP of the largest size": bytes(bmp),
        "PPM of the largest size": b"P6 99999 99999 255\n",
        "PPM of negative size": b"P6 -5 10 255\n" + bytes(150),
        "PNG of no width": png(0, 5),
        "one line of pixels": png(100_000, 1),
    }


def mutated(files: Sequence[bytes], count: int, seed: int = 0) -> Iterator[bytes]:
    """Yield files in which bytes were changed, taken out, put in, or cut off, or numbers made others."""
    rng = random.Random(seed)
    for number in range(count):
        data = bytearray(files[number % len(files)])
        for _ in range(rng.choice((1, 1, 2, 5, 20))):
            # The beginning holds sizes and tables, where a change does most.
            at = rng.randrange(len(data) if rng.random() < 0.6 else min(len(data), 100))
            way, length = rng.randrange(7), rng.choice((1, 2, 4, 16))
            if way == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif way == 1:
                data[at : at + length] = rng.randbytes(length)
            elif way == 2:
                data[at : at + length] = rng.choice((b"\0", b"\xff", b"\x7f")) * length
            elif way == 3:
                del data[at : at + length]
            elif way == 4:
                data[at:at] = data[at : at + length]
            elif way == 5:
                other = rng.choice(files)
                data[at : at + 16] = other[at : at + 16]
            elif found := _NUMBER.search(data, at):
                data[found.start() : found.end()] = rng.choice(_NUMBERS)
            if len(data) < 2:
                break
        yield bytes(data if rng.random() < 0.8 else data[: rng.randrange(len(data) + 1)])
