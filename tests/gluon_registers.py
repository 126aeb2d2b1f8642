"""Runs a Gluon kernel of plain loads, stores and arithmetic on the CPU: Gluon has no interpreter. Tensors are torch's,
programs run one after another, and layouts are not simulated."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from triton.language import constexpr


class Block(Tensor):
    """A tensor with the methods that Gluon's tensors have."""

    type = types.SimpleNamespace(layout="layout")

    def to(self, dtype: torch.dtype, bitcast: bool = False) -> Tensor:  # type: ignore[override]
        return self.view(dtype) if bitcast else super().to(dtype)


class Pointer:
    """Elements of a flat tensor."""

    def __init__(self, data: Tensor, offset: Any = 0) -> None:
        self.data, self.offset = data, offset
        self.dtype = types.SimpleNamespace(element_ty=data.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.offset + offset)

    def cast(self, dtype: torch.dtype) -> Pointer:
        assert isinstance(self.offset, int)
        assert self.offset == 0
        return Pointer(self.data.view(dtype))

    def __getitem__(self, places: Any) -> Pointer:
        return Pointer(self.data, self.offset[places])

    def to(self, dtype: torch.dtype, bitcast: bool) -> Pointer:
        assert bitcast
        offset = self.offset * self.data.itemsize
        assert not (offset % dtype.itemsize).any(), "an address that the GPU would refuse"
        return Pointer(self.data.view(dtype), offset // dtype.itemsize)


def block(data: Any) -> Tensor:
    return torch.as_tensor(data).as_subclass(Block)


def load(pointer: Pointer, mask: Any = None, other: float = 0.0, cache_modifier: str = "") -> Tensor:
    """Load where the mask is true; other places are never touched."""
    places = torch.as_tensor(pointer.offset)
    seen = torch.ones_like(places, dtype=torch.bool) if mask is None else mask.expand(places.shape)
    return block(torch.where(seen, pointer.data[torch.where(seen, places, 0)], torch.tensor(other).to(pointer.data)))


def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
    places, value = torch.as_tensor(pointer.offset), torch.as_tensor(value).to(pointer.data.dtype)
    seen = torch.as_tensor(mask).expand(places.shape)
    pointer.data[places[seen]] = value.expand(places.shape)[seen]


def atomic_add(pointer: Pointer, value: int, sem: str) -> Tensor:
    old = pointer.data[pointer.offset].clone()
    pointer.data[pointer.offset] += value
    return block(old)


def run(
    module: types.ModuleType,
    kernel: str,
    grid: tuple[int, int],
    replaced: dict[str, Callable[..., Any]],
    *args: Any,
    **constants: Any,
) -> None:
    """Run the kernel of that name. `replaced`: what stands for the module's functions in assembly."""

    def either(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], Tensor]:
        return lambda a, b: function(block(a), block(b))

    program = [0, 0]
    language = types.SimpleNamespace(
        constexpr=object, int1=torch.bool, int32=torch.int32, int64=torch.int64, float16=torch.float16,
        float32=torch.float32, bfloat16=torch.bfloat16, pointer_type=lambda dtype: dtype,
        NVMMADistributedLayout=lambda *_: "layout", DotOperandLayout=lambda *_: "layout",
        BlockedLayout=lambda *_: "layout", SliceLayout=lambda *_: "layout",
        DistributedLinearLayout=lambda *_: "layout", program_id=lambda axis: program[axis],
        load=load, store=store, atomic_add=atomic_add,
        arange=lambda first, end, layout: block(torch.arange(first, end)),
        full=lambda shape, value, dtype, layout: block(torch.as_tensor(value).to(dtype).expand(shape)),
        zeros=lambda shape, dtype, layout: block(torch.zeros(shape, dtype=dtype)),
        minimum=either(torch.minimum), maximum=either(torch.maximum),
        where=lambda condition, a, b: torch.where(block(condition), a, b),
        max=lambda x, axis: x.amax(axis), sum=torch.sum, abs=torch.abs, exp2=torch.exp2, log2=torch.log2,
        split=lambda x: x.unbind(-1), join=lambda a, b: torch.stack((a, b), dim=-1),
        convert_layout=lambda x, layout: x, multiple_of=lambda x, size: x, static_range=range,
    )  # fmt: skip
    names = {name: value.value if isinstance(value, constexpr) else value for name, value in vars(module).items()}
    for name, value in vars(module).items():
        function = getattr(value, "fn", None)
        if isinstance(function, types.FunctionType):
            names[name] = types.FunctionType(function.__code__, names, name, function.__defaults__)
    names |= {"gl": language, "barrier": lambda: None, "mma_v2": lambda a, b, c: c + a.float() @ b.float()} | replaced
    for program[0] in range(grid[0]):
        for program[1] in range(grid[1]):
            names[kernel](*args, **constants)


class SimulatedKernel:
    """A kernel that is simulated where Triton would launch it, on tensors; `replaced` as `run` takes it."""

    def __init__(self, module: types.ModuleType, name: str, replaced: dict[str, Callable[..., Any]]) -> None:
        self._module, self._name, self._replaced = module, name, replaced

    def warmup(self, *arguments: object, **options: object) -> None:
        """Compile nothing, as Triton's interpreter does."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *arguments: run(
            self._module, self._name, (grid[0], grid[1]), self._replaced, *map(as_argument, arguments)
        )


def as_argument(argument: Any) -> Any:
    """Return what a kernel gets: of a tensor all that lies behind its first element."""
    if not isinstance(argument, Tensor):
        return argument
    size = argument.untyped_storage().nbytes() // argument.itemsize - argument.storage_offset()
    return Pointer(argument.as_strided((size,), (1,)))
