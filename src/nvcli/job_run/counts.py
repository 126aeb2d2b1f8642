"""What a run has done so far: kept by the pipeline, shown by progress and summary."""

from __future__ import annotations

from collections import Counter, defaultdict

from nvcli.engine.request import EngineStats
from nvcli.job_run.progress.forecast import RowTotals
from nvcli.job_run.text.prepare import PreparedRow
from nvcli.jobs.job import JobResult


class Counts:
    """Totals of finished rows, and the latest statistics of each engine."""

    def __init__(self) -> None:
        self.rows_done = 0
        """Failed ones and duplicates included."""
        self.rows_resumed = 0
        """Answered by an earlier run; not among `rows_done`."""
        self.rows_deduplicated = 0
        """Answered with the answer of an equal row."""
        self.errors: Counter[str] = Counter()
        """Failed rows by error type."""
        self.prompt_tokens = 0
        """Of rows that were computed, as are the next two."""
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.deduplicated_tokens = 0
        """Prompt and answer of rows that were not computed."""
        self.finished = RowTotals()
        self.started_at: float | None = None
        """`time.monotonic()` when an engine was given its first request."""
        self.engines: list[EngineStats] = []
        self.num_lost_engines = 0
        """That died, and whose rows others took over."""
        self.num_planned = 0
        """Rows that wait for an engine or for an equal row."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """The time of the pipeline's loop, by part."""

    @property
    def rows_failed(self) -> int:
        return self.errors.total()

    @property
    def generated_tokens(self) -> int:
        """Of finished rows and of running ones, as far as the engines have told."""
        return max(self.completion_tokens, sum(engine.generated_tokens for engine in self.engines))

    @property
    def running_tokens(self) -> int:
        """Generated tokens of rows that are not done."""
        return self.generated_tokens - self.completion_tokens

    @property
    def engine_prompt_tokens(self) -> int:
        """Computed or found in the prefix cache, of finished rows and of running ones."""
        return max(self.prompt_tokens, sum(engine.prompt_tokens for engine in self.engines))

    @property
    def engine_cached_tokens(self) -> int:
        return sum(engine.cached_tokens for engine in self.engines)

    @property
    def prefix_hit_rate(self) -> float:
        """Share of the prompt tokens that were found in the prefix cache."""
        total = sum(engine.prompt_tokens for engine in self.engines)
        return self.engine_cached_tokens / total if total else 0.0

    @property
    def kv_use(self) -> float:
        """Share of all KV cache blocks that running requests hold."""
        num_blocks = sum(engine.num_blocks for engine in self.engines)
        return sum(engine.num_used_blocks for engine in self.engines) / num_blocks if num_blocks else 0.0

    @property
    def num_running(self) -> int:
        return sum(engine.num_running for engine in self.engines)

    @property
    def num_waiting(self) -> int:
        """Requests that wait in the engines, and rows that were read and wait for one."""
        return sum(engine.num_waiting for engine in self.engines) + self.num_planned

    @property
    def num_preemptions(self) -> int:
        return sum(engine.num_preemptions for engine in self.engines)

    def add(self, prepared: PreparedRow | None, result: JobResult, *, computed: bool = True) -> None:
        """A row is done. `prepared`: the row or one equal to it; None: it failed before. `computed`: by an engine."""
        usage = result.usage
        self.rows_done += 1
        if result.error is not None:
            self.errors[result.error.type] += 1
        if prepared is not None:
            self.finished.add(prepared, usage.completion_tokens)
        if computed:
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens
            self.completion_tokens += usage.completion_tokens
        else:
            self.rows_deduplicated += 1
            self.deduplicated_tokens += usage.prompt_tokens + usage.completion_tokens
