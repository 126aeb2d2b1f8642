"""How ranks meet, and how long they wait for each other."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fake_runners import engine_config
from nvcli.worker.distributed.process_group import World, divide_ranks
from nvcli.worker.distributed.rendezvous import create_store, store_path
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup


def test_engine_is_the_first_to_give_up_on_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that waits for one that is stuck would fail with words of its library's."""
    timeouts: list[timedelta] = []
    monkeypatch.setattr(dist, "new_group", lambda ranks, timeout: timeouts.append(timeout))
    config = engine_config(pipeline_parallel_size=2, tensor_parallel_size=2, step_timeout=20.0)
    divide_ranks(config, TensorParallelGroup.single(), 0)
    assert len(timeouts) == 4, "two stages and two links"
    assert min(timeouts) > timedelta(seconds=20)


def test_ranks_meet_however_late_one_comes() -> None:
    """Later than the store would wait for anything else."""
    path = store_path(create_store())
    others_are_there = threading.Barrier(3, timeout=30)

    def come(rank: int) -> float:
        group = TensorParallelGroup(None, torch.device("cpu"))
        group.rank, group.size = rank, 3
        store = dist.FileStore(path, 3)
        store.set_timeout(timedelta(seconds=0.1))
        came_at = time.monotonic()
        others_are_there.wait()
        time.sleep(0.5 * (rank == 2))
        World(group, store).meet("here")
        return time.monotonic() - came_at

    with ThreadPoolExecutor(3) as ranks:
        assert min(ranks.map(come, range(3))) >= 0.5
