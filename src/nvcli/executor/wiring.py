"""What the processes of ranks are started with: their argument, and the descriptors that they inherit."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nvcli.config import EngineConfig
from nvcli.distributed.rendezvous import create_store
from nvcli.executor.channel import ChannelSpec, close_fds
from nvcli.executor.status_board import StatusBoard

MODEL_RUNNER = "nvcli.runner.model_runner:create_runner"


@dataclass(frozen=True, slots=True)
class Wiring:
    """The channels and memory that the ranks of a replica share with their executor."""

    steps: ChannelSpec
    outputs: ChannelSpec
    status_fd: int
    store_fd: int
    """The store over which the ranks meet (`distributed.rendezvous`)."""

    @staticmethod
    def create(num_ranks: int) -> Wiring:
        """Make all but the room for messages (`resized`). Raises as `resize_memory_file` does."""
        steps, outputs = ChannelSpec.create(0, num_readers=num_ranks), ChannelSpec.create(0, num_readers=1)
        return Wiring(steps, outputs, StatusBoard.create(num_ranks), create_store())

    def resized(self, *, steps: int, outputs: int, num_entries: int) -> Wiring:
        """Return the wiring with room for so many messages of so many bytes. Raises as `resize_memory_file` does."""
        return replace(
            self,
            steps=self.steps.resized(steps, num_entries=num_entries),
            outputs=self.outputs.resized(outputs, num_entries=num_entries),
        )

    def rank_fds(self, rank: int, *, is_output_rank: bool) -> tuple[int, ...]:
        """Return the descriptors to pass to the process of a rank."""
        output_fds = self.outputs.writer_fds() if is_output_rank else ()
        return (*self.steps.reader_fds(rank), *output_fds, self.status_fd, self.store_fd)

    def close(self) -> None:
        """Close all of it, which nobody has opened."""
        self.close_theirs()
        close_fds(self.steps.write_fds + self.outputs.read_fds)

    def close_theirs(self) -> None:
        """Close all that the executor does not need once it has opened its ends. The ranks' ends are then the only
        ones: a dead rank reads as end of file."""
        close_fds(self.steps.read_fds + self.outputs.write_fds)
        close_fds((self.steps.memory_fd, self.outputs.memory_fd, self.status_fd, self.store_fd))


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStart:
    """The argument of a rank's process."""

    config: EngineConfig
    rank: int
    runner: str
    """`module:function`, called with (config, RankContext)."""
    wiring: Wiring
    spawned_at: float
    """`time.time()` of the executor."""
