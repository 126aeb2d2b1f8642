"""ComparingRanks: the processes that hold both models, as the command sees them. Torch-free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, NoReturn

from nvcli import errors
from nvcli.core.engine_config import EngineConfig
from nvcli.errors import WorkerError
from nvcli.tools.quality.statistics import TokenSums
from nvcli.worker.distributed.rendezvous import create_store
from nvcli.worker.executor.child_process import ChildProcess
from nvcli.worker.executor.children import ChildDied, NoAnswer, collect_answers
from nvcli.worker.executor.rank_messages import RankFailed
from nvcli.worker.executor.ranks import RANK_ENVIRONMENT

_TARGET = "nvcli.tools.quality.rank:main"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareTask:
    """The argument of a rank."""

    configs: tuple[EngineConfig, EngineConfig]
    """The configurations of A and B, with equally many ranks and one stage."""
    rank: int
    store_fd: int
    """The store over which the ranks meet (`distributed.rendezvous`)."""
    max_tokens: int
    """The length of the longest passage."""


@dataclass(frozen=True, slots=True)
class PassageTask:
    """A passage to read with both models."""

    token_ids: bytes
    """Packed int32, at least one."""
    answer_start: int
    """The number of tokens whose successors belong to the prompt; all others but the last predict the answer."""


PassageSums = tuple[TokenSums, TokenSums]
"""A rank's reply to a PassageTask: sums over the predictions of the prompt and of the answer."""


class ComparingRanks:
    """Starts the ranks and has them compare passages. A context manager, which ends them on exit."""

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

    def __exit__(self, *error: object) -> None:
        for child in self._ranks:
            child.kill()
        for child in self._ranks:
            child.close()

    def wait_ready(self) -> tuple[str, ...]:
        """Wait until both models are loaded; return lines for the user. Raises what a rank failed with."""
        notes: tuple[str, ...] = self._collect(None)[0]
        return notes

    def compare(self, passage: PassageTask) -> PassageSums:
        """Let both models read a passage. Raises what a rank failed with."""
        for rank, child in enumerate(self._ranks):
            try:
                child.control.send(passage)
            except (BrokenPipeError, ConnectionResetError):
                self._raise_dead(rank)
        sums: PassageSums = self._collect(self._timeout)[0]
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
    if isinstance(message, RankFailed):
        raise errors.named(message.kind, message.message, message.traceback)
    return True
