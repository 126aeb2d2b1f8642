"""Compiles the kernels of a program side by side, before the program runs.

Triton compiles a kernel at its first launch, on the thread that launches it, so that a program waits for one kernel
after another. Here the program runs once with launches left out, which tells the kernels that it needs; each is
compiled in a process of its own (`compile_processes.py`), and loaded by a thread.

It builds on Triton's mode for asynchronous compilation (`triton/runtime/_async_compile.py`), which waits for a kernel
at its launch; here the launch is left out.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from triton.runtime._async_compile import active_mode
from triton.runtime.cache import get_cache_manager

from nvcli.kernels.triton.launch.compile_processes import CompileProcesses, KernelDescription

_MOST_NAME = 150
"""Characters of a kernel's name in the names of the cache's files."""

Compile = Callable[[], Any]
Finish = Callable[[Any], None]


@contextmanager
def compile_ahead(processes: CompileProcesses, device: torch.device, *, most: int) -> Iterator[None]:
    """Leave out the launches of kernels that this process has not compiled, compile up to `most` of these at a time,
    and load them, for the GPU `device`, which is the current one. They are ready when the block ends; a kernel that
    fails is compiled once more on this thread. After an error of the block they are not waited for, and not ready.

    Kernels that were compiled before are launched. Memory that a kernel would write keeps what it holds. Raises what
    Triton raises where a kernel cannot be compiled.
    """
    # A thread's GPU is the first one until it is told another.
    with ThreadPoolExecutor(most, "compile", initializer=torch.cuda.set_device, initargs=(device,)) as threads:
        kernels = _KernelsAhead(threads, processes)
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

    def __init__(self, threads: ThreadPoolExecutor, processes: CompileProcesses) -> None:
        self._threads, self._processes = threads, processes
        self._compiling: dict[str, tuple[Compile, Future[Any]]] = {}
        self._finish: list[tuple[str, Finish]] = []
        self._placeholder = Placeholder()

    def submit(self, key: str, compile_fn: Compile, finalize_fn: Finish, cleanup_fn: object = None) -> Placeholder:
        """Begin to compile a kernel that is launched for the first time. Triton calls this, and finds what is returned
        at the kernel's next launches, too. `cleanup_fn`: Triton 3.9 has it called for kernels that fail."""
        finalize_fn(self._placeholder)
        if key not in self._compiling:
            self._compiling[key] = compile_fn, self._threads.submit(self._compile_and_load, key, compile_fn)
        self._finish.append((key, finalize_fn))
        return self._placeholder

    def finish(self) -> None:
        """Wait for the kernels, and let Triton find them."""
        self._placeholder.is_over = True
        for key, finalize in self._finish:
            compile_fn, future = self._compiling[key]
            finalize(compile_fn() if future.exception() is not None else future.result())

    def _compile_and_load(self, key: str, compile_fn: Compile) -> Any:
        description = KernelDescription.of(compile_fn)
        if not _is_in_cache(key, description.source.name):
            self._processes.compile(description)
        kernel = compile_fn()  # finds it in the cache on disk
        kernel.run  # noqa: B018  # this property makes what launches the kernel, and loads both
        return kernel


def _is_in_cache(key: str, name: str) -> bool:
    """Tell whether Triton's cache on disk has a kernel, where `triton.compile` looks for it."""
    cache = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return cache.get_group(f"{name[:_MOST_NAME]}.json") is not None


class Placeholder:
    """A stand-in for a kernel that is compiled ahead. Its launches do nothing. Callers that keep compiled kernels must
    not keep it."""

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
