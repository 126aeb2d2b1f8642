"""The engines of a run: how they are started and ended, and what is said of one that is ready."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec

from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import EngineReady
from nvcli.job.run.loop import Engine

StartEngine = Callable[[EngineConfig], Engine]


def start_engine(config: EngineConfig) -> Engine:
    """Start the real thing: an engine process and its ranks.

    They are killed when the thread that calls this ends, as when the process does.
    """
    from nvcli.engine.client import EngineClient

    return EngineClient.start(config, name="engine" if config.replica == 0 else f"engine {config.replica}")


class EngineSet:
    """The engines of a command, which run for one job after another as long as these want the same ones."""

    def __init__(self, start: StartEngine = start_engine) -> None:
        """`start` starts the engine of one replica."""
        self._start = start
        self._engines: list[Engine] = []
        self._configs: list[EngineConfig] = []
        self.are_sound = True
        """Whether all of them run; a job that loses one says so."""
        self.have_run = False
        """Whether those that `take` returned last had served a job before."""
        self.next_request_id = 0
        """The lowest id that no request of these jobs has had: answers to requests that were aborted may come late."""

    def take(self, configs: Sequence[EngineConfig]) -> list[Engine]:
        """Return engines with these configurations, those that run or new ones in place of them."""
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
        """End all of them at the same time: each may take a second until its GPUs are free. It may be called again."""
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


def describe_ready(model: str, ready: EngineReady) -> list[str]:
    """Return lines for the user on an engine that has loaded this model: first that it is ready, then details."""
    cache = f"KV cache for {ready.kv_cache_tokens:,} tokens ({_mib(ready.kv_cache_bytes)} a rank)"
    return [f"{model} is ready", f"{cache}, weights {_mib(ready.weight_bytes)} a rank", *ready.notes]


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
