"""Runs the command as a copy of one process that has imported torch and transformers, as a new interpreter would.

In an interpreter of its own a command takes a second for its imports, and each rank another two. All else is as for
users: processes with ids, descriptors, signals, process groups and exit codes of their own, and the same parents.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver, resource_tracker, util
from multiprocessing.connection import wait
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NoReturn

import pytest

CHILD_MODULE = "nvcli.worker.executor.child_process"
HAS_GPU = Path("/dev/nvidiactl").exists()
"""Then all processes are new interpreters: CUDA may have been opened by an import, and a copy could not use it."""
_Popen = subprocess.Popen  # which may be replaced
_THREAD_NAME = Path("/proc/thread-self/comm")
_ONE_AT_A_TIME = threading.Lock()
"""Whoever starts a process asks for the ends of the others, and an end can be read once."""


def warm_context() -> Any:
    """Return a context of multiprocessing, whose processes are copies of one that has imported `warm_imports`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm_imports"])
    if not forkserver._forkserver._forkserver_pid:  # type: ignore[attr-defined]
        with pytest.MonkeyPatch.context() as patch:  # Python 3.11 tells it the path in no other way
            patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
            forkserver.ensure_running()
    return context


class WarmPopen(subprocess.Popen[Any]):
    """`subprocess.Popen` of a Python that is a copy: `[sys.executable, "-m", MODULE or SCRIPT, …]`."""

    _process: Any = None

    def _execute_child(self, args: Any, *options: Any) -> None:
        if HAS_GPU:
            super()._execute_child(args, *options)  # type: ignore[misc]
            return
        _executable, _preexec, _close, pass_fds, cwd, env, _info, _flags, _shell, *pipes = options[:15]
        new_session, process_group = options[-2:]
        stdin, _, _, stdout, _, stderr = pipes
        streams = [_Descriptor(own if number == -1 else number) for own, number in enumerate((stdin, stdout, stderr))]
        self._process = warm_context().Process(
            target=_run_command,
            args=(list(map(str, args)), streams, dict(os.environ if env is None else env), str(cwd or Path.cwd())),
            kwargs={
                "fds": {number: _Descriptor(number) for number in pass_fds},
                "new_session": new_session,
                "new_group": process_group == 0,
            },
            daemon=True,
        )
        with _ONE_AT_A_TIME:
            self._process.start()
        self.pid = self._process.pid
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        if self._process is None:
            return super()._internal_poll(_deadstate)  # type: ignore[misc, no-any-return]
        # With a `_deadstate` the collector asks, maybe in the thread that holds the lock, and asks again later.
        if _ONE_AT_A_TIME.acquire(blocking=_deadstate is None):
            try:
                self.returncode = self._process.exitcode
            finally:
                _ONE_AT_A_TIME.release()
        return self.returncode

    def _wait(self, timeout: float | None) -> int | None:
        if self._process is None:
            return super()._wait(timeout)  # type: ignore[misc, no-any-return]
        if not wait([self._process.sentinel], timeout):
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self._internal_poll()


class _EngineOrInterpreter(WarmPopen):
    """`subprocess.Popen`, by which engines are copies and other processes are not."""

    def _execute_child(self, args: Any, *options: Any) -> None:
        kind = WarmPopen if CHILD_MODULE in args else _Popen
        kind._execute_child(self, args, *options)  # type: ignore[attr-defined]


@contextlib.contextmanager
def engines_are_copies() -> Iterator[None]:
    """Engines that this process starts meanwhile are copies too, and so are their ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", _EngineOrInterpreter)
        yield


def run_warm(
    args: list[str], *, input: Any = None, capture_output: bool = False, timeout: float = 120.0, **options: Any
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` of a `WarmPopen`."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with WarmPopen(args, **options) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(args, process.returncode, output, errors)


CLIENT = """#!{python} -SE
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
request = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
socket.send_fds(server, [request], [0, 1, 2])
code = int(server.recv(9))
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""
"""A program that has a server run a command with its own streams, folder and environment, and ends as that does."""


@contextlib.contextmanager
def serve_commands(address: Path, script: Path) -> Iterator[None]:
    """Run a script as a `WarmPopen` for each `CLIENT` that asks for it, with the arguments of the client."""

    def serve() -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                threading.Thread(target=answer, args=server.accept()[:1]).start()

    def answer(client: socket.socket) -> None:
        with client:
            request, streams, _, _ = socket.recv_fds(client, 1 << 20, 3)
            arguments, folder, environ = json.loads(request)
            stdin, stdout, stderr = streams
            command = [sys.executable, str(script), *arguments]
            process = WarmPopen(command, cwd=folder, env=environ, stdin=stdin, stdout=stdout, stderr=stderr)
            for number in streams:
                os.close(number)
            client.sendall(b"%d" % process.wait())

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(address))
        server.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)
            thread.join()


class _Descriptor:
    """A file descriptor of this process, of which one that is started gets a duplicate."""

    def __init__(self, number: int) -> None:
        self._number = number

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detached, (DupFd(self._number),)


def _detached(descriptor: Any) -> int:
    return int(descriptor.detach())


class _CopyOrInterpreter(subprocess.Popen[Any]):
    """`subprocess.Popen` in a warm process: the processes that nvcli's `ChildProcess` starts are copies of it."""

    def _execute_child(self, args: Any, *options: Any) -> None:
        if CHILD_MODULE not in args:
            super()._execute_child(args, *options)  # type: ignore[misc]
            return
        _executable, _preexec, _close, pass_fds, _cwd, env, _info, _flags, _shell, *pipes = options[:15]
        stdin, _, _, stdout, _, stderr = pipes
        sys.stdout.flush()
        sys.stderr.flush()
        own_arguments = args[args.index(CHILD_MODULE) :]
        before = _THREAD_NAME.read_text()
        # A copy has its name from its first moment on: it is found by that, and there is no command line to go by.
        _THREAD_NAME.write_text(own_arguments[1].partition(":")[0].rpartition(".")[2][:15])
        # A signal that comes before the copy has left the handlers of its original behind waits until then.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        self.pid = os.fork()
        if self.pid == 0:
            os.setpgid(0, 0)
            _begin(own_arguments, [stdin, stdout, stderr], env, kept=pass_fds)
            from nvcli.worker.executor.child_process import _main

            _end_with(_main)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _THREAD_NAME.write_text(before)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _run_command(
    args: list[str],
    streams: list[int],
    env: dict[str, str],
    cwd: str,
    *,
    fds: dict[int, int],
    new_session: bool,
    new_group: bool,
) -> NoReturn:
    """`fds`: the numbers that descriptors are to have, and those that they have."""
    assert "warm_imports" in sys.modules, "the forkserver has not imported what it should"
    os.chdir(cwd)
    if new_session:
        os.setsid()
    if new_group:
        os.setpgid(0, 0)
    is_module = "-m" in args[1:3]
    main, *arguments = args[args.index("-m") + 1 :] if is_module else args[1:]
    first_free = max([2, *fds]) + 1
    own = {number: fcntl.fcntl(fd, fcntl.F_DUPFD, first_free) for number, fd in fds.items()}
    streams = [fcntl.fcntl(fd, fcntl.F_DUPFD, first_free) for fd in streams]
    for number, fd in own.items():
        os.dup2(fd, number)
    _begin([main, *arguments], streams, env, kept=tuple(fds))
    _THREAD_NAME.write_text("nvcli")
    subprocess.Popen = _CopyOrInterpreter  # type: ignore[misc]
    if main == CHILD_MODULE:
        sys.argv[-1] = str(os.getppid())  # the process that this one is to end with
        from nvcli.worker.executor.child_process import _main

        _end_with(_main)
    if is_module:
        _end_with(lambda: runpy.run_module(main, run_name="__main__", alter_sys=True))
    _end_with(lambda: runpy.run_path(main, run_name="__main__"))


def _begin(argv: list[str], streams: list[int], env: Mapping[str, str], *, kept: tuple[int, ...] = ()) -> None:
    """Leave behind what a copy has of its original and an interpreter has not: descriptors, environment, handlers."""
    gc.freeze()  # what is open in objects of the original is closed below, and never by them
    for own, number in enumerate(streams):
        if number not in (-1, own):
            os.dup2(number, own)
    first = 3
    for number in sorted(kept):
        os.closerange(first, number)
        first = number + 1
    os.closerange(first, os.sysconf("SC_OPEN_MAX"))
    multiprocessing.set_start_method(None, force=True)  # type: ignore[arg-type]  # the usual one
    resource_tracker._resource_tracker.__init__()  # type: ignore[misc]  # the descriptor of the other one is closed
    os.environ.clear()
    os.environ.update(env)
    sys.argv = argv
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with contextlib.suppress(OSError, ValueError):  # threads use it
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115


def _end_with(main: Callable[[], Any]) -> NoReturn:
    """Run the main module and end the process as the interpreter does."""
    code: Any = 1
    is_interrupted = False
    try:
        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        traceback.print_exc()
        is_interrupted = isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    util._exit_function()  # which processes of multiprocessing call where interpreters have it registered
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    if is_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def warm_children() -> list[str]:
    """Return the commands of the copies that have not ended."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    tasks = Path(f"/proc/{pid}/task")
    ids = [child for task in tasks.glob("*") for child in (task / "children").read_text().split()] if pid else []
    names = []
    for child in ids:
        with contextlib.suppress(OSError):  # it has ended
            names.append(Path(f"/proc/{child}/comm").read_text().strip())
    return names
