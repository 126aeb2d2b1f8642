"""Locating an adapter's folder from the name that a user gives. Torch-free."""

from __future__ import annotations

import os
import re
from pathlib import Path

from nvcli.errors import LoadError
from nvcli.models.adapters.adapter_config import ADAPTER_FOLDER, read_adapter_config
from nvcli.models.hub import adapter_files, cached_adapter, download_adapter
from nvcli.models.other_checkpoints import ADAPTER_CONFIG

_HUB_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?(?:@.+)?")


def find_adapter(name: str) -> Path:
    """Return the folder of the adapter `name`: a local one, or that of a Hugging Face id, which may end in `@REVISION`
    and is downloaded if it is not in the local cache.

    Raises LoadError if there is none or, before its weights are fetched, if it needs something that is not supported.
    """
    found = find_local_adapter(name)
    if found is not None:
        return found
    hub_id, revision = _split(name)
    read_adapter_config(adapter_files(hub_id, revision))
    return download_adapter(hub_id, revision)


def find_local_adapter(name: str) -> Path | None:
    """Return the folder of the adapter `name` on this machine; None if `find_adapter` would try a download. Raises the
    same errors."""
    path = Path(os.path.expanduser(name))
    try:
        is_folder, is_there = path.is_dir(), path.exists()
    except OSError as error:  # too long a name, a folder that must not be entered
        raise LoadError(f"adapter {name}: {error.strerror}") from None
    if is_folder:
        if not os.path.lexists(path / ADAPTER_CONFIG):
            raise LoadError(f"adapter {name}: the folder has no {ADAPTER_CONFIG}; {ADAPTER_FOLDER}")
        return path
    if is_there:
        raise LoadError(f"adapter {name}: a file; {ADAPTER_FOLDER}")
    if not _HUB_ID.fullmatch(name) or name.startswith((".", "~", os.sep)):
        name_rule = "; a NAME in front of = has letters, digits and . : - _ alone" if "=" in name else ""
        raise LoadError(f"adapter {name}: no such folder; {ADAPTER_FOLDER}{name_rule}")
    return cached_adapter(*_split(name))


def _split(name: str) -> tuple[str, str | None]:
    """Return the id and the revision; None: the main branch."""
    hub_id, _, revision = name.partition("@")
    return hub_id, revision or None
