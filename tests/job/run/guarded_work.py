"""The other side of a GuardedProcess in tests: it does what it is asked to."""

from __future__ import annotations

import os
import time
from multiprocessing.connection import Connection


def main(problem: str, control: Connection) -> None:
    """Say `problem` at the start, then answer, wait or die."""
    control.send_bytes(problem.encode())
    while True:
        question = control.recv()
        if question == "wait":
            time.sleep(60)
        elif question == "die":
            os._exit(3)
        control.send_bytes(f"{question} {os.getpid()}".encode())
