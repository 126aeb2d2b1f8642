"""How the processes of ranks are started, also before anything is known of the run."""

from __future__ import annotations

from nvcli.executor.child_process import ChildProcess
from nvcli.executor.wiring import RankStart, Wiring

RANK_ENVIRONMENT = {
    "GOMP_SPINCOUNT": "1000",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "false",
}
"""Environment variables that ranks get unless the user has set them.

Idle OpenMP threads spin for some microseconds and then sleep. Left to spin on a CPU they take the cores from the
engine, the parent and each other: a small model's step beside one busy process then takes 7 to 160 ms instead of 2.

NVLink multicast stays off: it takes a shared resource of the NVLink switches, which in a container or with a fabric
manager in a bad state fails or hangs at start, and nothing here needs it.

torch's warning about messages that are serialised with others of their group is off: each link between stages has a
group of its own."""


def start_rank(start: RankStart | None, wiring: Wiring, rank: int, *, is_output_rank: bool) -> ChildProcess:
    """Start the process of a rank. `start` None: it is sent later."""
    return ChildProcess(
        "nvcli.executor.worker:main",
        start,
        name=f"rank {rank}",
        pass_fds=wiring.rank_fds(rank, is_output_rank=is_output_rank),
        env=RANK_ENVIRONMENT,
    )


class RankAhead:
    """The process of a lone rank, which imports what all ranks import until it learns what it is to do."""

    def __init__(self) -> None:
        """Begin to start it. Raises as `resize_memory_file` does."""
        self.wiring = Wiring.create(1)
        self.child = start_rank(None, self.wiring, 0, is_output_rank=True)

    def close(self) -> None:
        """End the process, which is not used."""
        self.child.close()
        self.wiring.close()
