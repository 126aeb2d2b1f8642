"""The engines of a run: how they are started and ended, and what the user is told of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec

from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import EngineReady
from nvcli.engine.client import EngineClient
from nvcli.errors import NvcliError
from nvcli.job.run.early_end import RowTracebacks, keep_traceback

StartEngine = Callable[[EngineConfig], EngineClient]
"""Starts the engine of a replica; tests start others that have the same methods."""


def start_engine(config: EngineConfig) -> EngineClient:
    """Start an engine process, which starts its ranks.

    They are killed when the calling thread or the process ends.
    """
    return EngineClient.start(config, name="engine" if config.replica == 0 else f"engine {config.replica}")


class EngineSet:
    """The engines of a command, which its jobs share as long as they want the same ones."""

    def __init__(self, start: StartEngine = start_engine) -> None:
        """`start` starts the engine of one replica."""
        self._start = start
        self._engines: list[EngineClient] = []
        self._configs: list[EngineConfig] = []
        self.are_sound = True
        """Whether all of them are alive; a job that loses one sets it."""
        self.have_run = False
        """Whether the engines that `take` last returned had served a job before."""
        self.next_request_id = 0
        """The lowest unused request id. Ids are not reused, because answers to aborted requests may come late."""

    def take(self, configs: Sequence[EngineConfig]) -> list[EngineClient]:
        """Return engines with these configurations: the running ones if they fit, or new ones in their place."""
        # Whether grammars are loaded beside the weights is a matter of time alone.
        wanted = [msgspec.structs.replace(config, prepare_grammars=False) for config in configs]
        self.have_run = self.are_sound and wanted == self._configs
        if not self.have_run:
            self.close()
            self._configs, self.are_sound = wanted, True
            for config in configs:
                self._engines.append(self._start(config))
        return [*self._engines]

    def close(self) -> None:
        """End all engines at the same time, as each may take a second to free its GPUs. Idempotent."""
        engines, self._engines, self._configs = self._engines, [], []
        closing = [threading.Thread(target=engine.close, name="nvcli-close") for engine in engines[1:]]
        for thread in closing:
            thread.start()
        try:
            for engine in engines[:1]:
                engine.close()
        finally:
            for thread in closing:
                thread.join()


class EngineEvents:
    """Tells the user what happens to a run's engines and rows while `JobLoop` runs."""

    def __init__(
        self,
        engines: EngineSet,
        model: str,
        *,
        output: str | None,
        note: Callable[[str], None],
        detail: Callable[[str], None],
        warn: Callable[[str], None],
    ) -> None:
        """`model` is the model as it was named. Tracebacks are kept beside `output`; None: in a temporary file.

        `note`, `detail` and `warn` take lines for the user.
        """
        self._engines = engines
        self._model = model
        self._output = output
        self._note, self._detail, self.warn = note, detail, warn
        self.row_tracebacks = RowTracebacks(output, warn)
        """Keeps the tracebacks of rows that an unforeseen exception has cost their answers."""
        self.ready: list[EngineReady] = []
        """The reports of the engines that are ready."""

    def replica_ready(self, ready: EngineReady) -> None:
        """Note that a replica has loaded the model, and tell the user about the first; the others are like it."""
        if not self.ready and not self._engines.have_run:
            title, *details = describe_ready(self._model, ready)
            self._note(title)
            for detail in details:
                self._detail(detail)
        self.ready.append(ready)

    def replica_lost(self, error: NvcliError, num_rows: int) -> None:
        """Warn that a replica has died of `error`, and that its unfinished rows go to the others."""
        self._engines.are_sound = False
        error = keep_traceback(error, self._output)
        rows = "1 unfinished row goes" if num_rows == 1 else f"{num_rows:,} unfinished rows go"
        self.warn(f"warning: a copy of the model died, and its {rows} to the others: {error}")


def describe_ready(model: str, ready: EngineReady) -> list[str]:
    """Return lines for the user on an engine that is ready: first that it is, then details."""
    cache = f"KV cache for {ready.kv_cache_tokens:,} tokens ({_mib(ready.kv_cache_bytes)} a rank)"
    tokens = ready.max_draft_step_tokens
    drafts = [f"drafts in steps of up to {tokens:,} tokens"] if tokens else []
    return [f"{model} is ready", f"{cache}, weights {_mib(ready.weight_bytes)} a rank", *drafts, *ready.notes]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
