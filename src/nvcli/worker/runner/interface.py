"""The interface between a rank's process and its runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from nvcli.core.messages import EngineReady, StepInput, StepOutput
from nvcli.core.weight_changes import WeightsChange
from nvcli.kernels.triton.launch.compile_processes import CompileProcesses

if TYPE_CHECKING:
    from nvcli.attention.forward_batch import ForwardBatch
    from nvcli.kernels.step_tensors import StepRows
    from nvcli.worker.distributed.process_group import World


class PendingOutput(Protocol):
    """A launched step's output, which may still be on its way from the device."""

    def result(self) -> StepOutput:
        """Wait for the step's tokens. Called on another thread than `Runner.launch`."""


class Runner(Protocol):
    """Runs steps on one rank."""

    @property
    def ready(self) -> EngineReady:
        """The runner's report to the engine, complete once the runner is made."""

    def launch(self, step: StepInput) -> PendingOutput | None:
        """Run a step, or start it on the device. Every rank except `EngineConfig.output_rank` returns None.

        Raises MemoryError if the step does not fit in memory. Part of it may have run; the runner can go on with a step
        that fills every slot anew.
        """

    def change_weights(self, change: WeightsChange) -> None:
        """Replace the weights, or give up or take back the memory of weights and KV cache. No step is in flight.

        Every rank of a replica does the same. Raises LoadError, ConfigError or CapacityError if this rank cannot;
        nothing is changed then on any rank. If files turn out to be unreadable later, the weights are undefined, and
        that is a WorkerError.
        """

    def peak_bytes(self) -> int:
        """Return the most memory that the rank has held, in bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankContext:
    """Facts and functions that a rank's process passes to its runner."""

    rank: int
    report_phase: Callable[[str], None]
    """Notes what the rank is doing, for messages about a rank that stops answering."""
    store_path: str = ""
    """The path of the file over which the ranks of the replica meet; empty for a lone rank."""
    spawned_at: float = 0.0
    """The `time.monotonic()` at which the executor started the process; all processes of a machine share it."""
    started_at: float = 0.0
    """The `time.monotonic()` at which the process began to run nvcli's code."""
    world: World | None = None
    """The ranks of the replica, where this process has met the others already."""
    compilers: CompileProcesses | None = None
    """The processes that compile kernels, where they were started with the rank."""


class RequestExtras(Protocol):
    """One kind of input besides tokens that requests bring, such as LoRA adapters or images, for all slots."""

    def plan(self, step: StepInput) -> bool:
        """Take in a step on the host, before its batch is made. Return whether it must run outside of graphs."""

    def apply(self, step: StepInput) -> None:
        """Bring the device's side up to date, before the rows are loaded."""

    def prepare(self, rows: StepRows, batch: ForwardBatch) -> ForwardBatch:
        """Return the batch with what its tokens have. Can run in a CUDA graph, unless `plan` says otherwise."""

    def take_note(self) -> str:
        """Return the next `StepOutput.note`; empty if there is none."""
