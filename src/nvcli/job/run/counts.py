"""Counts of a run's work so far. The loop keeps them; progress, summary and report show them.

Memory is bounded however many rows there are: examples are few and short, and lengths are counted in bins.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

import msgspec

from nvcli.core.sampling_params import SamplingParams
from nvcli.core.validation import shorten
from nvcli.engine.request import EngineStats
from nvcli.job.job import ErrorInfo, JobId, JobResult, ScoreAnswer
from nvcli.job.text.prepare import PreparedRow


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
        return max(self.completion_tokens, self.engine_total("generated_tokens"))

    @property
    def computed_share(self) -> float:
        """The share of the rows that a replica computes; the others are equal to one of them."""
        equal = self.rows_deduplicated + self.num_waiting_for_equals
        known = self.rows_done + self.num_running + self.num_waiting
        return 1 - equal / known if known else 1.0

    @property
    def engine_prompt_tokens(self) -> int:
        """Prompt tokens of finished and of running rows, whether computed or found in the prefix cache."""
        return max(self.prompt_tokens, self.engine_total("prompt_tokens"))

    @property
    def engine_cached_tokens(self) -> int:
        """Prompt tokens of finished and of running rows that were found in the prefix cache."""
        return self.engine_total("cached_tokens")

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens that were found in the prefix cache."""
        return self.engine_cached_tokens / max(1, self.engine_total("prompt_tokens"))

    @property
    def kv_use(self) -> float:
        """The share of all KV cache blocks that running requests hold."""
        return self.engine_total("num_used_blocks") / max(1, self.engine_total("num_blocks"))

    @property
    def num_running(self) -> int:
        return self.engine_total("num_running")

    @property
    def num_waiting(self) -> int:
        """Requests that wait in a replica, and rows that were read and wait for one."""
        return self.engine_total("num_waiting") + self.num_planned

    def engine_total(self, name: str) -> int:
        """Return the sum of one of the replicas' statistics (`EngineStats`)."""
        return sum(getattr(stats, name) for stats in self.replicas)

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


class LeadingErrors:
    """Counts the failures of the first rows that are read. They are done in any order, and later rows before them."""

    def __init__(self, count: int) -> None:
        """So many rows must all fail with one error type; 0: it does not look."""
        self._count = count
        self._expected: set[int] = set()
        """The first rows, by index, that are not done yet."""
        self._num_expected = 0
        self._num_failed = 0
        self.is_open = count > 0
        """Whether all of these rows may still fail with one cause, and have not all done so."""
        self.first: ErrorInfo | None = None
        """The error of the first of them that failed."""

    @property
    def all_failed(self) -> bool:
        """Whether they have all failed with one cause, and no row was answered by then."""
        return self._num_failed == self._count > 0

    def expect(self, index: int) -> None:
        """Take note of a row that is read; rows come in their order."""
        if self._num_expected < self._count:
            self._num_expected += 1
            self._expected.add(index)

    def add(self, result: JobResult) -> None:
        """Take note of a row that is done."""
        error = result.error
        if error is None or not self.is_open:
            self.is_open = False
        elif result.context.index in self._expected:
            self._expected.discard(result.context.index)
            self.first = self.first or error
            self._num_failed += error.type == self.first.type
            self.is_open = error.type == self.first.type and not self.all_failed


MAX_EXAMPLES = 3
"""Examples that are kept of each finish reason and of each error type."""
MAX_EXAMPLE_CHARS = 300


class Example(msgspec.Struct, frozen=True, kw_only=True):
    """One row that came out in some way."""

    id: JobId
    index: int
    """The number of the row over all inputs, from 0."""
    text: str
    """The beginning of its answer, or the error's message: at most `MAX_EXAMPLE_CHARS` characters."""


class ScoreTotals:
    """Sums over the rows that were scored."""

    def __init__(self) -> None:
        self.rows_with_answer = 0
        """Rows that say which of their choices is right."""
        self.rows_correct = 0
        self.prompts = 0
        """Rows whose prompt was scored itself."""
        self.prompt_tokens = 0
        """The scored tokens of these rows."""
        self.prompt_logprob = 0.0
        """The log-probability of all these tokens."""

    def add(self, answer: ScoreAnswer) -> None:
        """Count the answer of a row."""
        if answer.correct is not None:
            self.rows_with_answer += 1
            self.rows_correct += answer.correct
        (first, *others) = answer.choices
        if not others and first.text is msgspec.UNSET:
            self.prompts += 1
            self.prompt_tokens += first.num_tokens
            self.prompt_logprob += first.logprob


class Outcomes:
    """The outcomes of the rows that a run finished."""

    def __init__(self, default_sampling: SamplingParams | None = None) -> None:
        """`default_sampling` is that of a row which brings none."""
        self._default_sampling = default_sampling or SamplingParams()
        self.finish_reasons: Counter[str] = Counter()
        """Answers by finish reason; a row with `n` answers counts `n` times."""
        self.answer_examples: dict[str, list[Example]] = {}
        """Rows by the finish reason of an answer, the first that were finished."""
        self.error_examples: dict[str, list[Example]] = {}
        """Failed rows by error type, likewise."""
        self.prompt_lengths: Counter[int] = Counter()
        """Rows with an answer by the bin of their prompt's tokens (`bin_of`)."""
        self.prompt_tokens = 0
        """The prompt tokens of these rows together."""
        self.scores = ScoreTotals()
        self.own_sampling: Counter[str] = Counter()
        """Rows by each sampling parameter for which they brought another value than the default."""

    def add(self, result: JobResult, sampling: SamplingParams | None) -> None:
        """Count a row that is done. `sampling` is the row's; None: it failed before that was known."""
        if result.error is not None:
            _keep(self.error_examples, result.error.type, result, result.error)
        else:
            self.prompt_lengths[bin_of(result.usage.prompt_tokens)] += 1
            self.prompt_tokens += result.usage.prompt_tokens
            if isinstance(result.answer, ScoreAnswer):
                self.scores.add(result.answer)
            for choice in result.choices:
                self.finish_reasons[choice.finish_reason] += 1
                _keep(self.answer_examples, choice.finish_reason, result, choice.text)
        default = self._default_sampling
        if sampling is not None and sampling != default:
            for key in SamplingParams.__struct_fields__:
                if getattr(sampling, key) != getattr(default, key):
                    self.own_sampling[key] += 1


def _keep(examples: dict[str, list[Example]], kind: str, result: JobResult, text: str | ErrorInfo) -> None:
    kept = examples.setdefault(kind, [])
    if len(kept) < MAX_EXAMPLES and not (kept and kept[-1].index == result.context.index):
        message = text.message if isinstance(text, ErrorInfo) else text
        kept.append(Example(id=result.context.id, index=result.context.index, text=shorten(message, MAX_EXAMPLE_CHARS)))


_BINS_PER_OCTAVE = 16


class LengthClass(NamedTuple):
    """A group of samples: the numbers of binary digits of their `max_tokens` and of their prompt's tokens.

    A row that may have ten tokens says little about one that may have ten thousand, and long prompts may have long
    answers.
    """

    max_tokens: int
    prompt: int


def length_class(max_tokens: int, num_prompt_tokens: int) -> LengthClass:
    """Return the group of samples that may have so many tokens, and whose prompt has so many."""
    return LengthClass(max_tokens.bit_length(), num_prompt_tokens.bit_length())


def bin_of(length: int) -> int:
    """Return the bin of a length in tokens: exact below 32, then 16 bins for each doubling."""
    shift = max(0, length.bit_length() - 5)
    return _BINS_PER_OCTAVE * shift + (length >> shift)


def bin_start(number: int) -> int:
    """Return the smallest length in a bin, in tokens."""
    shift = max(0, number // _BINS_PER_OCTAVE - 1)
    return (number - _BINS_PER_OCTAVE * shift) << shift


def bin_middle(number: int) -> float:
    """Return the length in the middle of a bin, in tokens."""
    return (bin_start(number) + bin_start(number + 1) - 1) / 2


class ClassTotals:
    """Sums over the samples of one length class that were read."""

    __slots__ = ("asked_samples", "max_tokens", "prompt_tokens", "samples")

    def __init__(self) -> None:
        self.samples = 0
        self.asked_samples = 0
        """Samples whose row, or the configuration, names a `max_tokens`; the others may fill `max_model_len`."""
        self.max_tokens = 0
        self.prompt_tokens = 0
        """Prompt tokens, counted for each sample."""


class ReadTotals:
    """Sums over the rows that were read and prepared, by length class."""

    def __init__(self) -> None:
        self.classes: dict[LengthClass, ClassTotals] = {}

    def add(self, row: PreparedRow) -> None:
        """Add one row with all its samples."""
        key = length_class(row.max_tokens, row.num_prompt_tokens)
        totals = self.classes.get(key) or ClassTotals()
        samples = row.sampling.num_samples
        totals.samples += samples
        totals.max_tokens += samples * row.max_tokens
        totals.prompt_tokens += samples * row.num_prompt_tokens
        if row.sampling.max_tokens is not None:
            totals.asked_samples += samples
        self.classes[key] = totals  # last: another thread may look at any time


class EndedSamples:
    """The samples of one length class that have ended."""

    __slots__ = ("cut", "samples", "stopped")

    def __init__(self) -> None:
        self.samples = 0
        """All samples that need no more work, those that failed or were not computed included."""
        self.stopped: Counter[int] = Counter()
        """Samples that ended by themselves, by the bin of their length."""
        self.cut: Counter[int] = Counter()
        """Samples that came to their `max_tokens`, by the bin of their length: they would have been longer."""


class AnswerLengths:
    """The lengths of the samples that have ended, by length class."""

    def __init__(self) -> None:
        self.classes: defaultdict[LengthClass, EndedSamples] = defaultdict(EndedSamples)
        self.generated_tokens = 0
        """The tokens of all these samples."""
        self.prompt_tokens = 0
        """The prompt tokens of all these samples that were computed."""

    def add(self, row: PreparedRow, length: int, *, is_cut: bool) -> None:
        """Add a sample of a row that has ended with so many tokens. `is_cut`: because it may not have more."""
        self.drop(row, 1)
        ended = self.classes[length_class(row.max_tokens, row.num_prompt_tokens)]
        (ended.cut if is_cut else ended.stopped)[bin_of(length)] += 1
        self.generated_tokens += length
        self.prompt_tokens += row.num_prompt_tokens

    def drop(self, row: PreparedRow, samples: int) -> None:
        """Note that so many samples of a row are not computed (any further)."""
        self.classes[length_class(row.max_tokens, row.num_prompt_tokens)].samples += samples
