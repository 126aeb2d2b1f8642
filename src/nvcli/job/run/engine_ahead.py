"""EngineAhead: an engine process started before the job is read, because its rank takes seconds to import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nvcli.worker.executor.child_process import ChildProcess

if TYPE_CHECKING:  # it is to be started before much is imported
    from nvcli.core.engine_config import EngineConfig
    from nvcli.engine.client import EngineClient


class EngineAhead:
    """An engine process, with a rank, that waits for its configuration. It starts the engines of a job
    (`engines.StartEngine`), the first one from this process."""

    def __init__(self) -> None:
        """Start the process, without waiting for it. It is killed when the calling thread ends."""
        self._process: ChildProcess | None = ChildProcess("nvcli.engine.engine_ahead:main", None, name="engine")

    def start_engine(self, config: EngineConfig) -> EngineClient:
        """Start an engine."""
        from nvcli.engine.client import EngineClient
        from nvcli.job.run.engines import start_engine

        process, self._process = self._process, None
        return start_engine(config) if process is None else EngineClient.start(config, process=process)

    def close(self) -> None:
        """End an unused process. Idempotent."""
        if self._process is not None:
            self._process.close(has_children=True)
            self._process = None
