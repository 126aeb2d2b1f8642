"""Inputs that are not on this machine, fetched to it before the job begins.

A job reads local files alone, so everything that is promised of those holds for fetched ones: digests, continuing, and
that a change is noticed. A file that was fetched before is fetched again only if it may be another one now.

Files behind URLs, such as `https://` and `s3://`, come through fsspec. Their cache is `nvcli/inputs` in
`$XDG_CACHE_HOME` (`~/.cache`). A file lies there under a digest of its URL and of what its store says of it: size,
ETag, time of change. Where a store says no more than the size, the file is fetched each time.

Datasets on the Hugging Face hub are fetched into the hub's own cache:

    hf://OWNER/NAME[@REVISION][/CONFIG][:SPLIT]          a split of a dataset
    hf://datasets/OWNER/NAME[@REVISION]/PATH             a file of its repository, or a pattern of files

A split is taken from the Parquet files that the hub makes of each dataset (its branch `refs/convert/parquet`), and
where there are none from the repository's own files, whose names say the split. The commit is looked up once: all files
are of that commit, and their folder in the cache has its name.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from nvcli.core.system.hub_access import HUB_TIMEOUT, DownloadSize, hub_problem, missing_size, no_progress
from nvcli.core.system.terminal_text import without_secrets
from nvcli.core.system.user_cache import user_cache
from nvcli.core.validation import list_some
from nvcli.errors import ConfigError, first_line
from nvcli.job.file_formats import data_format, plain_name
from nvcli.job.files import HUB_SCHEME, check_inputs, is_remote

_VERSION_KEYS = (
    "ETag", "etag", "md5Hash", "Content-MD5", "generation", "Last-Modified", "LastModified", "last_modified", "updated",
    "mtime", "modified", "created",
)  # fmt: skip
"""Names of properties by which stores tell versions of a file apart."""
_NOT_FOUND = 404
_READ_SECONDS = 60
"""Timeout of an HTTP server that sends nothing; a whole file may take any time."""

_ID = r"hf://{}(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[^/:]+))?"
_FILE = re.compile(_ID.format("datasets/") + r"/(?P<path>.+)")
_SPLIT = re.compile(_ID.format("(?!datasets/)") + r"(/(?P<config>[^:]+))?(:(?P<split>[\w.-]+))?")
_PARQUET_BRANCH = "refs/convert/parquet"
_SHARD = re.compile(r"(?P<split>.+?)-\d+-of-\d+(-[0-9a-f]+)?")
_DEFAULT = "default"
"""The name of the only configuration of most datasets."""
_PREFERRED = ("parquet", "arrow", "jsonl", "csv", "json", "text", "pdf")
"""Formats in order of preference, for a split that comes in several."""


def fetch_inputs(names: Sequence[str]) -> list[str]:
    """Return the inputs with each one that is not on this machine replaced by the files that it comes to.

    Raises ConfigError where one cannot be fetched, or the disk has no room for it.
    """
    local: list[str] = []
    for name in names:
        if not is_remote(name):
            local.append(name)
        elif name.startswith(HUB_SCHEME):
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


def fetch_dataset(address: str) -> list[str]:
    """Fetch what an address of the forms above names, and return its files in the order of their rows.

    Raises ConfigError where the hub does not give it or the disk has no room for it.
    """
    if (match := _FILE.fullmatch(address)) is not None:
        commit, files = _list_files(match["id"], _revision(match) or "main", address)
        path = match["path"]
        chosen = [file for file in files if file == path] or sorted(fnmatch.filter(files, path))
        if not chosen:
            raise ConfigError(f"the input {address}: the repository has no such file; it has {list_some(files, 12)}")
        return _download(match["id"], commit, chosen, address)
    match = _SPLIT.fullmatch(address)
    if match is None:
        raise ConfigError(
            f"the input {address} is not the address of a dataset; write hf://OWNER/NAME:SPLIT, "
            "hf://OWNER/NAME/CONFIG:SPLIT or hf://datasets/OWNER/NAME/FILE"
        )
    revision = _revision(match)
    found = _list_files(match["id"], _PARQUET_BRANCH, address, may_lack=True) if revision is None else None
    commit, files = found or _list_files(match["id"], revision or "main", address)
    return _download(match["id"], commit, _choose_split(files, match["config"], match["split"], address), address)


def _revision(match: re.Match[str]) -> str | None:
    return unquote(match["revision"]) if match["revision"] else None


def _list_files(name: str, revision: str, address: str, *, may_lack: bool = False) -> Any:
    """Return the commit of a revision and the names of its files; None for a revision that is not there, if it may."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    with _hub_errors(name, address):
        try:
            info = HfApi().dataset_info(name, revision=revision, timeout=HUB_TIMEOUT)
        except RevisionNotFoundError:
            if may_lack:
                return None
            raise ConfigError(
                f"the input {address}: the dataset has no revision {revision}; name a branch, a tag or a commit"
            ) from None
    return info.sha, sorted(file.rfilename for file in info.siblings or [])


def _choose_split(files: Sequence[str], config: str | None, split: str | None, address: str) -> list[str]:
    """Return the files of a split. Raises ConfigError where it is not there, or it is not clear which one is meant."""
    splits = _splits(files)
    configs = list(dict.fromkeys(config for config, _ in splits))
    if not splits:
        raise ConfigError(
            f"the input {address}: the dataset has no files that nvcli reads; it has {list_some(files, 12)}"
        )
    config = config or (_DEFAULT if _DEFAULT in configs else configs[0] if len(configs) == 1 else None)
    if config not in configs:
        raise ConfigError(
            f"the input {address}: name one of the dataset's configurations ({list_some(configs, 12)}): "
            "hf://OWNER/NAME/CONFIG:SPLIT"
        )
    names = [name for of_config, name in splits if of_config == config]
    split = split or (names[0] if len(names) == 1 else None)
    if split not in names:
        part = f"partial-{split}"
        hint = (
            f". The hub has made Parquet of its first part alone: take {part}, or name files" if part in names else ""
        )
        raise ConfigError(f"the input {address}: name one of its splits ({list_some(names, 12)}) after a colon{hint}")
    of_split = splits[config, split]
    best = min((data_format(file) or "" for file in of_split), key=_PREFERRED.index)
    return [file for file in of_split if data_format(file) == best]


def _splits(files: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """Return the data files of each configuration and split, by their names.

    In `CONFIG/SPLIT/0000.parquet` folders say them; in `train-00000-of-00002.parquet` and `CONFIG/test.jsonl` the
    file's name says the split.
    """
    splits: dict[tuple[str, str], list[str]] = {}
    for file in files:
        if data_format(file) is None or file.startswith("."):
            continue
        path = PurePosixPath(plain_name(file))
        folders, split = list(path.parts[:-1]), path.stem
        if split.isdigit() and folders:
            split = folders.pop()
        elif (shard := _SHARD.fullmatch(split)) is not None:
            split = shard["split"]
        config = "/".join(folders)
        splits.setdefault((_DEFAULT if config in ("", "data") else config, split), []).append(file)
    return splits


def _download(name: str, commit: str, files: Sequence[str], address: str) -> list[str]:
    """Download files of a commit, and return them in the cache. Raises ConfigError."""
    from huggingface_hub import snapshot_download

    wanted = {"repo_type": "dataset", "revision": commit, "allow_patterns": [glob.escape(file) for file in files]}
    with _hub_errors(name, address):
        found = snapshot_download(name, dry_run=True, tqdm_class=no_progress(), **wanted)
        missing_size(found).check_room(f"the input {address}", ConfigError)
        folder = Path(snapshot_download(name, **wanted))
    return [str(folder / file) for file in files]


@contextlib.contextmanager
def _hub_errors(name: str, address: str) -> Iterator[None]:
    """Turn errors of the hub into a ConfigError that says what to do."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # the hub's HTTP library differs by version, and with it its exceptions
        raise ConfigError(f"the input {address}: {hub_problem(error, name, 'dataset')}") from None
