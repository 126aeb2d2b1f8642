"""The store over which the ranks of a replica meet: a file in memory that has no name. Torch-free.

Whoever starts the ranks creates it and hands its descriptor down, so that only these processes can open it. Nothing
listens on a port, and nothing is left when the last of them ends.
"""

from __future__ import annotations

import os


def create_store() -> int:
    """Create an empty store; return the descriptor to pass to the ranks."""
    return os.memfd_create("nvcli-store")


def store_path(fd: int) -> str:
    """Return the path under which a process that inherited the descriptor opens the store."""
    return f"/proc/self/fd/{fd}"
