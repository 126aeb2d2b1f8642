"""A GPU's context, made on a thread while a rank's process imports torch."""

from __future__ import annotations

import ctypes
import threading


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
