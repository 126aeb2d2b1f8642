"""Inputs that are not on this machine, fetched to it before the job begins.

A job reads local files alone, so everything that is promised of those holds for fetched ones: digests, continuing, and
that a change is noticed. A file that was fetched before is fetched again only if it may be another one now.

Files behind URLs, such as `https://` and `s3://`, come through fsspec. Their cache is `nvcli/inputs` in
`$XDG_CACHE_HOME` (`~/.cache`). A file lies there under a digest of its URL and of what its store says of it: size,
ETag, time of change. Where a store says no more than the size, the file is fetched each time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from nvcli.core.system.hub_access import DownloadSize
from nvcli.core.system.terminal_text import without_secrets
from nvcli.core.system.user_cache import user_cache
from nvcli.errors import ConfigError, first_line
from nvcli.job.files import HUB_SCHEME, check_inputs, is_remote

_VERSION_KEYS = (
    "ETag", "etag", "md5Hash", "Content-MD5", "generation", "Last-Modified", "LastModified", "last_modified", "updated",
    "mtime", "modified", "created",
)  # fmt: skip
"""Names of properties by which stores tell versions of a file apart."""
_NOT_FOUND = 404
_READ_SECONDS = 60
"""Timeout of an HTTP server that sends nothing; a whole file may take any time."""


def fetch_inputs(names: Sequence[str]) -> list[str]:
    """Return the inputs with each one that is not on this machine replaced by the files that it comes to.

    Raises ConfigError where one cannot be fetched, or the disk has no room for it.
    """
    local: list[str] = []
    for name in names:
        if not is_remote(name):
            local.append(name)
        elif name.startswith(HUB_SCHEME):
            from nvcli.job.input.hub_dataset import fetch_dataset

            local += fetch_dataset(name)
        else:
            local += fetch_files(name)
    if len(local) != len(names) or any(map(is_remote, names)):
        check_inputs(local)
    return local


@dataclass(frozen=True, slots=True, kw_only=True)
class _RemoteFile:
    """A file of a store, in the version that was found."""

    url: str
    path: str
    num_bytes: int | None
    version: str
    """Properties by which the store tells versions apart; empty: there are none."""

    def place(self, cache: Path) -> Path:
        """Return where the file lies in the cache."""
        digest = sha256(f"{self.url}\n{self.path}\n{self.num_bytes}\n{self.version}".encode()).hexdigest()
        name = PurePosixPath(urlsplit(self.path).path if "://" in self.path else self.path).name
        return cache / digest[:16] / (name or "input.jsonl")

    def is_in(self, cache: Path) -> bool:
        """Tell whether the cache holds the file."""
        place = self.place(cache)
        return bool(self.version) and place.is_file() and place.stat().st_size == self.num_bytes


def fetch_files(url: str, *, cache: Path | None = None) -> list[str]:
    """Fetch the file or the pattern of files behind a URL, and return their names in the cache. Raises ConfigError."""
    cache = cache or user_cache("inputs")
    with _explained(url):
        store, path = _open_store(url)
        is_pattern = any(character in path for character in "*?[") and not url.startswith("http")
        paths = sorted(store.glob(path)) if is_pattern else [path]
        files = [_inspect(store, url, path) for path in paths]
    if not files:
        raise ConfigError(f"the input {without_secrets(url)} matches no file")
    missing = sum(file.num_bytes or 0 for file in files if not file.is_in(cache))
    size = DownloadSize.of(missing, cache)
    size.check_room(f"the input {without_secrets(url)}", ConfigError, variable="XDG_CACHE_HOME")
    with _explained(url):
        for file in files:
            if not file.is_in(cache):
                _fetch(store, file, file.place(cache))
    return [str(file.place(cache)) for file in files]


def _open_store(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    options: dict[str, Any] = {}
    if url.startswith("http"):
        from aiohttp import ClientTimeout

        options["client_kwargs"] = {"timeout": ClientTimeout(total=None, sock_connect=30, sock_read=_READ_SECONDS)}
    store, path = url_to_fs(url, **options)
    return store, str(path)


def _inspect(store: Any, url: str, path: str) -> _RemoteFile:
    store.invalidate_cache()
    info = store.info(path)
    if info.get("type") == "directory":
        raise IsADirectoryError(f"{path} is a folder; name the files in it, such as {url.rstrip('/')}/*.jsonl")
    version = "\n".join(f"{key} {info[key]}" for key in _VERSION_KEYS if info.get(key))
    return _RemoteFile(url=url, path=path, num_bytes=info.get("size"), version=version)


def _fetch(store: Any, file: _RemoteFile, place: Path) -> None:
    from fsspec.callbacks import TqdmCallback

    place.parent.mkdir(parents=True, exist_ok=True)
    part = place.with_name(f".{place.name}.{os.getpid()}.part")
    bar = {"desc": place.name, "unit": "B", "unit_scale": True, "disable": None}  # shown on terminals alone
    try:
        with TqdmCallback(tqdm_kwargs=bar) as callback:
            store.get_file(file.path, str(part), callback=callback)
        num_bytes = part.stat().st_size
        if file.num_bytes not in (None, num_bytes) or _inspect(store, file.url, file.path) != file:
            raise ConfigError(
                f"the input {without_secrets(file.url)}: {place.name} was changed while it was fetched; start again "
                "once it is complete"
            )
        part.replace(place)
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(url: str) -> Iterator[None]:
    """Turn errors of a store into a ConfigError that says what to do."""
    try:
        yield
    except ConfigError:
        raise
    except ImportError as error:
        problem = f"{first_line(error)}; the extra `remote` of nvcli brings what https://, s3:// and gs:// need"
    except FileNotFoundError as error:
        cause = error.__cause__  # of HTTP, whatever it was
        is_missing = cause is None or getattr(cause, "status", None) == _NOT_FOUND
        problem = "there is no such file" if is_missing or cause is None else f"cannot be fetched: {first_line(cause)}"
    except (PermissionError, IsADirectoryError) as error:
        problem = str(error) or "no permission"
    except Exception as error:  # each store has its own exceptions
        problem = f"cannot be fetched: {first_line(error)}"
    else:
        return
    # A store's own words may hold the address, and are not kept as the cause for the same reason.
    raise ConfigError(without_secrets(f"the input {url}: {problem}")) from None
