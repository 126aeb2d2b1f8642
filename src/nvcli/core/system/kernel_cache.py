"""Triton's folder of compiled kernels: where it is, and errors when it is not writable."""

from __future__ import annotations

import os
from pathlib import Path

from nvcli.errors import ConfigError

ADVICE = "set TRITON_CACHE_DIR to a writable folder"


def kernel_cache_folder() -> Path:
    """Return the folder, by Triton's own rules."""
    named = os.environ.get("TRITON_CACHE_DIR")
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~/")
    return Path(named) if named else Path(home) / ".triton" / "cache"


def kernel_cache_error(error: BaseException) -> ConfigError | None:
    """Describe an error of saving a kernel, such as on a read-only disk; None for other errors."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and isinstance(cause.filename, str) and _is_below(cause.filename):
            return ConfigError(
                f"compiled kernels cannot be saved in {kernel_cache_folder()}: {cause.strerror}: {cause.filename}; "
                f"{ADVICE}"
            )
        cause = cause.__cause__ or cause.__context__
    return None


def _is_below(name: str) -> bool:
    return Path(os.path.abspath(name)).is_relative_to(os.path.abspath(kernel_cache_folder()))
