"""Takes the memory that a rank would need next, so that it runs out of it in earnest: `scripts/fault_loop.py`.

On a GPU another process takes what is free. On a CPU the kernel is told to give the rank's process no more.

    python scripts/fault_memory.py 1        # the process that takes GPU 1's memory; driven by its standard input
"""

from __future__ import annotations

import re
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SLACK = 16 << 20
"""Bytes that are left: enough for what is small, and for no step of thousands of tokens."""


@contextmanager
def exhaust_memory(device: str, gpu: int) -> Iterator[Callable[[int], None]]:
    """A function that takes the memory of a rank, given its process id; what it took is given back in the end.

    `gpu`: the rank's, by the numbers that a process sees; slow to make ready, so that taking it is quick.
    """
    if device == "cpu":
        yield _limit
        return
    command = [sys.executable, __file__, str(gpu)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as taker:
        assert taker.stdin is not None
        assert taker.stdout is not None

        def take(pid: int) -> None:
            assert taker.stdin is not None
            assert taker.stdout is not None
            taker.stdin.write(b"take\n")
            taker.stdin.flush()
            assert taker.stdout.readline() == b"taken\n"

        try:
            assert taker.stdout.readline() == b"ready\n"
            yield take
        finally:
            taker.kill()


def _limit(pid: int) -> None:
    used = re.search(r"VmData:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert used is not None
    limit = int(used[1]) * 1024 + SLACK
    resource.prlimit(pid, resource.RLIMIT_DATA, (limit, limit))


def _take_gpu_memory(gpu: int) -> None:
    """Once a line comes; kept until this process ends."""
    import torch

    device = torch.device("cuda", gpu)
    torch.zeros(1, device=device)
    print("ready", flush=True)
    sys.stdin.readline()
    taken = []
    size = 1 << 40
    while size >= 2 << 20:
        size = min(size, torch.cuda.mem_get_info(device)[0] - SLACK)
        try:
            taken.append(torch.empty(max(size, 0), dtype=torch.uint8, device=device))
        except torch.OutOfMemoryError:
            size //= 2
    print("taken", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    _take_gpu_memory(int(sys.argv[1]))
