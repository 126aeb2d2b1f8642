"""The store over which the ranks of a replica meet: a file in memory that has no name. Torch-free.

The process that starts the ranks creates it and passes its descriptor to them, so that only these processes can open
it. No port is opened, and nothing is left when the last of them ends.
"""

from __future__ import annotations

import os


def create_store() -> int:
    """Create an empty store; return the descriptor to pass to the ranks."""
    return os.memfd_create("nvcli-store")


def store_path(fd: int) -> str:
    """Return the path under which a process that inherited the descriptor opens the store."""
    return f"/proc/self/fd/{fd}"
