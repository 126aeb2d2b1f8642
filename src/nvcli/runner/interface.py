"""What a rank's process expects of a runner, and what it gives to one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from nvcli.messages import EngineReady, StepInput, StepOutput


class PendingOutput(Protocol):
    """A launched step's output, which may still be on its way from the device."""

    def result(self) -> StepOutput:
        """Waits for the step's tokens. Called on another thread than `Runner.launch`."""
        ...


class Runner(Protocol):
    """Runs steps on one rank."""

    @property
    def ready(self) -> EngineReady:
        """What the engine needs to know once the runner is made."""
        ...

    def launch(self, step: StepInput) -> PendingOutput | None:
        """Run a step, or start it on the device. None on every rank but `EngineConfig.output_rank`.

        Raises MemoryError where the step does not fit the memory: it may have been run in part, and the runner is as
        good as before for a step that fills every slot anew.
        """
        ...

    def peak_bytes(self) -> int:
        """The most memory that the rank has held."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """What a runner knows of the process it is in."""

    rank: int
    report_phase: Callable[[str], None]
    """Says what the rank is doing, for messages about a rank that stops answering."""
    publish_port: Callable[[int], None]
    """Rank 0: tell the other ranks where the rendezvous store listens."""
    wait_for_port: Callable[[], int]
    """Other ranks: wait for that."""
    spawned_at: float = 0.0
    """`time.time()` when the process was asked for."""
    started_at: float = 0.0
    """The same when it ran its first line of ours."""
