"""Compiles kernels into Triton's cache on disk, each in a process of its own.

Threads share the interpreter lock, which turning a kernel's Python into Triton's first form holds. Here one process
imports the kernels, and forks another for each that is to be compiled. Nothing of torch or Triton is imported by the
program that starts it, so that this takes place while the program imports them itself.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import os
import pickle
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from nvcli.core.system.process_control import end_with_parent, ignore_terminal

_MOST_BYTES = 1 << 17
"""The largest description of a kernel. They take a few kilobytes."""


@dataclass(frozen=True, slots=True)
class KernelDescription:
    """All that `triton.compile` needs for a kernel."""

    source: Any
    target: Any
    options: dict[str, Any]
    environment: dict[str, Any]

    @classmethod
    def of(cls, compile_fn: Callable[[], Any]) -> KernelDescription:
        """Describe the kernel that a closure of Triton's compiles."""
        names, cells = compile_fn.__code__.co_freevars, compile_fn.__closure__ or ()
        values = {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}
        return cls(values["src"], values["target"], values["options"].__dict__, values["env_vars"])

    @classmethod
    def unpacked(cls, data: bytes) -> KernelDescription:
        """Return what was `packed` in another process."""
        return cls(*_Unpickler(io.BytesIO(data)).load())

    def packed(self) -> bytes:
        """Return the description as bytes."""
        data = io.BytesIO()
        parts = (self.source, self.target, self.options, self.environment)
        _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(parts)
        return data.getvalue()

    def compile(self) -> None:
        """Compile the kernel into Triton's cache on disk."""
        from triton.compiler import compile

        compile(self.source, target=self.target, options=self.options, _env_vars=self.environment)


class CompileProcesses:
    """The process that forks others, as the program that wants kernels has it. It ends with the program, or when this
    is closed or forgotten."""

    def __init__(self) -> None:
        """Begin to start it. The thread that does so must live on."""
        self._orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(os.getpid()), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=2,  # standard output is for results
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    "OPENBLAS_NUM_THREADS": "1",  # threads are not there in processes that are forked
                    "OMP_NUM_THREADS": "1",
                },
            )
        self.close = weakref.finalize(self, _close, self._orders, process)

    def compile(self, description: KernelDescription) -> None:
        """Compile a kernel, and wait for it. Threads may call this at the same time. If it fails here, nothing is said:
        who needs the kernel will fail likewise, or compile it."""
        ours, theirs = socket.socketpair()
        with ours, contextlib.suppress(OSError):
            with theirs:
                socket.send_fds(self._orders, [description.packed()], [theirs.fileno()])
            ours.recv(1)  # the end of the process that has the other end


def hash_triton() -> None:
    """Import Triton, if it is there, and let it compute the hash of itself, of several hundred MB, which stands in the
    key of each kernel in its cache on disk. It keeps the hash, and computes it without the interpreter lock. Torch is
    not imported: it may be at the same time."""
    if import_triton():
        importlib.import_module("triton.runtime.cache").triton_key()


def import_triton() -> bool:
    """Import Triton, if it is there. Call this before a part of Triton is imported where other threads may do so too:
    the parts import one another, so that two threads which begin at different ones find some half made."""
    is_there = find_spec("triton") is not None
    if is_there:
        importlib.import_module("triton")
    return is_there


def import_kernels() -> None:
    """Import Triton and the modules that declare kernels, and wait until Triton knows the hash of itself."""
    import_triton()
    hashing = threading.Thread(target=hash_triton, name="hash-triton")
    hashing.start()
    package = importlib.import_module("nvcli.kernels.triton")
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
    hashing.join()


def _close(orders: socket.socket, process: subprocess.Popen[bytes]) -> None:
    orders.close()
    process.kill()  # it may still import, and those that it forked end with it
    process.wait()


class _Pickler(pickle.Pickler):
    """Names kernels, which the process that reads this has imported. The hash goes along, as that of Triton 3.6 depends
    on the kernels that were hashed before, and says where the compiled kernel is looked for."""

    def persistent_id(self, value: Any) -> tuple[str, str, str] | None:
        from triton.runtime.jit import JITFunction

        return (value.fn.__module__, value.fn.__qualname__, value.cache_key) if isinstance(value, JITFunction) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, named: tuple[str, str, str]) -> Any:
        module, name, key = named
        kernel = getattr(importlib.import_module(module), name)
        kernel.hash = key
        return kernel


def _serve(orders: socket.socket) -> None:
    """Fork a process for each kernel that is ordered, until the other end is closed."""
    while True:
        description, fds, _, _ = socket.recv_fds(orders, _MOST_BYTES, 1)
        if not description:
            return
        _fork(partial(_compile_kernel, description), orders)
        os.close(fds[0])


def _fork(work: Callable[[], object], orders: socket.socket) -> None:
    """Do some work in another process, which ends with this one. Where it fails, the program will meet that too."""
    parent_pid = os.getpid()
    if os.fork() == 0:
        end_with_parent(parent_pid, signal.SIGKILL)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it runs compilers
        orders.close()
        with contextlib.suppress(Exception):
            work()
        os._exit(0)


def _compile_kernel(description: bytes) -> None:
    KernelDescription.unpacked(description).compile()


def _compile_driver() -> None:
    """Compile Triton's own access to the driver, in C, into its cache on disk."""
    importlib.import_module("triton.backends.nvidia.driver").CudaUtils()


def _main() -> None:
    parent_pid, fd = map(int, sys.argv[1:])
    ignore_terminal()
    end_with_parent(parent_pid, signal.SIGKILL)
    orders = socket.socket(fileno=fd)
    orders.set_inheritable(False)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that are forked
    import_triton()
    _fork(_compile_driver, orders)
    import_kernels()
    gc.freeze()  # they share what is not touched
    _serve(orders)
    os._exit(0)


if __name__ == "__main__":
    _main()
