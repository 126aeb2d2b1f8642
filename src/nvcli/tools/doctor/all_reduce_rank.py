"""Probe: one rank of an all-reduce of known values. Run as `nvcli.tools.doctor.all_reduce_rank:main`.

It joins the group as a rank of a run does, so what works here works in a run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import msgspec

from nvcli.worker.distributed.rendezvous import store_path

SMALL_BYTES = 8 << 10
"""Bytes that a decode step of about one row reduces."""
LARGE_BYTES = {"cpu": 4 << 20, "cuda": 64 << 20}
"""Bytes that a step of a long prompt reduces, by kind of device."""
_PATTERN = 251
_REPEATS = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceTask:
    """The argument of a rank."""

    rank: int
    size: int
    device: str
    gpu_index: int
    store_fd: int
    """The store over which the ranks meet (`distributed.rendezvous`)."""
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Phase:
    """The phase that the rank is about to enter."""

    name: str


class AllReduceResult(msgspec.Struct, frozen=True, kw_only=True):
    """The findings of one rank."""

    wrong: str
    """A message about wrong sums; empty: all are right."""
    small_seconds: float
    large_seconds: float


def main(task: AllReduceTask, control: Connection) -> None:
    control.send(Phase("importing torch"))
    import torch

    from nvcli.worker.distributed.process_group import join_process_group

    device = torch.device("cpu")
    if task.device == "cuda":
        device = torch.device("cuda", task.gpu_index)
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    control.send(Phase("joining the group"))
    world = join_process_group(
        task.rank, store_path(task.store_fd), device, size=task.size, timeout_seconds=task.timeout_seconds
    )
    group = world.group
    control.send(Phase("the all-reduce"))
    wrong, seconds = "", {}
    for num_bytes in (SMALL_BYTES, LARGE_BYTES[task.device]):
        # Sums stay below 2²⁴, where float32 is exact.
        pattern = torch.arange(num_bytes // 4, device=device).remainder_(_PATTERN).float()
        total = group.sum(pattern * (task.rank + 1))
        num_wrong = int((total != pattern * (task.size * (task.size + 1) // 2)).sum())
        if num_wrong and not wrong:
            wrong = f"{num_wrong:,} of {len(total):,} sums are wrong"
        values = torch.zeros_like(pattern)
        seconds[num_bytes] = _time(lambda values=values: group.sum(values), device)  # type: ignore[misc]
    small, large = seconds.values()
    control.send(AllReduceResult(wrong=wrong, small_seconds=small, large_seconds=large))
    control.recv()  # stay until all are done: a rank that leaves early closes the others' connections


def _time(run: Callable[[], object], device: object) -> float:
    """Return the median seconds of several runs, each waited for."""
    import torch

    def wait() -> None:
        if device != torch.device("cpu"):
            torch.cuda.synchronize()

    times = []
    for _ in range(_REPEATS):
        wait()
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
