"""Runs a function on each rank of a group in processes of their own, and brings the results home: gloo on the CPU, NCCL
with a GPU for each rank ("cuda"), or gloo and one GPU, which takes turns between the ranks ("cuda:0")."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from warm_process import warm_context

JOIN_SECONDS = 120.0


def run_ranks(
    size: int,
    function: Callable[..., Any],
    folder: Path,
    *args: Any,
    device: str = "cpu",
    seconds: float = JOIN_SECONDS,
) -> list[Any]:
    """`function(group, *args)` on `size` ranks; their results in rank order. No process outlives the call."""
    context = warm_context() if device == "cpu" else multiprocessing.get_context("spawn")
    files = [folder / f"result-{rank}.pt" for rank in range(size)]
    processes = [
        context.Process(target=_main, args=(rank, size, device, folder / "store", files[rank], function, args))
        for rank in range(size)
    ]
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + seconds
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):  # the others wait for one that has failed
                deadline = min(deadline, time.monotonic() + 5.0)
            time.sleep(0.05)
        assert [process.exitcode for process in processes] == [0] * size
        return [torch.load(file, weights_only=False) for file in files]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()


def _main(
    rank: int,
    size: int,
    device_type: str,
    store_path: Path,
    result: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    warnings.simplefilter("error", FutureWarning)  # a user would see it
    torch.set_num_threads(1)
    store = dist.FileStore(str(store_path), size)
    device = torch.device(device_type)
    if device_type == "cuda":
        # As the executor sets them for its ranks.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=store, rank=rank, world_size=size, device_id=device)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    group = TensorParallelGroup(dist.group.WORLD, device)
    torch.save(function(group, *args), result)
    if device.type == "cuda":
        torch.cuda.synchronize()
        dist.barrier()  # nobody's memory goes while another may read it
    dist.destroy_process_group()
    # As nvcli's ranks end. A group that something still refers to has threads of gloo's, and the tear-down of the
    # interpreter aborts the process when one of them is at work ("terminate called without an active exception").
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
