"""An imagined GPU: torch and Triton take it for one of a given compute capability, on a machine that has none.

Its tensors have a shape and an address, and no memory: they lie on torch's meta device. Triton compiles for it, and
launches are left to the caller (`compile_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

_GPU, _META, _CPU = torch.device("cuda", 0), torch.device("meta"), torch.device("cpu")
_ALIGNMENT = 256
_KIB, _GIB = 1 << 10, 1 << 30


class Card(NamedTuple):
    """A GPU of a compute capability."""

    name: str
    multiprocessors: int
    shared_bytes: int
    """The most shared memory of a program."""


CARDS = {
    80: Card("A100", 108, 163 * _KIB),
    89: Card("L40S", 142, 99 * _KIB),
    90: Card("H200", 132, 227 * _KIB),
    100: Card("B200", 148, 227 * _KIB),
}


@contextmanager
def imagined_gpu(capability: int) -> Iterator[None]:
    """Let torch and Triton find a GPU of that capability in the block, and nothing but that."""
    card = CARDS[capability]
    major, minor = divmod(capability, 10)
    properties = SimpleNamespace(multi_processor_count=card.multiprocessors, name=card.name, major=major, minor=minor)
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "get_device_capability": (major, minor),
        "get_device_properties": properties,
        "get_device_name": card.name,
        "mem_get_info": (130 * _GIB, 140 * _GIB),
        "memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_allocated": 0,
        "max_memory_reserved": 0,
        "set_device": None,
        "synchronize": None,
        "empty_cache": None,
        "is_current_stream_capturing": False,
        "current_stream": _Nothing(),
        "stream": _Nothing(),
    }
    patches = {name: lambda *args, answer=answer, **kwargs: answer for name, answer in answers.items()}
    driver.set_active(_Driver(capability))
    with patch.multiple(torch.cuda, Stream=_Nothing, Event=_Nothing, **patches), _Placing():
        yield


class _OnGPU(torch.Tensor):
    """A tensor on the meta device that says that it is on a GPU, but to torch itself."""

    is_in_torch = False
    """Whether one of torch's functions runs."""
    is_cuda = property(lambda self: not _OnGPU.is_in_torch)  # type: ignore[assignment]
    device = property(lambda self: _META if _OnGPU.is_in_torch else _GPU)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return _ALIGNMENT + self.storage_offset() * self.element_size()


class _Placing(TorchFunctionMode):
    """Puts what is meant for the GPU on the meta device."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.device or getattr(func, "__name__", "") == "__get__":
            return func(*args, **kwargs)
        if func is torch.Tensor.pin_memory:
            return args[0]
        is_read = func is torch.Tensor.to and args[0].is_meta and _CPU in map(_as_device, args[1:])
        if is_read or (func is torch.Tensor.copy_ and args[1].is_meta and not args[0].is_meta):
            return torch.zeros(args[0].shape, dtype=args[0].dtype)
        kwargs = {name: _placed(value) for name, value in kwargs.items() if name != "pin_memory"}
        _OnGPU.is_in_torch = True
        try:
            made = func(*map(_placed, args), **kwargs)
        finally:
            _OnGPU.is_in_torch = False
        return made.as_subclass(_OnGPU) if type(made) is torch.Tensor and made.is_meta else made


def _as_device(value: Any) -> Any:
    return torch.device(value) if isinstance(value, str) else value


def _placed(value: Any) -> Any:
    return _META if isinstance(value, torch.device) and value.type == "cuda" else value


class _Nothing:
    """Stands for a stream or an event: it does nothing, whatever it is asked."""

    def __init__(self, *args: object, **kwargs: object) -> None: ...

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None

    def __enter__(self) -> None: ...

    def __exit__(self, *args: object) -> None: ...


class _Driver:
    """Answers what Triton asks of a driver when it compiles."""

    def __init__(self, capability: int) -> None:
        properties = {
            "max_shared_mem": CARDS[capability].shared_bytes,
            "mem_clock_rate": 3_201_000,
            "mem_bus_width": 6016,
        }
        self._target = GPUTarget("cuda", capability, 32)
        self.utils = SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target
