"""HostCopy: a copy of a GPU's memory in host memory, which goes there and back at the speed of the link."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from nvcli.worker.runner.memory_regions import make_region

_THREADS = 8
_PART_BYTES = 256 << 20


class HostCopy:
    """A copy of a tensor [bytes] uint8. Its pages are pinned, where the driver allows that; else copying is slower.

    They are new pages and go back to the system with this object: torch's own pinned memory is rounded up to a power of
    two, and stays with the process.
    """

    def __init__(self, source: Tensor) -> None:
        region = make_region(len(source), torch.device("cpu"))
        assert region is not None
        self._pages = region.memory
        with ThreadPoolExecutor(_THREADS) as pool:  # the system clears new pages, which takes longer than to fill them
            list(pool.map(_touch, torch.split(self._pages, _PART_BYTES)))
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        code = runtime.cudaHostRegister(self._pages.data_ptr(), len(source), 0)
        self._is_pinned = code == runtime.cudaError.success
        self._pages.copy_(source)

    def copy_to(self, target: Tensor) -> None:
        """Copy everything to a tensor like the source."""
        target.copy_(self._pages)

    def __del__(self) -> None:
        if getattr(self, "_is_pinned", False):
            torch.cuda.cudart().cudaHostUnregister(self._pages.data_ptr())  # type: ignore[no-untyped-call]


def _touch(part: Tensor) -> None:
    with torch.inference_mode():  # this is per thread
        part.zero_()
