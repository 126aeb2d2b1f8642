"""The device that a rank works on."""

from __future__ import annotations

import os

import torch

from nvcli.config import EngineConfig
from nvcli.errors import ConfigError


def open_device(config: EngineConfig, rank: int) -> torch.device:
    """A GPU of the rank's own, or its share of the CPU. Raises ConfigError where there is no such GPU."""
    if config.device == "cuda":
        return _open_gpu(config.gpu_index(rank))
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
