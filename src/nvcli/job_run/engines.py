"""The engines of a run: how they are started and ended, and what is said of one that is ready."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from nvcli.config import EngineConfig
from nvcli.job_run.loop import Engine
from nvcli.messages import EngineReady

StartEngine = Callable[[EngineConfig], Engine]


def start_engine(config: EngineConfig) -> Engine:
    """Start the real thing: an engine process and its ranks.

    They are killed when the thread that calls this ends, as when the process does.
    """
    from nvcli.engine.client import EngineClient

    return EngineClient.start(config, name="engine" if config.replica == 0 else f"engine {config.replica}")


def close_engines(engines: Sequence[Engine]) -> None:
    """End all replicas at the same time: each may take a second until its GPUs are free."""
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
