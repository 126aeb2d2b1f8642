"""Memory regions: device memory that can be given back and come back at the same addresses; and copies of such memory
on the host.

A region is a range of addresses with one tensor over it. `release` gives the memory behind it back to the system, and
`restore` puts new memory, all zeros, behind the same addresses. Everything that holds an address stays valid: the
tensor and its views, tensor descriptors, CUDA graphs. In between nothing may read or write the region.

On a GPU this is CUDA's virtual memory management (docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__VA.html), as vLLM's
`cumem` allocator and torch_memory_saver use it, called through libcuda itself, so that nothing has to be compiled. On a
CPU it is an anonymous mapping whose pages are discarded.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from nvcli.kernels.whole_numbers import round_up

_CHUNK_BYTES = 1 << 30
"""Size of the pieces in which a GPU's memory is taken, at most."""
_OUT_OF_MEMORY = 2
"""`CUDA_ERROR_OUT_OF_MEMORY`"""
_SUPPORTS_VMM = 102
"""`CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED`"""
_PINNED, _DEVICE, _READ_WRITE = 1, 1, 3
"""`CU_MEM_ALLOCATION_TYPE_PINNED`, `CU_MEM_LOCATION_TYPE_DEVICE`, `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`"""


class MemoryRegion(ABC):
    """A range of addresses on one device, with memory behind it unless it is released."""

    def __init__(self, num_bytes: int) -> None:
        """Reserve the addresses, backed by memory that is all zeros. Raises RuntimeError with the words "out of memory"
        if there is too little."""
        self.num_bytes = num_bytes
        """The bytes that were asked for. What is taken from the system is rounded up."""
        self.is_released = False

    @property
    @abstractmethod
    def memory(self) -> Tensor:
        """The whole region, [num_bytes] uint8, always at the same address. It keeps the region's addresses alive."""

    def release(self) -> None:
        """Wait for the device, and give the memory back; its contents are lost. Idempotent."""
        if not self.is_released:
            self._unmap()
            self.is_released = True

    def restore(self) -> None:
        """Put new memory, all zeros, behind the addresses. Idempotent. Raises RuntimeError with the words "out of
        memory" if there is too little; the region then stays released."""
        if self.is_released:
            self._map()
            self.is_released = False

    @abstractmethod
    def _unmap(self) -> None:
        """Take the memory away."""

    @abstractmethod
    def _map(self) -> None:
        """Put zeroed memory behind the addresses."""


def make_region(num_bytes: int, device: torch.device) -> MemoryRegion | None:
    """Make a region on `device`; None: its driver has no virtual memory management.

    Raises RuntimeError with the words "out of memory" if there is too little memory.
    """
    if device.type == "cpu":
        return _HostRegion(num_bytes)
    driver = CudaDriver()
    return _CudaRegion(num_bytes, device, driver) if driver.has_virtual_memory(device.index) else None


class _HostRegion(MemoryRegion):
    """Pages of this process, which come into being when they are first touched."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self._pages = mmap.mmap(-1, max(1, num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # not every kernel has large pages; they are only faster
            self._pages.madvise(mmap.MADV_HUGEPAGE)

    @cached_property
    def memory(self) -> Tensor:
        return torch.frombuffer(self._pages, dtype=torch.uint8, count=self.num_bytes or -1)[: self.num_bytes]

    def _unmap(self) -> None:
        self._pages.madvise(mmap.MADV_DONTNEED)

    def _map(self) -> None:
        """Do nothing: discarded pages come back as zeros."""


class _CudaRegion(MemoryRegion):
    """Memory of one GPU behind reserved addresses."""

    def __init__(self, num_bytes: int, device: torch.device, driver: CudaDriver) -> None:
        super().__init__(num_bytes)
        self._device = device
        torch.cuda.synchronize(device)  # makes the device's context current on this thread
        self._range = _AddressRange(num_bytes, device.index, driver)
        self._map()

    @cached_property
    def memory(self) -> Tensor:
        return torch.as_tensor(self._range, device=self._device)

    def _unmap(self) -> None:
        self._range.unmap()

    def _map(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()  # what torch's allocator keeps for later is not free for others
        self._range.map()
        self.memory.zero_()


class _AddressRange:
    """Reserved addresses of one GPU, as an array (`__cuda_array_interface__`). They are given back when it is
    collected, which tensors over it prevent."""

    def __init__(self, num_bytes: int, device_index: int, driver: CudaDriver) -> None:
        self._driver = driver
        self._properties = _AllocationProperties(type=_PINNED, location=_Location(type=_DEVICE, id=device_index))
        granularity = driver.granularity(self._properties)
        self._size = round_up(max(1, num_bytes), granularity)
        chunk = max(granularity, _CHUNK_BYTES)  # both are powers of two
        self._chunks = [(start, min(chunk, self._size - start)) for start in range(0, self._size, chunk)]
        self._num_mapped = 0
        self._address = driver.reserve(self._size)
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (self._address, False),
            "strides": None,
            "version": 3,
        }

    def map(self) -> None:
        """Put memory behind all addresses, or behind none."""
        try:
            for start, size in self._chunks:
                self._driver.map(self._address + start, size, self._properties)
                self._num_mapped += 1
            self._driver.allow_access(self._address, self._size, self._properties.location)
        except BaseException:
            self.unmap()
            raise

    def unmap(self) -> None:
        """Take the memory away. Idempotent."""
        if self._num_mapped:
            # By torch, as the thread that collects this may have no context of its own.
            torch.cuda.synchronize(self._properties.location.id)
        for start, size in self._chunks[: self._num_mapped]:
            self._driver.unmap(self._address + start, size)
        self._num_mapped = 0

    def __del__(self) -> None:
        if hasattr(self, "_address"):  # else nothing was reserved
            self.unmap()
            self._driver.free(self._address, self._size)


class _Location(ctypes.Structure):
    """`CUmemLocation`"""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _AllocationFlags(ctypes.Structure):
    """`CUmemAllocationProp.allocFlags`"""

    _fields_ = (
        ("compression_type", ctypes.c_ubyte),
        ("gpu_direct_rdma_capable", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _AllocationProperties(ctypes.Structure):
    """`CUmemAllocationProp`"""

    _fields_ = (
        ("type", ctypes.c_int),
        ("requested_handle_types", ctypes.c_int),
        ("location", _Location),
        ("win32_handle_meta_data", ctypes.c_void_p),
        ("alloc_flags", _AllocationFlags),
    )


class _AccessDescription(ctypes.Structure):
    """`CUmemAccessDesc`"""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class CudaDriver:
    """The functions of libcuda that regions need; no context has to be current on the calling thread. Addresses and
    sizes are in bytes, and multiples of `granularity`. Each raises RuntimeError if the driver refuses."""

    def __init__(self, library: Any = None) -> None:
        """`library`: another one in libcuda's place, for tests."""
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library

    def has_virtual_memory(self, device_index: int) -> bool:
        """Whether a GPU, as this process numbers them, has virtual memory management."""
        device, found = ctypes.c_int(), ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(device_index))
        self._call("cuDeviceGetAttribute", ctypes.byref(found), ctypes.c_int(_SUPPORTS_VMM), device)
        return bool(found.value)

    def granularity(self, properties: _AllocationProperties) -> int:
        """Return the unit of all sizes and addresses, in bytes, a power of two (2 MiB on today's GPUs)."""
        found = ctypes.c_size_t()
        minimum = ctypes.c_int(0)  # CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self._call("cuMemGetAllocationGranularity", ctypes.byref(found), ctypes.byref(properties), minimum)
        return found.value

    def reserve(self, size: int) -> int:
        """Reserve addresses, and return the first."""
        address = ctypes.c_uint64()
        alignment, hint, flags = ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_ulonglong(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(size), alignment, hint, flags)
        return address.value

    def free(self, address: int, size: int) -> None:
        """Give reserved addresses back."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def map(self, address: int, size: int, properties: _AllocationProperties) -> None:
        """Take memory, and put it behind reserved addresses. It goes back to the system when it is unmapped."""
        handle, flags = ctypes.c_uint64(), ctypes.c_ulonglong(0)
        self._call("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(properties), flags)
        try:
            self._call("cuMemMap", ctypes.c_uint64(address), ctypes.c_size_t(size), ctypes.c_size_t(0), handle, flags)
        finally:
            self._call("cuMemRelease", handle)  # the mapping holds the memory from here on

    def allow_access(self, address: int, size: int, location: _Location) -> None:
        """Let a GPU read and write mapped addresses."""
        description = _AccessDescription(location=location, flags=_READ_WRITE)
        count = ctypes.c_size_t(1)
        self._call("cuMemSetAccess", ctypes.c_uint64(address), ctypes.c_size_t(size), ctypes.byref(description), count)

    def unmap(self, address: int, size: int) -> None:
        """Undo one `map`."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(size))

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            reason = "out of memory" if code == _OUT_OF_MEMORY else f"error {code}"
            raise RuntimeError(f"CUDA driver: {name}: {reason}")


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
