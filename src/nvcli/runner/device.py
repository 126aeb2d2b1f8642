"""The device that a rank works on, and its kernels, which are imported while weights are read."""

from __future__ import annotations

import importlib
import os
import pkgutil
import threading
from importlib.util import find_spec

import torch

from nvcli.config import EngineConfig
from nvcli.errors import ConfigError
from nvcli.kernels.weight_formats import FP8_CAPABILITY


def open_device(config: EngineConfig, rank: int) -> torch.device:
    """Open a GPU of the rank's own, or give it its share of the CPU's cores. Raises ConfigError if there is no such
    GPU, or none that can do what the configuration asks for."""
    if config.device == "cuda":
        device = _open_gpu(config.gpu_index(rank))
        if config.quantization == "fp8":
            check_fp8_units(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
        return device
    if "OMP_NUM_THREADS" not in os.environ:
        num_cores = len(os.sched_getaffinity(0))
        torch.set_num_threads(max(1, num_cores // config.num_ranks))
    return torch.device("cpu")


def _open_gpu(index: int) -> torch.device:
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


def check_fp8_units(name: str, capability: tuple[int, int]) -> None:
    """Raise ConfigError for a GPU that cannot multiply in FP8, by its name and compute capability."""
    if capability < FP8_CAPABILITY:
        raise ConfigError(
            f"`quantization` is fp8, and {name} (compute capability {capability[0]}.{capability[1]}) has no units for "
            f"FP8 products, which came with {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]}: use quantization: none"
        )


def import_kernels() -> None:
    """Import Triton and the modules that declare kernels, on a thread, while weights are read."""

    def import_all() -> None:
        package = importlib.import_module("nvcli.kernels.triton")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)

    if find_spec("triton") is not None:
        threading.Thread(target=import_all, name="import-kernels", daemon=True).start()
