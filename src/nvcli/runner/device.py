"""The device that a rank works on, and slow parts of a rank's start, which run on threads beside other parts.

This module imports torch only where a device is opened: the GPU's context is made while torch is imported.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pkgutil
import threading
from importlib.util import find_spec
from typing import TYPE_CHECKING

from nvcli.config import EngineConfig
from nvcli.errors import ConfigError

if TYPE_CHECKING:
    import torch


def open_device(config: EngineConfig, rank: int) -> torch.device:
    """Open a GPU of the rank's own, or give it its share of the CPU's cores. Raises ConfigError if there is no such
    GPU."""
    import torch

    if config.device == "cuda":
        return _open_gpu(config.gpu_index(rank))
    if "OMP_NUM_THREADS" not in os.environ:
        num_cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, num_cores // config.num_ranks))
    return torch.device("cpu")


def _open_gpu(index: int) -> torch.device:
    import torch

    if not torch.cuda.is_available():
        build = "was built without CUDA" if torch.version.cuda is None else f"(CUDA {torch.version.cuda}) finds no GPU"
        raise ConfigError(
            f"`device` is cuda, but torch {torch.__version__} {build}: check `nvidia-smi` and that the driver is new "
            "enough for this torch, or use `device: cpu`"
        )
    count = torch.cuda.device_count()
    if index >= count:
        raise ConfigError(
            f"the run needs GPU number {index}, and {count} can be seen here: lower tensor_parallel_size (--tp) or "
            "data_parallel_size (--dp), or look at CUDA_VISIBLE_DEVICES"
        )
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def open_gpu_context(index: int) -> None:
    """Make the primary context of GPU number `index`, which torch will use, on a thread, while torch is imported.

    If the driver is missing or refuses, nothing happens here: torch meets the same error and reports it.
    """

    def open_context() -> None:
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError:
            return
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(device), index) == 0:
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)

    threading.Thread(target=open_context, name="open-gpu-context", daemon=True).start()


def import_kernels() -> None:
    """Import Triton and the modules that declare kernels, on a thread, while weights are read."""

    def import_all() -> None:
        package = importlib.import_module("nvcli.kernels.triton")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)

    if find_spec("triton") is not None:
        threading.Thread(target=import_all, name="import-kernels", daemon=True).start()
