"""Datasets on the Hugging Face hub, fetched into the hub's own cache on this machine.

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
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from nvcli.core.system.hub_access import HUB_TIMEOUT, hub_problem, missing_size, no_progress
from nvcli.core.validation import list_some
from nvcli.errors import ConfigError
from nvcli.job.file_formats import data_format, plain_name

_ID = r"hf://{}(?P<id>[\w.-]+/[\w.-]+)(@(?P<revision>[^/:]+))?"
_FILE = re.compile(_ID.format("datasets/") + r"/(?P<path>.+)")
_SPLIT = re.compile(_ID.format("(?!datasets/)") + r"(/(?P<config>[^:]+))?(:(?P<split>[\w.-]+))?")
_PARQUET_BRANCH = "refs/convert/parquet"
_SHARD = re.compile(r"(?P<split>.+?)-\d+-of-\d+(-[0-9a-f]+)?")
_DEFAULT = "default"
"""The name of the only configuration of most datasets."""
_PREFERRED = ("parquet", "arrow", "jsonl", "csv", "json", "text", "pdf")
"""Formats in order of preference, for a split that comes in several."""


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
