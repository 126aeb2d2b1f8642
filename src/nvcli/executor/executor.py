"""Executor: the ranks as the engine sees them. Steps go in, outputs come back, and no death goes unnoticed.

In every phase it waits on all ranks at once: on their sockets, which close when a rank dies, and on the outputs that
one of them posts.
"""

from __future__ import annotations

import contextlib
import select
import time
from dataclasses import replace
from typing import Any, NoReturn

import msgspec

from nvcli import errors
from nvcli.config import EngineConfig
from nvcli.errors import NvcliError, WorkerError
from nvcli.executor.channel import ChannelClosed, ChannelReader, ChannelWriter
from nvcli.executor.child_process import ChildProcess
from nvcli.executor.ranks import MODEL_RUNNER, RankAhead, RankStart, Wiring, start_rank
from nvcli.executor.status_board import StatusBoard
from nvcli.executor.worker import RankClosed, RankFailed, StepNotRun
from nvcli.messages import (
    MAX_KV_GROUPS,
    EngineReady,
    StepInput,
    StepOutput,
    max_step_input_bytes,
    max_step_output_bytes,
)

_SPARE_ENTRIES = 2
"""Messages that a channel has room for beside the steps in flight: steps whose outputs are being taken in."""

_BEHIND_SECONDS = 0.0005
"""Seconds between two checks whether a rank that fell behind has caught up."""

_STOPPED_CHECK_SECONDS = 0.5
"""Seconds between two checks, while ranks start, whether one was stopped by a signal."""

_LEAVING_SECONDS = 0.005
"""Seconds between two checks whether ranks that were told to leave have left."""

_CULPRIT_SECONDS = 0.3
"""Seconds to listen, after a first failure, for others: a rank that dies takes its peers' collectives with it."""


class Executor:
    """Starts the ranks of a replica, sends them steps, collects the outputs, and ends them. They die with its
    process."""

    def __init__(self, config: EngineConfig, runner: str = MODEL_RUNNER, ahead: RankAhead | None = None) -> None:
        """`ahead` is used, or ended where there are several ranks."""
        self._config = config
        self._runner = runner
        self._spawn(config, runner, ahead)

    def _spawn(self, config: EngineConfig, runner: str, ahead: RankAhead | None = None) -> None:
        self._timeout = config.step_timeout
        size = config.num_ranks
        if ahead is not None and size > 1:
            ahead.close()
            ahead = None
        wiring = (Wiring.create(size) if ahead is None else ahead.wiring).resized(
            steps=max_step_input_bytes(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=config.max_model_len,
                max_blocks_per_seq=config.max_blocks_per_seq * MAX_KV_GROUPS,  # how many groups, the ranks will say
            ),
            outputs=max_step_output_bytes(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                hidden_size=config.embedding_size,
            ),
            num_entries=config.max_steps_in_flight + _SPARE_ENTRIES,
        )
        self._status = StatusBoard(wiring.status_fd, size)
        self._ranks: list[ChildProcess] = []
        for rank in range(size):
            start = RankStart(config=config, rank=rank, runner=runner, wiring=wiring, spawned_at=time.time())
            if ahead is None:
                is_output_rank = rank == config.output_rank
                self._ranks.append(start_rank(start, wiring, rank, is_output_rank=is_output_rank))
            else:
                self._ranks.append(ahead.child)
                ahead.child.send(start)
        self._steps = ChannelWriter(wiring.steps)
        self._outputs = ChannelReader(wiring.outputs, 0)
        wiring.close_theirs()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepOutput)
        self._submitted: list[tuple[int, float]] = []
        """(id, time) of each submitted step whose output has not come back."""
        self._collected_at = 0.0
        """The time of the last output. A step's timeout starts no earlier, since the step waits for those before it."""
        self._out_of_memory: StepNotRun | None = None
        """The message, among those of ranks whose memory ran out, that names the earliest step that did not run."""
        self._poll = select.poll()
        self._poll.register(self._outputs.fileno(), select.POLLIN)
        for child in self._ranks:
            self._poll.register(child.control.fileno(), select.POLLIN)

    # ------------------------------------------------------------------ start

    def wait_ready(self) -> EngineReady:
        """Wait until all ranks are ready; return rank 0's report with the memory of every rank.

        There is no limit to the time that loading takes, but a rank that was stopped by a signal has `step_timeout`
        only. Raises the error that a rank failed with, or WorkerError.
        """
        ready: dict[int, EngineReady] = {}
        last_moving = time.monotonic()
        while len(ready) < len(self._ranks):
            self._poll.poll(_STOPPED_CHECK_SECONDS * 1000)
            if not any(child.is_stopped for child in self._ranks):
                last_moving = time.monotonic()
            elif time.monotonic() - last_moving > self._timeout:
                raise WorkerError(self._describe_stuck())
            for rank, child in enumerate(self._ranks):
                while child.control.poll():
                    message = self._receive(rank)
                    if isinstance(message, EngineReady):
                        ready[rank] = message
        assert len(ready[0].kv_groups) <= MAX_KV_GROUPS, "steps may not fit the channel"
        memory = [use for rank in range(len(self._ranks)) for use in ready[rank].memory]
        self._num_blocks = ready[0].num_blocks
        return msgspec.structs.replace(ready[0], memory=memory)

    # ------------------------------------------------------------------ steps

    def submit(self, step: StepInput) -> None:
        """Send a step to all ranks. It returns at once unless a rank is several steps behind."""
        deadline = time.monotonic() + self._timeout
        while not self._steps.has_room and self._out_of_memory is None:
            self.check()
            if time.monotonic() > deadline:
                raise WorkerError(self._describe_stuck())
            time.sleep(_BEHIND_SECONDS)
        if self._out_of_memory is None:
            try:
                self._steps.send(self._encoder.encode(step))
            except ChannelClosed:
                self._raise_failure()
        self._submitted.append((step.step_id, time.monotonic()))

    def collect(self) -> StepOutput:
        """Wait for the output of the oldest submitted step, and return it."""
        step_id, submitted_at = self._submitted[0]
        deadline = max(submitted_at, self._collected_at) + self._timeout
        while True:
            if self._out_of_memory is not None and self._out_of_memory.step_id <= step_id:
                self._submitted.pop(0)
                return replace(self._out_of_memory, step_id=step_id).result()
            if self._outputs.poll(0):
                break
            events = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not events:
                raise WorkerError(self._describe_stuck())
            if any(fd != self._outputs.fileno() for fd, _ in events):
                self._poll_ranks()
        try:
            message = self._outputs.receive()
        except ChannelClosed:
            self._raise_failure()
        self._submitted.pop(0)
        self._collected_at = time.monotonic()
        return self._decoder.decode(message)

    def check(self) -> None:
        """Raise the error of a rank that failed or died. It is called when no step is in flight."""
        if any(fd != self._outputs.fileno() for fd, _ in self._poll.poll(0)):
            self._poll_ranks()

    def recover(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> int | None:
        """Go on with these limits after a step that ran out of memory; no step may be in flight.

        A lone rank goes on as it is, and the result is None. Several ranks are ended and started anew, and the result
        is the number of their KV blocks, which hold nothing. That takes as long as the start and raises what
        `wait_ready` raises; it may be called again after LimitsTooHigh.
        """
        assert not self._submitted
        if len(self._ranks) == 1:
            return None
        self._end(deadline=0.0)
        self._config = msgspec.structs.replace(
            self._config,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_blocks_before=self._num_blocks,
        )
        self._spawn(self._config, self._runner)
        return self.wait_ready().num_blocks

    # ------------------------------------------------------------------ ends

    def close(self) -> list[int]:
        """End all ranks: they leave when their channel closes, or are killed. Idempotent.

        Returns the `Runner.peak_bytes` of each rank, or 0 for a rank that did not report it (`record_steps`).
        """
        self._steps.close()
        deadline = time.monotonic() + 1.0
        peak_bytes = [self._receive_peak_bytes(child, deadline) for child in self._ranks]
        self._end(deadline)
        return peak_bytes

    def _end(self, deadline: float) -> None:
        """Wait for the ranks to leave until `deadline`, then kill those that have not.

        They are killed all at once, since a process with a GPU takes its time to go.
        """
        self._steps.close()
        while time.monotonic() < deadline and any(child.is_alive for child in self._ranks):
            time.sleep(_LEAVING_SECONDS)
        for child in self._ranks:
            child.kill()
        for child in self._ranks:
            child.close()
        self._outputs.close()

    def _receive_peak_bytes(self, child: ChildProcess, deadline: float) -> int:
        """Wait until `deadline` for a leaving rank's most memory, in bytes; 0 if it reports none."""
        with contextlib.suppress(EOFError, OSError):
            while child.control.poll(max(0.0, deadline - time.monotonic())):
                message = child.control.recv()
                if isinstance(message, RankClosed):
                    return message.peak_bytes
        return 0

    def _receive(self, rank: int) -> Any:
        """Receive a rank's message. Its failure or its end is raised."""
        child = self._ranks[rank]
        try:
            message = child.control.recv()
        except (EOFError, ConnectionResetError):
            self._raise_failure(dead={rank})
        if isinstance(message, RankFailed):
            self._raise_failure(failed={rank: message})
        return message

    def _poll_ranks(self) -> None:
        """Read the ranks' messages while steps run: keep those of memory that ran out, raise a rank's error."""
        error = self._find_cause({}, set())
        if error is not None:
            raise error

    def _raise_failure(self, failed: dict[int, RankFailed] | None = None, dead: set[int] | None = None) -> NoReturn:
        error = self._find_cause(failed or {}, dead or set())
        raise error or WorkerError("a rank closed its channel for an unknown reason")

    def _find_cause(self, failed: dict[int, RankFailed], dead: set[int]) -> NvcliError | None:
        """Read the messages of all ranks for a moment, and find out which one is the cause of a failure.

        Returns None if no rank has failed; if one ran out of memory, `_out_of_memory` keeps its message.

        An error of the user's (checkpoint, capacity) comes first, then a rank that was killed or stopped, then other
        failures: the ranks that merely lost their peer fail last.
        """
        short: set[int] = set()
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
                            if self._out_of_memory is None or message.step_id < self._out_of_memory.step_id:
                                self._out_of_memory = message
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
