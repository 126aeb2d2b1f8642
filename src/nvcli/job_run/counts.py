"""Counts of a run's work so far. The loop keeps them; progress and summary show them."""

from __future__ import annotations

from collections import Counter, defaultdict

from nvcli.engine.request import EngineStats
from nvcli.job_run.answer_lengths import AnswerLengths
from nvcli.job_run.leading_errors import LeadingErrors
from nvcli.job_run.outcomes import Outcomes
from nvcli.job_run.text.prepare import PreparedRow
from nvcli.jobs.job import JobResult
from nvcli.sampling_params import SamplingParams


class Counts:
    """Totals of finished rows, and the latest statistics of each replica."""

    def __init__(self, default_sampling: SamplingParams | None = None) -> None:
        """`default_sampling` is that of a row which brings none."""
        self.rows_done = 0
        """Rows that this run finished, failed ones and duplicates included."""
        self.rows_resumed = 0
        """Rows that an earlier run answered; they are not among `rows_done`."""
        self.rows_deduplicated = 0
        """Rows that got the answer of an equal row."""
        self.errors: Counter[str] = Counter()
        """Failed rows by error type."""
        self.outcomes = Outcomes(default_sampling)
        """How these rows came out."""
        self.prompt_tokens = 0
        """Prompt tokens of rows that were computed; the next two count the same rows."""
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.deduplicated_tokens = 0
        """Prompt and answer tokens of rows that were not computed."""
        self.leading = LeadingErrors(0)
        """The first rows, as long as all that is done has failed."""
        self.lengths = AnswerLengths()
        """The samples that have ended, those of rows that are not done yet included."""
        self.started_at: float | None = None
        """`time.monotonic()` when a replica was given its first request."""
        self.replicas: list[EngineStats] = []
        """The latest statistics of each replica, dead ones included."""
        self.num_lost_replicas = 0
        """Replicas that died, and whose rows others took over."""
        self.num_planned = 0
        """Rows that wait for a replica or for an equal row."""
        self.num_waiting_for_equals = 0
        """Rows among them that wait for an equal row."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """The time of the loop, by part; `loop.JobLoop` names the parts."""

    @property
    def rows_failed(self) -> int:
        return self.errors.total()

    @property
    def generated_tokens(self) -> int:
        """Generated tokens of finished and of running rows, as far as the replicas have told."""
        return max(self.completion_tokens, sum(stats.generated_tokens for stats in self.replicas))

    @property
    def computed_share(self) -> float:
        """The share of the rows that a replica computes; the others are equal to one of them."""
        equal = self.rows_deduplicated + self.num_waiting_for_equals
        known = self.rows_done + self.num_running + self.num_waiting
        return 1 - equal / known if known else 1.0

    @property
    def engine_prompt_tokens(self) -> int:
        """Prompt tokens of finished and of running rows, whether computed or found in the prefix cache."""
        return max(self.prompt_tokens, sum(stats.prompt_tokens for stats in self.replicas))

    @property
    def engine_cached_tokens(self) -> int:
        """Prompt tokens of finished and of running rows that were found in the prefix cache."""
        return sum(stats.cached_tokens for stats in self.replicas)

    @property
    def prefix_hit_rate(self) -> float:
        """The share of the prompt tokens that were found in the prefix cache."""
        total = sum(stats.prompt_tokens for stats in self.replicas)
        return self.engine_cached_tokens / total if total else 0.0

    @property
    def kv_use(self) -> float:
        """The share of all KV cache blocks that running requests hold."""
        num_blocks = sum(stats.num_blocks for stats in self.replicas)
        return sum(stats.num_used_blocks for stats in self.replicas) / num_blocks if num_blocks else 0.0

    @property
    def num_running(self) -> int:
        return sum(stats.num_running for stats in self.replicas)

    @property
    def num_waiting(self) -> int:
        """Requests that wait in a replica, and rows that were read and wait for one."""
        return sum(stats.num_waiting for stats in self.replicas) + self.num_planned

    @property
    def num_preemptions(self) -> int:
        return sum(stats.num_preemptions for stats in self.replicas)

    @property
    def kv_bytes_saved(self) -> int:
        """Bytes of the KV cache that were not read again for each of the requests that share them."""
        return sum(stats.kv_bytes_saved for stats in self.replicas)

    def add(self, prepared: PreparedRow | None, result: JobResult, *, computed: bool = True) -> None:
        """Count a row that is done: what it took, and how it came out.

        `prepared` is the row or one equal to it; None: the row failed before it was prepared. `computed` says whether
        a replica computed it; else it got the answer of an equal row.
        """
        self.add_work(prepared, result, computed=computed)
        self.add_row(prepared, result, computed=computed)

    def add_row(self, prepared: PreparedRow | None, result: JobResult, *, computed: bool) -> None:
        """Count how a row came out. The arguments are those of `add`."""
        self.rows_done += 1
        self.rows_deduplicated += not computed
        self.outcomes.add(result, None if prepared is None or prepared.task is not None else prepared.sampling)
        if self.leading.is_open:
            self.leading.add(result)
        if result.error is not None:
            self.errors[result.error.type] += 1

    def add_work(self, prepared: PreparedRow | None, result: JobResult, *, computed: bool) -> None:
        """Count what a row, or one prompt of it, took. The arguments are those of `add`."""
        usage = result.usage
        if computed:
            self.prompt_tokens += usage.prompt_tokens
            self.cached_tokens += usage.cached_tokens
            self.completion_tokens += usage.completion_tokens
        else:
            self.deduplicated_tokens += usage.prompt_tokens + usage.completion_tokens
            if prepared is not None:
                self.lengths.drop(prepared, prepared.sampling.num_samples)
