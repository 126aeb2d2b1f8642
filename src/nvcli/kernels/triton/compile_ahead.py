"""Compiles the kernels of a program on several threads, before the program runs.

Triton compiles a kernel at its first launch, on the thread that launches it, and with a C compiler what hands over the
arguments, so that a program waits for one kernel after another. Most of this holds no interpreter lock. Here the
program runs once with launches left out, and that tells which kernels it needs.

It builds on the mode for asynchronous compilation of Triton 3.6 (`triton/runtime/_async_compile.py`), which waits for a
kernel at its launch; here the launch is left out. Where that mode is missing, kernels are compiled as ever.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import triton
from triton.runtime.cache import get_cache_manager

_MODE_MODULE = "triton.runtime._async_compile"
_RECORD_NAME = "compiled_ahead.txt"

Compile = Callable[[], Any]
Finish = Callable[[Any], None]


def can_compile_ahead() -> bool:
    """Tell whether this Triton can compile kernels before their launches, and more than one core is there to do it."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return not is_interpreted and find_spec(_MODE_MODULE) is not None and len(os.sched_getaffinity(0)) > 1


def hash_triton() -> None:
    """Let Triton compute the hash of itself, of several hundred MB, which stands in the key of each kernel in its cache
    on disk. It keeps the hash, and computes it without the interpreter lock."""
    triton_key = getattr(import_module("triton.runtime.cache"), "triton_key", None)
    if triton_key is not None:  # other versions keep it elsewhere, and compute it when they need it
        triton_key()


def was_compiled(program: str) -> bool:
    """Tell whether Triton's cache on disk notes that all kernels of a program were compiled into it. A cache that takes
    no note counts as one that has it: kernels are then read from it, or compiled at their first launch.

    `program` says all that the choice of kernels depends on. A note that does not hold costs time, nothing else.
    """
    try:
        return _cache(program).get_file(_RECORD_NAME) is not None
    except (OSError, RuntimeError):
        return True


def note_compiled(program: str) -> None:
    """Note in Triton's cache on disk that all kernels of a program were compiled into it, if it takes the note."""
    with suppress(OSError, RuntimeError):
        _cache(program).put(program, _RECORD_NAME, binary=False)


@contextmanager
def compile_ahead(num_threads: int, device: torch.device) -> Iterator[None]:
    """Leave out the launches of kernels that this process has not compiled, and compile and load these on `num_threads`
    threads, for the GPU `device`, which is the current one. They are ready when the block ends; a kernel that fails on
    a thread is compiled once more on this one. After an error of the block they are not waited for, and not ready.

    Kernels that were compiled before are launched. Memory that a kernel would write keeps what it holds. Raises what
    Triton raises where a kernel cannot be compiled.
    """
    active_mode = import_module(_MODE_MODULE).active_mode
    # A thread's GPU is the first one until it is told another.
    with ThreadPoolExecutor(num_threads, "compile", initializer=torch.cuda.set_device, initargs=(device,)) as threads:
        kernels = _KernelsAhead(threads)
        token = active_mode.set(kernels)
        try:
            yield
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
        finally:
            active_mode.reset(token)
        kernels.finish()


class _KernelsAhead:
    """The kernels that are compiled ahead; to Triton, an active `AsyncCompileMode`."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._compiling: dict[str, tuple[Compile, Future[Any]]] = {}
        self._finish: list[tuple[str, Finish]] = []
        self._placeholder = Placeholder()

    def submit(self, key: str, compile_fn: Compile, finalize_fn: Finish) -> Placeholder:
        """Begin to compile a kernel that is launched for the first time. Triton calls this, and finds what is returned
        at the kernel's next launches, too."""
        finalize_fn(self._placeholder)
        if key not in self._compiling:
            self._compiling[key] = compile_fn, self._threads.submit(_compile_and_load, compile_fn)
        self._finish.append((key, finalize_fn))
        return self._placeholder

    def finish(self) -> None:
        """Wait for the kernels, and let Triton find them."""
        self._placeholder.is_over = True
        for key, finalize in self._finish:
            compile_fn, future = self._compiling[key]
            finalize(compile_fn() if future.exception() is not None else future.result())


def _compile_and_load(compile_fn: Compile) -> Any:
    kernel = compile_fn()
    kernel.run  # noqa: B018  # this property makes what launches the kernel, and loads both
    return kernel


class Placeholder:
    """What Triton finds in the place of a kernel that is compiled ahead, whose launches do nothing. Who keeps compiled
    kernels must not keep this."""

    packed_metadata = None
    function = None

    def __init__(self) -> None:
        self.is_over = False

    def launch_metadata(self, *arguments: object) -> None:
        return None

    def run(self, *arguments: object) -> None:
        assert not self.is_over, "a kernel that was not compiled is launched"

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.run


def _cache(program: str) -> Any:
    words = f"nvcli programs, Triton {triton.__version__}: {program}"
    return get_cache_manager(hashlib.sha256(words.encode()).hexdigest())
