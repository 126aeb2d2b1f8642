"""The folder in which nvcli keeps what it can make or fetch again."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache(kind: str) -> Path:
    """Return the folder for one kind of such files, which may not exist yet: `$XDG_CACHE_HOME/nvcli/kind`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "nvcli", kind)
