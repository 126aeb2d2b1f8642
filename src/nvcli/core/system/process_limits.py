"""Checks the limits on open files and address space, the working folder, and /proc, that this process started with."""

from __future__ import annotations

import os
import resource

from nvcli.core.byte_sizes import format_bytes
from nvcli.errors import ConfigError, WorkerError, reworded

MIN_OPEN_FILES = 256
"""A run with one rank on a CPU has about 20 files open at once. Further ranks, copies and GPU drivers add some."""
_WANTED_OPEN_FILES = 4096
_MAX_PATH_BYTES = 4096
"""PATH_MAX of Linux: a shell can be in a deeper folder, but libraries cannot open files from there."""


def check_process() -> None:
    """Raise ConfigError if this process cannot open enough files, its working folder is gone or too deep, or there is
    no /proc.

    Raises the limit if the process may do so itself, for its children too.
    """
    if not os.path.exists("/proc/self"):
        raise ConfigError("/proc is not mounted, and a run needs it; mount it with: mount -t proc proc /proc")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED_OPEN_FILES if hard == resource.RLIM_INFINITY else min(_WANTED_OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
    if soft != resource.RLIM_INFINITY and soft < MIN_OPEN_FILES:
        raise ConfigError(
            f"this shell lets a program open {soft} files (`ulimit -n`), but a run needs at least {MIN_OPEN_FILES}; "
            f"raise it, for example with: ulimit -n {_WANTED_OPEN_FILES}"
        )
    try:
        folder = os.getcwd()
    except OSError as error:
        raise ConfigError(
            f"the current folder cannot be used ({error.strerror}): it was removed or moved; `cd` to another one"
        ) from None
    if len(os.fsencode(folder)) >= _MAX_PATH_BYTES:
        raise ConfigError(
            f"the path of the current folder has {len(os.fsencode(folder)):,} bytes, but Linux allows fewer "
            f"than {_MAX_PATH_BYTES:,}; `cd` to another folder, and name the files from there"
        )


def with_address_space(error: WorkerError) -> WorkerError:
    """Return the error of a process that failed, which also names the limit on address space if there is one: what it
    makes fail has many names, such as libraries that cannot be mapped and threads that cannot be started."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return error
    return reworded(
        error,
        f"{error}; this shell lets a program use {format_bytes(limit)} of address space (`ulimit -v`, RLIMIT_AS), "
        "which may be the cause: a rank reserves far more than it uses; lift it with: ulimit -v unlimited",
    )
