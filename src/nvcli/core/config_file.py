"""Finds the configuration file of a command: the named one, or `nvcli.yaml` in the current folder.

A file that is found rather than named decides which model is loaded and what it is asked, and the folder may be one
that others can write to. It is read only if nobody but the user (and root) could have written it.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from nvcli.errors import ConfigError

DEFAULT_CONFIG_FILE = "nvcli.yaml"
NO_FILE = "none"
"""Given in place of a file name: no file is read, not even `nvcli.yaml`."""


def find_config_file(named: Path | None) -> Path | None:
    """Return the file to read, or None. Raises ConfigError for a found file that others could have written.

    `named` is the file that was named, or `none`.
    """
    if named is not None:
        return None if str(named) == NO_FILE else named
    found = Path(DEFAULT_CONFIG_FILE)
    if not found.is_file():
        return None
    if reason := _why_not_trusted(found):
        raise ConfigError(
            f"{found} in this folder {reason}, so it is not read unless it is named: use it with -c ./{found}, or "
            f"leave it out with -c {NO_FILE}"
        )
    return found


def _why_not_trusted(path: Path) -> str:
    """Return who else could have written a file, as the end of a sentence; empty if nobody could."""
    file = path.stat()
    for owner in (file.st_uid, path.lstat().st_uid):  # a link may belong to someone else
        if owner not in _own_ids():
            return f"belongs to another user ({_user_name(owner)})"
    if file.st_mode & stat.S_IWOTH:
        return f"can be written by all users (mode {stat.S_IMODE(file.st_mode):04o})"
    if file.st_mode & stat.S_IWGRP and not _is_private_group(file.st_gid, file.st_uid):
        return f"can be written by its group (mode {stat.S_IMODE(file.st_mode):04o})"
    return ""


def _own_ids() -> set[int]:
    """Return the ids of trusted users: oneself, root, and the user who called sudo."""
    ids = {0, os.geteuid()}
    caller = os.environ.get("SUDO_UID", "")
    if os.geteuid() == 0 and caller.isdecimal():
        ids.add(int(caller))
    return ids


def _is_private_group(group: int, user: int) -> bool:
    """Tell whether a group is a user's private one: many systems give each user one, and a umask of 002."""
    try:
        account, found = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    return account.pw_gid == group and found.gr_name == account.pw_name and set(found.gr_mem) <= {account.pw_name}


def _user_name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
