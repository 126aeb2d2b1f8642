"""ComparingRanks: the processes that hold both models, as the command sees them. Torch-free."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, NoReturn

from nvcli import errors
from nvcli.core.engine_config import EngineConfig
from nvcli.errors import WorkerError
from nvcli.tools.quality.rank_messages import CompareFailed, CompareReady, CompareTask, PassageSums, PassageTask
from nvcli.worker.distributed.rendezvous import create_store
from nvcli.worker.executor.child_process import ChildProcess
from nvcli.worker.executor.children import ChildDied, NoAnswer, collect_answers
from nvcli.worker.executor.ranks import RANK_ENVIRONMENT

_TARGET = "nvcli.tools.quality.rank:main"


class ComparingRanks:
    """Starts the ranks, and has them compare passages. Use it as a context manager: at the end they are gone."""

    def __init__(self, configs: tuple[EngineConfig, EngineConfig], *, max_tokens: int) -> None:
        """`configs` are those of A and B; `max_tokens` is the length of the longest passage."""
        self._timeout = configs[0].step_timeout
        self._name = configs[0].rank_name
        self._ranks: list[ChildProcess] = []
        store_fd = create_store()
        try:
            for rank in range(configs[0].tensor_parallel_size):
                task = CompareTask(configs=configs, rank=rank, store_fd=store_fd, max_tokens=max_tokens)
                child = ChildProcess(_TARGET, task, name=f"rank {rank}", pass_fds=(store_fd,), env=RANK_ENVIRONMENT)
                self._ranks.append(child)
        finally:
            os.close(store_fd)

    def __enter__(self) -> ComparingRanks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._ranks:
            child.kill()
        for child in self._ranks:
            child.close()

    def wait_ready(self) -> tuple[str, ...]:
        """Wait until both models are loaded; return lines for the user. Raises what a rank failed with."""
        ready = self._collect(None)[0]
        assert isinstance(ready, CompareReady)
        return ready.notes

    def compare(self, passage: PassageTask) -> PassageSums:
        """Have both models read a passage. Raises what a rank failed with."""
        for rank, child in enumerate(self._ranks):
            try:
                child.control.send(passage)
            except (BrokenPipeError, ConnectionResetError):
                self._raise_dead(rank)
        sums = self._collect(self._timeout)[0]
        assert isinstance(sums, PassageSums)
        return sums

    def _collect(self, timeout: float | None) -> list[Any]:
        """Return one message of each rank."""
        try:
            return collect_answers(self._ranks, timeout=timeout, is_answer=_is_answer)
        except NoAnswer as error:
            missing = ", ".join(map(self._name, error.missing))
            raise WorkerError(f"{missing} did not answer within {timeout:g} s (step_timeout)") from None
        except ChildDied as error:
            self._raise_dead(error.number)

    def _raise_dead(self, rank: int) -> NoReturn:
        child = self._ranks[rank]
        raise WorkerError(f"{self._name(rank)} (pid {child.pid}) {child.describe_exit()} while it compared")


def _is_answer(rank: int, message: object) -> bool:
    if isinstance(message, CompareFailed):
        raise errors.named(message.kind, message.message, message.traceback)
    return True
