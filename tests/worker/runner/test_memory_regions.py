"""Memory regions: memory goes and comes back at the same addresses."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nvcli.core.system.host_memory import resident_bytes
from nvcli.worker.runner import memory_regions
from nvcli.worker.runner.memory_regions import CudaDriver, HostCopy, make_region

MIB = 1 << 20
GRANULARITY = 2 * MIB
SLACK = 64 * MIB
"""Memory of a GPU that comes and goes besides: of torch's allocator and of kernels."""


class FakeCuda:
    """libcuda's virtual memory, with the rules that its documentation gives: sizes and addresses are whole pages, every
    mapping is undone as it was made, and reserved addresses are given back whole and unmapped."""

    def __init__(self, num_bytes: int) -> None:
        self.free = num_bytes
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, tuple[int, int]] = {}
        """Address → (size, handle)."""
        self.accessible: set[int] = set()
        self.handles: dict[int, int] = {}
        """Handle → its size, until its memory is free again."""
        self.held: set[int] = set()
        self.num_syncs = 0
        self.num_made = 0

    def cuMemGetAllocationGranularity(self, found: Any, properties: Any, option: Any) -> int:
        assert (properties._obj.type, properties._obj.location.type, option.value) == (1, 1, 0)
        found._obj.value = GRANULARITY
        return 0

    def cuMemAddressReserve(self, address: Any, size: Any, alignment: Any, hint: Any, flags: Any) -> int:
        assert size.value % GRANULARITY == 0
        assert (alignment.value, hint.value, flags.value) == (0, 0, 0)
        address._obj.value = (1 + len(self.reserved)) << 40
        self.reserved[address._obj.value] = size.value
        return 0

    def cuMemAddressFree(self, address: Any, size: Any) -> int:
        assert self.reserved.pop(address.value) == size.value
        assert not any(address.value <= one < address.value + size.value for one in self.mapped)
        return 0

    def cuMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> int:
        assert size.value % GRANULARITY == 0
        assert flags.value == 0
        assert properties._obj.location.id == 3
        if size.value > self.free:
            return 2
        self.num_made += 1
        handle._obj.value = self.num_made
        self.handles[self.num_made] = size.value
        self.held.add(self.num_made)
        self.free -= size.value
        return 0

    def cuMemMap(self, address: Any, size: Any, offset: Any, handle: Any, flags: Any) -> int:
        assert offset.value == flags.value == 0
        assert self.handles[handle.value] == size.value
        start, length = next(each for each in self.reserved.items() if each[0] <= address.value < sum(each))
        assert address.value + size.value <= start + length
        assert address.value not in self.mapped
        self.mapped[address.value] = size.value, handle.value
        return 0

    def cuMemRelease(self, handle: Any) -> int:
        self.held.remove(handle.value)
        self._collect()
        return 0

    def cuMemSetAccess(self, address: Any, size: Any, description: Any, count: Any) -> int:
        one = description._obj
        assert (one.location.type, one.location.id, one.flags, count.value) == (1, 3, 3, 1)
        inside = {
            each: self.mapped[each][0] for each in self.mapped if address.value <= each < address.value + size.value
        }
        assert sum(inside.values()) == size.value
        self.accessible |= inside.keys()
        return 0

    def synchronize(self, device: int) -> None:
        assert device == 3
        self.num_syncs += 1

    def cuMemUnmap(self, address: Any, size: Any) -> int:
        assert self.num_syncs, "the GPU may still use it"
        assert self.mapped.pop(address.value)[0] == size.value
        self.accessible.discard(address.value)
        self._collect()
        return 0

    def _collect(self) -> None:
        in_use = {handle for _, handle in self.mapped.values()} | self.held
        for handle in self.handles.keys() - in_use:
            self.free += self.handles.pop(handle)


def test_a_gpus_memory_is_mapped_in_pieces_and_given_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_regions, "_CHUNK_BYTES", 4 * MIB)
    cuda = FakeCuda(64 * MIB)
    monkeypatch.setattr(torch.cuda, "synchronize", cuda.synchronize)
    addresses = memory_regions._AddressRange(9 * MIB, 3, CudaDriver(cuda))
    interface = addresses.__cuda_array_interface__
    assert interface["shape"] == (9 * MIB,)
    assert interface["data"][0] in cuda.reserved
    for _ in range(2):
        addresses.map()
        assert sorted(size for size, _ in cuda.mapped.values()) == [2 * MIB, 4 * MIB, 4 * MIB]
        assert cuda.accessible == cuda.mapped.keys()
        assert not cuda.held
        assert cuda.free == 54 * MIB
        addresses.unmap()
        assert not cuda.mapped
        assert cuda.free == 64 * MIB
    addresses.map()
    del addresses, interface
    gc.collect()
    assert not cuda.mapped
    assert not cuda.reserved
    assert cuda.free == 64 * MIB


def test_what_was_taken_is_given_back_when_a_gpu_runs_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_regions, "_CHUNK_BYTES", 4 * MIB)
    cuda = FakeCuda(9 * MIB)
    monkeypatch.setattr(torch.cuda, "synchronize", cuda.synchronize)
    addresses = memory_regions._AddressRange(12 * MIB, 3, CudaDriver(cuda))
    with pytest.raises(RuntimeError, match="cuMemCreate: out of memory"):
        addresses.map()
    assert not cuda.mapped
    assert cuda.free == 9 * MIB
    cuda.free = 12 * MIB
    addresses.map()
    assert cuda.free == 0


def test_pages_of_a_cpu_go_and_come_back_as_zeros() -> None:
    region = make_region(64 * MIB, torch.device("cpu"))
    assert region is not None
    values = region.memory.view(torch.float32)
    assert not values.any()
    before = resident_bytes()
    values.fill_(3.0)
    assert resident_bytes() - before > 48 * MIB
    region.release()
    region.release()
    assert resident_bytes() - before < 16 * MIB
    region.restore()
    assert region.memory.data_ptr() == values.data_ptr()
    assert not values.any()
    values.fill_(5.0)
    region.restore()  # it is there: nothing is lost
    assert region.memory.view(torch.float32)[-1] == 5.0


def test_a_copy_in_host_memory_is_pinned_as_long_as_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: dict[int, int] = {}

    def register(address: int, size: int, flags: int) -> int:
        pinned[address] = size
        return flags

    error = SimpleNamespace(success=0)
    runtime = SimpleNamespace(cudaError=error, cudaHostRegister=register, cudaHostUnregister=pinned.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    source = torch.arange(9_000, dtype=torch.int32).view(torch.uint8)
    copy, target = HostCopy(source), torch.zeros_like(source)
    assert list(pinned.values()) == [len(source)]
    copy.copy_to(target)
    assert torch.equal(target, source)
    del copy
    assert pinned == {}


@pytest.mark.gpu
def test_a_gpus_memory_goes_and_comes_back_under_a_graph() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.zeros(1, device=device)
    size = 3 << 30
    before = torch.cuda.mem_get_info(device)[0]
    region = make_region(size, device)
    assert region is not None
    values = region.memory.view(torch.int32)
    assert values.device == device
    assert before - torch.cuda.mem_get_info(device)[0] >= size - SLACK
    assert not values.any()
    out = torch.zeros(len(values), dtype=torch.int32, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(values, 1, out=out)
    values.copy_(torch.arange(len(values), dtype=torch.int32))
    graph.replay()
    assert out[-1] == len(values)
    kept = values.cpu()
    held = torch.cuda.mem_get_info(device)[0]
    region.release()
    assert torch.cuda.mem_get_info(device)[0] - held >= size - SLACK
    region.restore()
    assert not values.any()
    values.copy_(kept)
    out.zero_()
    graph.replay()
    assert torch.equal(out.cpu(), kept + 1)
    held = torch.cuda.mem_get_info(device)[0]
    del region, values, graph
    gc.collect()
    assert torch.cuda.mem_get_info(device)[0] - held >= size - SLACK
