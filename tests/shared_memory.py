"""What lies in /dev/shm, for tests that want nothing left there. Other tests may run at the same time."""

from __future__ import annotations

import os
import time


def shared_memory() -> frozenset[str]:
    """Return the names of all that lies in /dev/shm, but for folders that `scripts/test` makes for tests."""
    return frozenset(name for name in os.listdir("/dev/shm") if not name.startswith("nvcli-tests."))


def left_in_shared_memory(before: frozenset[str]) -> frozenset[str]:
    """Return what came to /dev/shm since `before` and stays there.

    Other processes keep names there for a moment (multiprocessing's semaphores, Ray's objects): a new one has two
    seconds to go.
    """
    deadline = time.monotonic() + 2
    while (left := shared_memory() - before) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left
