"""Executor: the ranks as the engine sees them. Steps go in, outputs come back, and no death goes unnoticed.

In every phase it waits on all ranks at once: on their sockets, which close when a rank dies, and on the outputs that
one of them posts.
"""

from __future__ import annotations

import contextlib
import select
import time
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from nvcli import errors
from nvcli.config import EngineConfig
from nvcli.errors import WorkerError
from nvcli.executor.channel import ChannelClosed, ChannelReader, ChannelSpec, ChannelWriter, close_fds
from nvcli.executor.process import ChildProcess
from nvcli.executor.status import StatusBoard
from nvcli.executor.worker import RankClosed, RankFailed, RankStart, StorePort
from nvcli.messages import EngineReady, StepInput, StepOutput, max_step_input_bytes, max_step_output_bytes

MODEL_RUNNER = "nvcli.runner.model_runner:create_runner"

_SPARE_SLOTS = 2
"""Messages in a channel beside those of the steps in flight: of steps whose outputs are being taken in."""

_BEHIND_SECONDS = 0.0005
"""How often to look whether a rank that fell behind has caught up."""

_STOPPED_CHECK_SECONDS = 0.5
"""How often to look, while ranks start, whether one was stopped."""

_RANK_ENVIRONMENT = {"GOMP_SPINCOUNT": "1000", "NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Defaults; what the user has set stays.

Idle OpenMP threads spin for some microseconds and then sleep. Left to spin on a CPU they take the cores from the
engine, the parent and each other: a small model's step beside one busy process took 7 to 160 ms, and 2 so.

NVLink multicast stays off: it takes a shared resource of the NVLink switches, which in a container or with a fabric
manager in a bad state fails or hangs at start, and nothing here needs it."""

_CULPRIT_SECONDS = 0.3
"""After a first failure, how long to listen for others: a rank that dies takes its peers' collectives with it."""


class Executor:
    """Spawns the ranks of a replica; closes when told to, or with its process."""

    def __init__(self, config: EngineConfig, runner: str = MODEL_RUNNER) -> None:
        self._config = config
        self._timeout = config.step_timeout
        size = config.num_ranks
        num_slots = config.max_steps_in_flight + _SPARE_SLOTS
        steps = ChannelSpec.create(
            max_step_input_bytes(
                max_num_seqs=config.max_num_seqs,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_model_len=config.max_model_len,
                max_blocks_per_seq=config.max_blocks_per_seq,
            ),
            num_readers=size,
            num_slots=num_slots,
        )
        outputs = ChannelSpec.create(
            max_step_output_bytes(max_num_seqs=config.max_num_seqs), num_readers=1, num_slots=num_slots
        )
        status_fd = StatusBoard.create(size)
        self._status = StatusBoard(status_fd, size)
        self._ranks: list[ChildProcess] = []
        for rank in range(size):
            start = RankStart(
                config=config,
                rank=rank,
                runner=runner,
                steps=steps,
                outputs=outputs,
                status_fd=status_fd,
                spawned_at=time.time(),
            )
            output_fds = outputs.writer_fds() if rank == config.output_rank else ()
            fds = (*steps.reader_fds(rank), *output_fds, status_fd)
            self._ranks.append(
                ChildProcess(
                    "nvcli.executor.worker:main", start, name=f"rank {rank}", pass_fds=fds, env=_RANK_ENVIRONMENT
                )
            )
        self._steps = ChannelWriter(steps)
        self._outputs = ChannelReader(outputs, 0)
        # Ours are closed so that the ranks' ends are the only ones: a dead rank then reads as end of file.
        close_fds(steps.read_fds + outputs.write_fds)
        close_fds((steps.memory_fd, outputs.memory_fd, status_fd))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(StepOutput)
        self._submitted: list[float] = []
        """Times of the steps whose outputs have not come back."""
        self._poll = select.poll()
        self._poll.register(self._outputs.fileno(), select.POLLIN)
        for child in self._ranks:
            self._poll.register(child.control.fileno(), select.POLLIN)

    # ------------------------------------------------------------------ start

    def wait_ready(self) -> EngineReady:
        """Rank 0's report with the memory of every rank, once all are ready.

        Loading takes as long as it takes, but a rank that was stopped by a signal is given `step_timeout` only. Raises
        what a rank failed with, or WorkerError.
        """
        ready: dict[int, EngineReady] = {}
        last_moving = time.monotonic()
        while len(ready) < len(self._ranks):
            self._poll.poll(_STOPPED_CHECK_SECONDS * 1000)
            if not any(_is_stopped(child.pid) for child in self._ranks):
                last_moving = time.monotonic()
            elif time.monotonic() - last_moving > self._timeout:
                raise WorkerError(self._describe_stuck())
            for rank, child in enumerate(self._ranks):
                while child.control.poll():
                    message = self._receive(rank)
                    if isinstance(message, EngineReady):
                        ready[rank] = message
                    elif isinstance(message, StorePort):
                        for other in self._ranks[1:]:
                            other.control.send(message)
        memory = [use for rank in range(len(self._ranks)) for use in ready[rank].memory]
        return msgspec.structs.replace(ready[0], memory=memory)

    # ------------------------------------------------------------------ steps

    def submit(self, step: StepInput) -> None:
        """Send a step to all ranks; returns at once unless a rank is several steps behind."""
        deadline = time.monotonic() + self._timeout
        while not self._steps.has_room:
            self.check()
            if time.monotonic() > deadline:
                raise WorkerError(self._describe_stuck())
            time.sleep(_BEHIND_SECONDS)
        try:
            self._steps.send(self._encoder.encode(step))
        except ChannelClosed:
            self._raise_failure()
        self._submitted.append(time.monotonic())

    def collect(self) -> StepOutput:
        """Output of the oldest submitted step; waits for it."""
        deadline = self._submitted[0] + self._timeout
        while not self._outputs.poll(0):
            events = self._poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not events:
                raise WorkerError(self._describe_stuck())
            if any(fd != self._outputs.fileno() for fd, _ in events):
                self._raise_failure()
        try:
            message = self._outputs.receive()
        except ChannelClosed:
            self._raise_failure()
        self._submitted.pop(0)
        return self._decoder.decode(message)

    def check(self) -> None:
        """Raise if a rank failed or died; for times when no step is in flight."""
        if any(fd != self._outputs.fileno() for fd, _ in self._poll.poll(0)):
            self._raise_failure()

    # ------------------------------------------------------------------ ends

    def close(self) -> list[int]:
        """End all ranks: they leave when their channel closes, or are killed. Idempotent.

        Gives `Runner.peak_bytes` of each rank that says it on leaving (`record_steps`); 0 for the others.
        """
        self._steps.close()
        deadline = time.monotonic() + 1.0
        peak_bytes = [self._last_word(child, deadline) for child in self._ranks]
        for child in self._ranks:
            child.close(max(0.0, deadline - time.monotonic()))
        self._outputs.close()
        return peak_bytes

    def _last_word(self, child: ChildProcess, deadline: float) -> int:
        with contextlib.suppress(EOFError, OSError):
            while child.control.poll(max(0.0, deadline - time.monotonic())):
                message = child.control.recv()
                if isinstance(message, RankClosed):
                    return message.peak_bytes
        return 0

    def _receive(self, rank: int) -> Any:
        """A rank's message; a failure or its end is raised."""
        child = self._ranks[rank]
        try:
            message = child.control.recv()
        except (EOFError, ConnectionResetError):
            self._raise_failure(dead={rank})
        if isinstance(message, RankFailed):
            self._raise_failure(failed={rank: message})
        return message

    def _raise_failure(self, failed: dict[int, RankFailed] | None = None, dead: set[int] | None = None) -> NoReturn:
        """Find out which rank is the cause, and raise.

        An error of the user's (checkpoint, capacity) comes first, then a rank that was killed or stopped, then other
        failures: the ranks that merely lost their peer fail last.
        """
        failed, dead = failed or {}, dead or set()
        deadline = time.monotonic() + _CULPRIT_SECONDS
        while (left := deadline - time.monotonic()) > 0 and len(failed) + len(dead) < len(self._ranks):
            for rank, child in enumerate(self._ranks):
                try:
                    if rank not in failed and rank not in dead and child.control.poll():
                        message = child.control.recv()
                        if isinstance(message, RankFailed):
                            failed[rank] = message
                except (EOFError, OSError):
                    dead.add(rank)
            time.sleep(min(left, 0.01))
        for failure in failed.values():
            if failure.kind != "WorkerError":
                raise errors.named(failure.kind, failure.message)
        for rank in sorted(dead):
            raise WorkerError(
                f"{self._describe(rank)} {self._ranks[rank].describe_exit()}; it was at: {self._status.describe(rank)}"
            )
        if any(_is_stopped(child.pid) for child in self._ranks):
            raise WorkerError(self._describe_stuck())
        for rank, failure in failed.items():
            where = self._status.describe(rank)
            name = self._config.rank_name(rank)
            raise WorkerError(f"{name} failed at {where}: {failure.message}\n{failure.traceback}".rstrip())
        raise WorkerError("a rank closed its channel for an unknown reason")

    def _describe(self, rank: int) -> str:
        return f"{self._config.rank_name(rank)} (pid {self._ranks[rank].pid})"

    def _describe_stuck(self) -> str:
        doing = []
        for rank, child in enumerate(self._ranks):
            state = " (stopped by a signal)" if _is_stopped(child.pid) else ""
            doing.append(f"{self._describe(rank)} at {self._status.describe(rank)}{state}")
        return f"no answer within step_timeout ({self._timeout:g} s); " + ", ".join(doing)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    except OSError:
        return False
