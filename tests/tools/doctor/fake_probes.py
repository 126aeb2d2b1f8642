"""Probes that do what broken machines make real ones do."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from nvcli.errors import ConfigError
from nvcli.tools.doctor.all_reduce_rank import AllReduceResult, Phase


def hang(argument: Any, control: Connection) -> None:
    control.send(Phase("a long wait"))
    time.sleep(1000)


def hang_silently(argument: Any, control: Connection) -> None:
    time.sleep(1000)


def crash(argument: Any, control: Connection) -> None:
    print("some chatter", flush=True)
    raise OSError("libsomething.so: undefined symbol")


def refuse(argument: Any, control: Connection) -> None:
    raise ConfigError("loopback is down: ip link set lo up")


def be_killed(argument: Any, control: Connection) -> None:
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def answer(argument: Any, control: Connection) -> None:
    print("chatter", flush=True)
    control.send(argument)


def sum_wrongly(argument: Any, control: Connection) -> None:
    control.send(AllReduceResult(wrong="5 of 9 sums are wrong", small_seconds=1.0, large_seconds=1.0))


def work_without_peers(argument: Any, control: Connection) -> None:
    """Like a machine whose PCIe settings break access from one GPU to another."""
    if "NCCL_P2P_DISABLE" not in os.environ:
        raise OSError("unhandled cuda error")
    control.send(AllReduceResult(wrong="", small_seconds=1.0, large_seconds=1.0))


def tell_the_gpu(argument: Any, control: Connection) -> None:
    control.send(AllReduceResult(wrong=f"GPU {argument.gpu_index}", small_seconds=1.0, large_seconds=1.0))
