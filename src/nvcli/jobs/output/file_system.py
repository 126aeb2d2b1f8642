"""Tells whether other hosts may have a file open too."""

from __future__ import annotations

import re
from pathlib import Path

_LOCAL_TYPES = frozenset((
    "bcachefs", "btrfs", "exfat", "ext2", "ext3", "ext4", "f2fs", "jfs", "ntfs3", "overlay", "ramfs", "reiserfs",
    "tmpfs", "vfat", "xfs", "zfs",
))  # fmt: skip
"""Types of file systems that one kernel alone has mounted; any other type may be a network file system."""


def is_on_local_disk(path: Path, mounts: Path = Path("/proc/self/mountinfo")) -> bool:
    """Tell whether a file is on a file system that only this host uses. Where nobody knows, it is not.

    `mounts` has the form of proc_pid_mountinfo(5): the mount point is the fifth field, the type follows a dash.
    """
    folder = path.resolve().parent
    found, kind = "", ""
    try:
        lines = mounts.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return False
    for line in lines:
        before, _, after = line.partition(" - ")
        mount = re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
        if folder.is_relative_to(mount) and len(mount) >= len(found):  # a later mount hides an earlier one
            found, kind = mount, after.split()[0]
    return kind in _LOCAL_TYPES
