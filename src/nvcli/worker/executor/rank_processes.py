"""RankProcesses: starts a replica's ranks, exchanges messages with them other than steps, and finds the cause of
failures."""

from __future__ import annotations

import contextlib
import select
import time
from typing import Any, NoReturn, TypeVar

import msgspec

from nvcli import errors
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import EngineReady
from nvcli.core.weight_changes import WeightsChanged
from nvcli.errors import NvcliError, WorkerError
from nvcli.worker.executor.child_process import ChildProcess
from nvcli.worker.executor.rank_messages import RankClosed, RankFailed, StatusBoard, StepNotRun
from nvcli.worker.executor.ranks import RankAhead, RankStart, Wiring, start_rank

Message = TypeVar("Message")

_STOPPED_CHECK_SECONDS = 0.5
"""Seconds between checks, while ranks start, whether a signal has stopped one."""

_LEAVING_SECONDS = 0.005
"""Seconds between checks whether ranks that were told to leave have left."""

_CULPRIT_SECONDS = 0.3
"""Seconds to listen for other failures after the first: a dying rank breaks its peers' collectives."""


class RankProcesses:
    """Starts the ranks, and ends them. It waits on all of them at once: their sockets close when they die."""

    def __init__(self, config: EngineConfig, runner: str, wiring: Wiring, ahead: RankAhead | None) -> None:
        """`ahead` is a lone rank that was started earlier, with this wiring."""
        self._config, self._timeout = config, config.step_timeout
        self._status = StatusBoard(wiring.status_fd, config.num_ranks)
        self._ranks: list[ChildProcess] = []
        for rank in range(config.num_ranks):
            start = RankStart(config=config, rank=rank, runner=runner, wiring=wiring, spawned_at=time.monotonic())
            if ahead is None:
                is_output_rank = rank == config.output_rank
                self._ranks.append(start_rank(start, wiring, rank, is_output_rank=is_output_rank))
            else:
                self._ranks.append(ahead.child)
                ahead.child.send(start)
        self._failed: dict[int, RankFailed] = {}
        """Rank → its last message, if it failed."""
        self._dead: set[int] = set()
        """Ranks that closed their sockets without one."""
        self.out_of_memory: StepNotRun | None = None
        """The earliest step that did not run, as reported by ranks that ran out of memory; None if none did."""

    def __len__(self) -> int:
        return len(self._ranks)

    def register(self, poll: select.poll) -> None:
        """Register the ranks' sockets with a poll, which then tells when one says something or ends."""
        for child in self._ranks:
            poll.register(child.control.fileno(), select.POLLIN)

    def wait_ready(self) -> EngineReady:
        """Wait until all ranks are ready; return rank 0's report with the memory of every rank. Raises as `_wait_for`
        does."""
        ready = self._wait_for(EngineReady)
        return msgspec.structs.replace(ready[0], memory=[use for each in ready for use in each.memory])

    def wait_changed(self) -> WeightsChanged:
        """Wait until all ranks have answered a `WeightsChange`; return the first rank's error, if one has an error.
        Raises as `_wait_for` does."""
        changed = self._wait_for(WeightsChanged)
        return next((each for each in changed if each.error_kind), changed[0])

    def _wait_for(self, kind: type[Message]) -> list[Message]:
        """Wait for a message of this kind from each rank.

        Loading may take any time, but a rank stopped by a signal has only `step_timeout`. Raises the error that a rank
        failed with, or WorkerError.
        """
        found: dict[int, Message] = {}
        poll = select.poll()
        self.register(poll)
        last_moving = time.monotonic()
        while len(found) < len(self._ranks):
            poll.poll(_STOPPED_CHECK_SECONDS * 1000)
            if not any(child.is_stopped for child in self._ranks):
                last_moving = time.monotonic()
            elif time.monotonic() - last_moving > self._timeout:
                self.raise_stuck()
            for rank, child in enumerate(self._ranks):
                while child.control.poll():
                    message = self._receive(rank)
                    if isinstance(message, kind):
                        found[rank] = message
        return [found[rank] for rank in range(len(self._ranks))]

    def check(self) -> None:
        """Read the ranks' messages while steps run: note those about running out of memory, raise a rank's error."""
        if (error := self._find_cause()) is not None:
            raise error

    def raise_failure(self) -> NoReturn:
        """Raise the error behind a rank's failure or death."""
        raise self._find_cause() or WorkerError("a rank closed its channel for an unknown reason")

    def raise_stuck(self) -> NoReturn:
        """Raise a WorkerError for ranks that do not answer."""
        raise WorkerError(self._describe_stuck())

    def peak_bytes(self, deadline: float) -> list[int]:
        """Wait until `deadline` for leaving ranks to report their `Runner.peak_bytes`; 0 for a rank that reports
        none."""
        return [self._receive_peak_bytes(child, deadline) for child in self._ranks]

    def end(self, deadline: float) -> None:
        """Wait for the ranks to leave until `deadline`, then kill those that have not.

        They are killed all at once, since a process with a GPU needs time to exit.
        """
        while time.monotonic() < deadline and any(child.is_alive for child in self._ranks):
            time.sleep(_LEAVING_SECONDS)
        for child in self._ranks:
            child.kill()
        for child in self._ranks:
            child.close()

    def _receive_peak_bytes(self, child: ChildProcess, deadline: float) -> int:
        """Wait until `deadline` for a leaving rank's most memory, in bytes; 0 if it reports none."""
        with contextlib.suppress(EOFError, OSError):
            while child.control.poll(max(0.0, deadline - time.monotonic())):
                message = child.control.recv()
                if isinstance(message, RankClosed):
                    return message.peak_bytes
        return 0

    def _receive(self, rank: int) -> Any:
        """Receive a rank's message. Raises if the rank failed or ended."""
        child = self._ranks[rank]
        try:
            message = child.control.recv()
        except (EOFError, ConnectionResetError):
            self._dead.add(rank)
            self.raise_failure()
        if isinstance(message, RankFailed):
            self._failed[rank] = message
            self.raise_failure()
        return message

    def _find_cause(self) -> NvcliError | None:
        """Read the messages of all ranks for a moment, and find which rank caused a failure.

        Returns None if no rank has failed; if one ran out of memory, `out_of_memory` keeps its message.

        A user's error (checkpoint, capacity) comes first, then a rank that was killed or stopped, then other failures;
        ranks that merely lost a peer come last.
        """
        failed, dead, short = self._failed, self._dead, set[int]()
        deadline = time.monotonic() + _CULPRIT_SECONDS
        while (left := deadline - time.monotonic()) > 0 and len({*failed, *dead, *short}) < len(self._ranks):
            for rank, child in enumerate(self._ranks):
                try:
                    if rank not in failed and rank not in dead and child.control.poll():
                        message = child.control.recv()
                        if isinstance(message, RankFailed):
                            failed[rank] = message
                        elif isinstance(message, StepNotRun):
                            short.add(rank)
                            if self.out_of_memory is None or message.step_id < self.out_of_memory.step_id:
                                self.out_of_memory = message
                except (EOFError, OSError):
                    dead.add(rank)
            time.sleep(min(left, 0.01))
        for failure in failed.values():
            if failure.kind != "WorkerError":
                return errors.named(failure.kind, failure.message)
        for rank in sorted(dead):
            return WorkerError(
                f"{self._describe(rank)} {self._ranks[rank].describe_exit()}; it was at: {self._status.describe(rank)}"
            )
        if any(child.is_stopped for child in self._ranks):
            return WorkerError(self._describe_stuck())
        for rank, failure in failed.items():
            where = self._status.describe(rank)
            name = self._config.rank_name(rank)
            return WorkerError(f"{name} failed at {where}: {failure.message}", failure.traceback)
        return None

    def _describe(self, rank: int) -> str:
        return f"{self._config.rank_name(rank)} (pid {self._ranks[rank].pid})"

    def _describe_stuck(self) -> str:
        doing = []
        for rank, child in enumerate(self._ranks):
            state = " (stopped by a signal)" if child.is_stopped else ""
            doing.append(f"{self._describe(rank)} at {self._status.describe(rank)}{state}")
        return f"no answer within step_timeout ({self._timeout:g} s); " + ", ".join(doing)
