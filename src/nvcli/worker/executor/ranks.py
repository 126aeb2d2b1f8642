"""Starts ranks, if need be before anything is known about the run: processes, argument and inherited descriptors."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nvcli.core.engine_config import EngineConfig
from nvcli.worker.distributed.rendezvous import create_store
from nvcli.worker.executor.channel import ChannelSpec, close_fds
from nvcli.worker.executor.child_process import ChildProcess
from nvcli.worker.executor.rank_messages import StatusBoard

RANK_ENVIRONMENT = {
    "GOMP_SPINCOUNT": "1000",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
    "TRITON_DEFAULT_FP_FUSION": "1",
}
"""Environment variables that ranks get unless the user has set them.

Idle OpenMP threads spin for a few microseconds and then sleep. If left to spin on a CPU, they take cores from the
engine, the parent and each other: beside one busy process, a small model's step then takes 7 to 160 ms instead of 2.

NVLink multicast stays off: it takes a shared resource of the NVLink switches. In a container, or with a fabric manager
in a bad state, it fails or hangs at start, and nothing here needs it.

torch's warning about messages being serialised with others of their group is off, because each link between stages has
its own group.

Kernels are compiled with products and sums fused (FMA), as up to Triton 3.9 by default, which warns where nobody says
so: 3.10 will part them.
"""

MODEL_RUNNER = "nvcli.worker.runner.model_runner:ModelRunner"


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
        """Create everything except the room for messages (`resized`). Raises as `resize_memory_file` does."""
        steps, outputs = ChannelSpec.create(0, num_readers=num_ranks), ChannelSpec.create(0, num_readers=1)
        return Wiring(steps, outputs, StatusBoard.create(num_ranks), create_store())

    def resized(self, *, steps: int, outputs: int, num_entries: int) -> Wiring:
        """Return the wiring with room for messages of these sizes. Raises as `resize_memory_file` does."""
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
        """Close everything; nothing may have been opened yet."""
        self.close_theirs()
        close_fds(self.steps.write_fds + self.outputs.read_fds)

    def close_theirs(self) -> None:
        """Close what the executor does not need once it has opened its ends. Then only the ranks hold their ends, and a
        dead rank reads as end of file."""
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
    """`time.monotonic()` of the executor."""


def start_rank(start: RankStart | None, wiring: Wiring, rank: int, *, is_output_rank: bool) -> ChildProcess:
    """Start the process of a rank. `start` None: it is sent later."""
    return ChildProcess(
        "nvcli.worker.executor.worker:main",
        start,
        name=f"rank {rank}",
        pass_fds=wiring.rank_fds(rank, is_output_rank=is_output_rank),
        env=RANK_ENVIRONMENT,
    )


class RankAhead:
    """The process of a lone rank, started early. It imports what every rank needs until its argument arrives."""

    def __init__(self) -> None:
        """Begin to start the process. Raises as `resize_memory_file` does."""
        self.wiring = Wiring.create(1)
        self.child = start_rank(None, self.wiring, 0, is_output_rank=True)

    def close(self) -> None:
        """End the process unused."""
        self.child.close()
        self.wiring.close()
