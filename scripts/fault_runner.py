"""`nvcli` with the real runner and a brake, so that a fault can strike where it is meant to (`fault_strikes.py`).

    FAULT_FOLDER=/tmp/x FAULT_PHASE="warm up" FAULT_STEP_SECONDS=0.02 python scripts/fault_runner.py generate …

The last rank says that it has come to FAULT_PHASE with the file `reached` in the folder, and then waits for what
happens; the others go on, into collectives that it does not enter. Every step takes FAULT_STEP_SECONDS longer, and when
there is a file `raise` in the folder, the last rank's next one raises ZeroDivisionError.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from nvcli.cli import main as cli
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import EngineReady, StepInput
from nvcli.engine.client import EngineClient
from nvcli.worker.executor.child_process import ChildProcess
from nvcli.worker.runner.interface import PendingOutput, RankContext, Runner


class BrakedRunner:
    """The real runner, and what the folder says."""

    def __init__(self, config: EngineConfig, context: RankContext) -> None:
        from nvcli.worker.runner.model_runner import ModelRunner

        self._folder = Path(os.environ["FAULT_FOLDER"])
        self._step_seconds = float(os.environ["FAULT_STEP_SECONDS"])
        self._is_last = context.rank == config.tensor_parallel_size - 1

        def report_phase(phase: str) -> None:
            context.report_phase(phase)
            if self._is_last and phase == os.environ["FAULT_PHASE"]:
                (self._folder / "reached").touch()
                time.sleep(600)

        self._runner: Runner = ModelRunner(config, replace(context, report_phase=report_phase))

    @property
    def ready(self) -> EngineReady:
        return self._runner.ready

    def launch(self, step: StepInput) -> PendingOutput | None:
        if self._is_last and (self._folder / "raise").exists():
            raise ZeroDivisionError("as planned")
        time.sleep(self._step_seconds)
        return self._runner.launch(step)

    def peak_bytes(self) -> int:
        return self._runner.peak_bytes()


def main() -> None:
    start = EngineClient.start

    def start_braked(
        config: EngineConfig, *, name: str = "engine", process: ChildProcess | None = None
    ) -> EngineClient:
        return start(config, name=name, runner="fault_runner:BrakedRunner", process=process)

    EngineClient.start = start_braked  # type: ignore[method-assign,assignment]
    cli.main()


if __name__ == "__main__":
    main()
