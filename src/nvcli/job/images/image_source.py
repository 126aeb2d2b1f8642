"""ImageFolders: where the images of rows may be, and the bytes or the file that a row names.

Rows are untrusted and may name only files below the folders of the job's inputs and `job.media_roots`, whatever links
and `..` a path has. `job.images.image_fetch` fetches from the network.
"""

from __future__ import annotations

import base64
import binascii
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from nvcli.core.system.regular_file import check_regular
from nvcli.job.images.image_fetch import ImageFetcher, MediaDomains, invalid_image

MAX_FILE_BYTES = 64 << 20
"""The largest file of an image."""
_URL = re.compile(r"([a-z][a-z0-9+.-]*):(?=//|\S)", re.IGNORECASE)
_DATA = re.compile(r"data:[^,]*;base64,", re.IGNORECASE)
_LONGEST_PATH = 4095
"""PATH_MAX of Linux, without the NUL at the end."""


@dataclass(frozen=True, slots=True)
class ImageFolders:
    """The folders below which images may be."""

    folders: tuple[Path, ...]
    """Relative paths begin at the first of them in which the file is."""
    fetcher: ImageFetcher
    """Fetches images that rows name by URL."""

    @classmethod
    def of(cls, inputs: Sequence[str], roots: Sequence[str], domains: Sequence[str] = ()) -> ImageFolders:
        """Return the folders of a job with these input files; `-` is standard input, which the working folder stands
        for. `domains` are those of `job.media_domains`. Raises ConfigError for one that is none."""
        folders = [Path(name).parent if name != "-" else Path() for name in inputs] or [Path()]
        resolved = (Path(os.path.realpath(folder)) for folder in [*folders, *map(Path, map(os.path.expanduser, roots))])
        return cls(tuple(dict.fromkeys(resolved)), ImageFetcher(MediaDomains.of(domains), max_bytes=MAX_FILE_BYTES))

    def find(self, source: str) -> Path | bytes:
        """Return the file that a row names as a path or as a `file:` URL, or the bytes in a `data:` URL or behind one
        of the web. Raises RowError."""
        if source[:5].lower() == "data:":
            return _decoded(source)
        scheme = _URL.match(source)
        if scheme is not None and scheme[1].lower() == "file":
            source = unquote(source[len("file:") :].removeprefix("//").removeprefix("localhost"))
        elif scheme is not None and len(scheme[1]) > 1:
            return self.fetcher.fetch(source)
        return self._file(source)

    def _file(self, name: str) -> Path:
        """Return the file of a name, which is in or below one of the folders."""
        if len(name) > _LONGEST_PATH:
            raise invalid_image(name, "it is too long for a path; before base64 stands data:image/png;base64,")
        is_outside = False
        for folder in self.folders:
            try:
                path = Path(os.path.realpath(folder / name))
                if not any(path.is_relative_to(root) for root in self.folders):
                    is_outside = True
                    continue
                check_regular(path)
                if (size := path.stat().st_size) > MAX_FILE_BYTES:
                    raise invalid_image(name, f"it has {size:,} bytes; allowed: {MAX_FILE_BYTES:,}")
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:  # a name with a NUL
                raise invalid_image(name, f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
            return path
        if is_outside:
            raise invalid_image(
                name,
                "it is not below the folder of the input; move it there, or name a folder in `job.media_roots`",
            )
        raise invalid_image(name, f"no such file in {', '.join(map(str, self.folders))}")


def _decoded(url: str) -> bytes:
    head = _DATA.match(url)
    if head is None:
        raise invalid_image(url, "allowed in a `data:` URL: base64, such as data:image/png;base64,…")
    if (len(url) - head.end()) * 3 // 4 > MAX_FILE_BYTES:
        raise invalid_image(url, f"it has more than {MAX_FILE_BYTES:,} bytes")
    try:
        return base64.b64decode("".join(unquote(url[head.end() :]).split()), validate=True)  # it may have line ends
    except (binascii.Error, ValueError) as error:
        raise invalid_image(url, f"it is no base64: {error}") from None
