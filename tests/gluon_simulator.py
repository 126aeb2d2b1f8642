"""Runs a Gluon kernel on the CPU, as far as the kernels for Hopper need it: Gluon has no interpreter.

Groups of warps are threads, and mbarriers block them. A matrix product reads its operands in shared memory when it is
waited for, and a TMA load arrives when the loading group has gone on, so that what is released too early or read too
early gives wrong results. Registers and layouts are not simulated.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_LAUNCH_OPTIONS = ("num_warps", "launch_pdl")
SECONDS = 20.0
"""A group that waits so long for a barrier will wait forever."""


class Pointer:
    """Elements of a flat tensor."""

    def __init__(self, data: Tensor, offset: Any = 0) -> None:
        self.data, self.offset = data, offset
        self.dtype = types.SimpleNamespace(element_ty=data.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.offset + offset)

    def __getitem__(self, places: Any) -> Pointer:
        return Pointer(self.data, self.offset[places])

    def cast(self, dtype: torch.dtype) -> Pointer:
        assert isinstance(self.offset, int)
        assert self.offset == 0
        return Pointer(self.data.view(dtype))

    def to(self, dtype: torch.dtype, bitcast: bool) -> Pointer:
        assert bitcast
        offset = self.offset * self.data.itemsize
        assert not (offset % dtype.itemsize).any(), "an address that the GPU would refuse"
        return Pointer(self.data.view(dtype), offset // dtype.itemsize)


def described(descriptor: Any) -> Tensor:
    """Return the tensor that a descriptor describes, also where it knows but the address."""
    base, shape, strides = descriptor.base, descriptor.shape, descriptor.strides
    if not isinstance(base, Tensor):
        size = 1 + sum((length - 1) * stride for length, stride in zip(shape, strides, strict=True))
        data = (ctypes.c_ubyte * (size * base.dtype.itemsize)).from_address(base.data_ptr())
        base = torch.frombuffer(data, dtype=base.dtype)
    return base.as_strided(shape, strides)


class Memory:
    """Shared memory: [stages, rows, columns] or a view of one stage."""

    def __init__(self, data: Tensor) -> None:
        self.data, self.dtype = data, data.dtype

    def index(self, at: Any) -> Memory:
        return Memory(self.data[int(at)])

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)

    def load(self, layout: object) -> Tensor:
        return self.data.clone()

    def slice(self, start: int, length: int) -> Memory:
        return Memory(self.data.narrow(0, start, length))

    def permute(self, order: tuple[int, int]) -> Memory:
        return Memory(self.data.permute(order))


class Parts:
    """The same memory in parts: stage by stage, panel of columns by panel, rows of a panel one behind the other."""

    def __init__(self, data: Tensor, rows: int, columns: int) -> None:
        self.data, self.rows, self.columns = data, rows, columns

    def index(self, at: Any) -> Memory:
        _, rows, columns = self.data.shape
        rest, row = divmod(int(at), rows // self.rows)
        stage, column = divmod(rest, columns // self.columns)
        return Memory(self.data[stage].unflatten(0, (-1, self.rows))[row].unflatten(1, (-1, self.columns))[:, column])


def reinterpret(memory: Memory, dtype: torch.dtype, shape: list[int], layout: object) -> Memory | Parts:
    """Read memory in other dimensions."""
    if len(shape) > 3 or shape[-1] == memory.data.shape[-1]:  # the same rows
        return Memory(memory.data.view(shape))
    assert shape[0] * shape[1] * shape[2] == memory.data.numel()
    return Parts(memory.data, *shape[1:])


class Barrier:
    """An mbarrier: its phase ends when all have arrived and all bytes have."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed = changed
        self.count = self.pending = self.bytes = self.phase = 0

    def update(self, arrived: int, num_bytes: int) -> None:
        with self.changed:
            self.pending -= arrived
            self.bytes += num_bytes
            assert self.pending >= 0, "more have arrived than were to come"
            if self.pending == 0 and self.bytes == 0:
                self.pending, self.phase = self.count, self.phase + 1
            self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase % 2 != parity, SECONDS), "it waits forever"


class Barriers:
    def __init__(self, count: int, changed: threading.Condition) -> None:
        self.barriers = [Barrier(changed) for _ in range(count)]

    def index(self, at: Any) -> Barrier:
        return self.barriers[int(at)]


class Product:
    """A matrix product that has begun."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self._compute = compute
        self.result: Tensor | None = None

    def finish(self) -> Tensor:
        self.result = self._compute() if self.result is None else self.result
        return self.result


class Simulator:
    """Runs the programs of a launch one after another, on kernels of some modules, which share no names but for the
    same things."""

    def __init__(
        self, *modules: types.ModuleType, seed: int = 0, functions: Mapping[str, Callable[..., Any]] | None = None
    ) -> None:
        """`functions` take the place of functions of the modules that only a GPU can run."""
        self._rng = random.Random(seed)
        self._changed = threading.Condition()
        self._products = threading.local()
        self._stores = threading.local()
        self._loads: list[Callable[[], None]] = []
        self._program: tuple[int, ...] = ()
        self._grid: tuple[int, ...] = ()
        found = {name: value for module in modules for name, value in vars(module).items()}
        names = found.copy()
        names |= {
            "gl": self._language(),
            "mbarrier": self._mbarrier(),
            "tma": types.SimpleNamespace(store_wait=self._wait_for_stores),
            "tma_load": self._load_part,
            "async_copy": types.SimpleNamespace(
                async_copy_global_to_shared=self._copy, mbarrier_arrive=self._arrive_with_copies
            ),
            "tma_store": self._store_part,
            "reinterpret": reinterpret,
            "warpgroup_mma": self._multiply,
            "warpgroup_mma_wait": self._wait_for_products,
            "fence_async_shared": lambda: None,
        }
        for name, value in found.items():
            if hasattr(value, "arg_names"):  # a function of Gluon's
                names[name] = types.FunctionType(value.fn.__code__, names, name, value.fn.__defaults__)
            elif hasattr(value, "value"):  # a constexpr
                names[name] = value.value
        names |= functions or {}
        self._names = names

    def launch(self, kernel: str, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
        """Run the programs of the kernel of that name."""
        self._grid = grid
        for self._program in itertools.product(*map(range, grid)):
            self._names[kernel](*args, **constants)

    def _language(self) -> Any:
        def either(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
            return lambda a, b: function(torch.as_tensor(a), torch.as_tensor(b))

        def load(pointer: Pointer, mask: Any = None, other: float = 0.0, cache_modifier: str = "") -> Tensor:
            places = torch.as_tensor(pointer.offset)
            mask = torch.ones_like(places, dtype=torch.bool) if mask is None else mask.expand(places.shape)
            return torch.where(mask, pointer.data[torch.where(mask, places, 0)], torch.tensor(other).to(pointer.data))

        def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
            places = torch.as_tensor(pointer.offset)
            value, mask = (torch.as_tensor(one).expand(places.shape) for one in (value, mask))
            pointer.data[places[mask]] = value[mask].to(pointer.data.dtype)

        def atomic_add(pointer: Pointer, value: int, sem: str) -> int:
            before = int(pointer.data[pointer.offset])
            pointer.data[pointer.offset] += value
            return before

        def allocate(dtype: torch.dtype, shape: list[int], layout: object) -> Memory | Barriers:
            if layout == "barriers":
                return Barriers(shape[0], self._changed)
            return Memory(torch.full(shape, torch.nan if dtype.is_floating_point else -1, dtype=dtype))

        def layout(*args: object, **options: object) -> str:
            return "layout"

        def maximum_of(x: Tensor, axis: int) -> Tensor:
            return x.amax(axis)

        return types.SimpleNamespace(
            constexpr=object, int32=torch.int32, int64=torch.int64, float32=torch.float32, load=load, store=store,
            BlockedLayout=layout, NVMMADistributedLayout=layout, NVMMASharedLayout=layout, DotOperandLayout=layout,
            SliceLayout=layout, SwizzledSharedLayout=layout, DistributedLinearLayout=layout,
            allocate_shared_memory=allocate, warp_specialize=self._specialise, int16=torch.int16, uint8=torch.uint8,
            float8e4nv=torch.float8_e4m3fn, float16=torch.float32, exp=torch.exp, abs=torch.abs, floor=torch.floor,
            atomic_add=atomic_add,
            split=lambda x: x.unbind(-1), join=lambda a, b: torch.stack((a, b), dim=-1),
            static_range=range, cdiv=lambda a, b: -(-a // b), exp2=torch.exp2, log2=torch.log2,
            sum=torch.sum, max=maximum_of, minimum=either(torch.minimum), maximum=either(torch.maximum),
            multiple_of=lambda x, number: x,
            where=lambda condition, a, b: torch.where(torch.as_tensor(condition), a, b),
            arange=lambda first, end, layout: torch.arange(first, end),
            zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
            full=lambda shape, value, dtype, layout: torch.full(shape, value, dtype=dtype),
            convert_layout=lambda x, layout: x, expand_dims=torch.unsqueeze,
            program_id=lambda axis: self._program[axis], num_programs=lambda axis: self._grid[axis],
        )  # fmt: skip

    def _mbarrier(self) -> Any:
        def init(barrier: Barrier, count: int) -> None:
            barrier.count = barrier.pending = count

        def wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
            self._let_loads_arrive()
            if pred:
                barrier.wait(int(phase))

        def expect(barrier: Barrier, num_bytes: int, pred: Any = True) -> None:
            if pred:
                barrier.update(1, num_bytes)

        def arrive(barrier: Barrier, count: int, pred: Any = True) -> None:
            if pred:
                barrier.update(count, 0)

        return types.SimpleNamespace(
            MBarrierLayout=lambda: "barriers", init=init, wait=wait, expect=expect, arrive=arrive
        )

    def _load_part(
        self, source: Tensor, coord: Sequence[Any], barrier: Barrier, part: Memory, pred: Any = True
    ) -> None:
        """`source` is what the descriptor describes. The bytes come later, in any order, and zeros for what is behind
        its end."""
        if not pred:
            return
        ends = [int(place) + size for place, size in zip(coord, part.data.shape, strict=True)]

        def arrive() -> None:
            there = source[tuple(slice(int(first), end) for first, end in zip(coord, ends, strict=True))]
            part.data.zero_()
            part.data[tuple(slice(size) for size in there.shape)] = there
            # Wider numbers stand for ones of 16 bits.
            size = min(2, part.data.itemsize) if part.data.is_floating_point() else part.data.itemsize
            barrier.update(0, -part.data.numel() * size)

        self._loads.append(arrive)

    def _copy(self, part: Memory, pointer: Pointer) -> None:
        with self._changed:
            self._loads.append(lambda: part.data.copy_(pointer.data[pointer.offset]))

    def _arrive_with_copies(self, barrier: Barrier, increment_count: bool) -> None:
        """All threads of a group of four warps arrive, once what they copied is there."""
        assert not increment_count
        with self._changed:
            copies, self._loads = self._loads, []

        def arrive() -> None:
            for copy in copies:
                copy()
            barrier.update(128, 0)

        with self._changed:
            self._loads.append(arrive)

    def _store_part(self, target: Tensor, coord: Sequence[Any], part: Memory) -> None:
        """Shared memory is read when the store is waited for. What lies behind the end is dropped."""
        places = tuple(slice(int(first), int(first) + size) for first, size in zip(coord, part.data.shape, strict=True))

        def store() -> None:
            there = target[places]
            there.copy_(part.data[tuple(slice(size) for size in there.shape)])

        self._stores.pending = [*getattr(self._stores, "pending", []), store]

    def _wait_for_stores(self, num_outstanding: int) -> None:
        pending = getattr(self._stores, "pending", [])
        ended = max(len(pending) - num_outstanding, 0)
        for store in pending[:ended]:
            store()
        self._stores.pending = pending[ended:]

    def _let_loads_arrive(self) -> None:
        with self._changed:
            loads, self._loads = self._loads, []
        self._rng.shuffle(loads)
        for arrive in loads:
            arrive()

    def _multiply(
        self, a: Tensor | Memory, b: Memory, acc: Tensor | Product, *, use_acc: bool = True, is_async: bool
    ) -> Product:
        def compute() -> Tensor:
            left = a.data if isinstance(a, Memory) else a
            product = left.float() @ b.data.float()
            before = acc.finish() if isinstance(acc, Product) else acc
            return before + product if use_acc else product

        self._products.pending = [*getattr(self._products, "pending", []), Product(compute)]
        product: Product = self._products.pending[-1]
        return product

    def _wait_for_products(self, num_outstanding: int, deps: list[Product | Tensor]) -> Any:
        """Products that may still go on remain what they are: another product may add to them."""
        pending = self._products.pending
        ended = max(len(pending) - num_outstanding, 0)
        for product in pending[:ended]:
            product.finish()
        self._products.pending = pending[ended:]
        results = tuple(dep.result if isinstance(dep, Product) and dep.result is not None else dep for dep in deps)
        return results[0] if len(results) == 1 else results

    def _specialise(self, groups: Sequence[tuple[Any, tuple[Any, ...]]], warps: object, registers: object) -> None:
        failures: list[BaseException] = []

        def run(function: Callable[..., None], args: tuple[Any, ...]) -> None:
            try:
                function(*args)
                self._let_loads_arrive()
            except BaseException as error:
                failures.append(error)
                raise

        threads = [threading.Thread(target=run, args=group, daemon=True) for group in groups]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]


class SimulatedKernel:
    """A kernel that is simulated where Triton would launch it, on tensors and descriptors."""

    def __init__(self, simulator: Simulator, name: str) -> None:
        self._simulator, self._name = simulator, name

    def warmup(self, *arguments: object, **options: object) -> None:
        """Compile nothing, as Triton's interpreter does."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: object, **named: object) -> None:
            constants = {name: value for name, value in named.items() if name not in _LAUNCH_OPTIONS}
            self._simulator.launch(self._name, grid, *map(as_argument, arguments), **constants)

        return launch


def as_argument(argument: Any) -> Any:
    """Return what a kernel gets: all that lies behind the first element of a tensor, or what a descriptor describes."""
    if isinstance(argument, Tensor):
        size = argument.untyped_storage().nbytes() // argument.itemsize - argument.storage_offset()
        return Pointer(argument.as_strided((size,), (1,)))
    return described(argument) if hasattr(argument, "block_shape") else argument
