"""Slow parts of a rank's start that need no interpreter, begun beside those that do. Imports no torch."""

from __future__ import annotations

import ctypes
import importlib
import pkgutil
import threading
from importlib.util import find_spec


def open_gpu_context(index: int) -> None:
    """Make GPU number `index`'s primary context, which torch will use, on a thread: while torch is imported.

    Where the driver is missing or refuses, nothing happens: torch will meet it too, and say so.
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
    """Import Triton and the modules that declare kernels, on a thread: while weights are read."""

    def import_all() -> None:
        package = importlib.import_module("nvcli.kernels.triton")
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            importlib.import_module(module.name)

    if find_spec("triton") is not None:
        threading.Thread(target=import_all, name="import-kernels", daemon=True).start()
