"""Runs a function of each rank of a gloo group in processes of its own, and brings rank 0's result home."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nvcli.models.group import TensorParallelGroup

JOIN_SECONDS = 120.0


def run_ranks(size: int, function: Callable[..., Any], folder: Path, *args: Any) -> list[Any]:
    """`function(group, *args)` on `size` ranks; their results in rank order. No process outlives the call."""
    context = multiprocessing.get_context("spawn")
    files = [folder / f"result-{rank}.pt" for rank in range(size)]
    processes = [
        context.Process(target=_main, args=(rank, size, folder / "store", files[rank], function, args))
        for rank in range(size)
    ]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(JOIN_SECONDS)
        assert [process.exitcode for process in processes] == [0] * size
        return [torch.load(file, weights_only=False) for file in files]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _main(rank: int, size: int, store: Path, result: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(store), size), rank=rank, world_size=size)
    group = TensorParallelGroup(dist.group.WORLD, torch.device("cpu"))
    torch.save(function(group, *args), result)
    dist.destroy_process_group()
