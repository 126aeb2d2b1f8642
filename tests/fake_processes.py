"""Processes as they fare on a machine that has no room for more of them. Named by import path."""

from __future__ import annotations

import errno
import os
from multiprocessing.connection import Connection
from typing import Any

from nvcli.engine.protocol import EngineStart
from nvcli.worker.executor import ranks
from nvcli.worker.executor.child_process import ChildProcess


def engine_without_processes(start: EngineStart, control: Connection) -> None:
    """An engine's process that cannot start more others than NVCLI_TEST_PROCESSES."""
    from nvcli.engine.engine_process import main

    left = int(os.environ["NVCLI_TEST_PROCESSES"])

    class Child(ChildProcess):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            super().__init__(*args, **kwargs)

    ranks.ChildProcess = Child  # type: ignore[misc]
    main(start, control)
