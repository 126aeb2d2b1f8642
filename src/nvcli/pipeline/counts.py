"""What a run has done so far: kept by the pipeline, shown by progress and summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from nvcli.engine.request import EngineStats
from nvcli.jobs.job import JobResult


class Counts:
    """Totals of finished rows, and the latest statistics of each engine."""

    def __init__(self) -> None:
        self.rows_done = 0
        """Failed ones included."""
        self.errors: Counter[str] = Counter()
        """Failed rows by error type."""
        self.rows_resumed = 0
        """Answered by an earlier run, and not among the others."""
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.started_at: float | None = None
        """`time.monotonic()` when an engine was given its first request."""
        self.engines: list[EngineStats] = []

    @property
    def rows_failed(self) -> int:
        return self.errors.total()

    @property
    def generated_tokens(self) -> int:
        """Of finished rows and of running ones, as far as the engines have told."""
        return max(self.completion_tokens, sum(engine.generated_tokens for engine in self.engines))

    @property
    def kv_use(self) -> float:
        """Share of all KV cache blocks that running requests hold."""
        num_blocks = sum(engine.num_blocks for engine in self.engines)
        return sum(engine.num_used_blocks for engine in self.engines) / num_blocks if num_blocks else 0.0

    @property
    def num_running(self) -> int:
        return sum(engine.num_running for engine in self.engines)

    @property
    def num_preemptions(self) -> int:
        return sum(engine.num_preemptions for engine in self.engines)

    def add(self, results: Iterable[JobResult]) -> None:
        for result in results:
            self.rows_done += 1
            if result.error is not None:
                self.errors[result.error.type] += 1
            self.prompt_tokens += result.usage.prompt_tokens
            self.cached_tokens += result.usage.cached_tokens
            self.completion_tokens += result.usage.completion_tokens
