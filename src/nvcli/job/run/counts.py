"""Counts of a run's work so far, kept by the loop and shown by progress, summary and report.

Memory is bounded however many rows there are: examples are few and short, and lengths are counted in bins.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from nvcli.core.sampling_params import SamplingParams
from nvcli.core.validation import shorten
from nvcli.engine.request import EngineStats
from nvcli.job.images.pixel_memory import Pixels
from nvcli.job.images.row_images import PromptImages
from nvcli.job.images.thumbnail import thumbnail
from nvcli.job.job import ErrorInfo, JobId, JobResult, ScoreAnswer
from nvcli.job.text.prepare import PreparedRow


class Counts:
    """Totals of finished rows, and the latest statistics of each replica."""

    def __init__(self, default_sampling: SamplingParams | None = None, *, generates: bool = True) -> None:
        """`default_sampling` is that of a row without its own. `generates` says whether rows are answered, and not
        scored, embedded or classified."""
        self._generates = generates
        self.rows_done = 0
        """Rows that this run finished, including failed ones and duplicates."""
        self.rows_resumed = 0
        """Rows answered by earlier runs, not included in `rows_done`."""
        self.rows_deduplicated = 0
        """Rows answered with the answer of an equal row."""
        self.errors: Counter[str] = Counter()
        """Failed rows by error type."""
        self.outcomes = Outcomes(default_sampling)
        """Outcomes of these rows."""
        self.prompt_tokens = 0
        """Prompt tokens of computed rows. The next two count the same rows."""
        self.cached_tokens = 0
        self.completion_tokens = 0
        self.deduplicated_tokens = 0
        """Prompt and answer tokens of rows that were not computed."""
        self.leading = LeadingErrors(0)
        """Watches whether the first rows all fail."""
        self.lengths = AnswerLengths()
        """Samples that have ended, including those of rows that are not finished."""
        self.started_at: float | None = None
        """`time.monotonic()` when the first request was sent to a replica."""
        self.replicas: list[EngineStats] = []
        """Latest statistics of each replica, including dead ones."""
        self.num_lost_replicas = 0
        """Replicas that died and whose rows others took over."""
        self.num_planned = 0
        """Rows that wait for a replica or for an equal row."""
        self.num_waiting_for_equals = 0
        """Rows among them that wait for an equal row."""
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Time of the loop by part; `loop.JobLoop` names the parts."""

    @property
    def rows_failed(self) -> int:
        return self.errors.total()

    @property
    def sampled_tokens(self) -> int:
        """Tokens that steps sampled, as far as the replicas have reported: also the one that ends each text that is
        scored, embedded or classified."""
        return max(self.completion_tokens, self.engine_total("generated_tokens"))

    @property
    def generated_tokens(self) -> int:
        """Generated tokens of finished and running rows, as far as the replicas have reported."""
        return self.sampled_tokens if self._generates else 0

    @property
    def computed_share(self) -> float:
        """Share of rows that replicas compute; the others equal one of them."""
        equal = self.rows_deduplicated + self.num_waiting_for_equals
        known = self.rows_done + self.num_running + self.num_waiting
        return 1 - equal / known if known else 1.0

    @property
    def engine_prompt_tokens(self) -> int:
        """Prompt tokens of finished and running rows, computed or found in the prefix cache."""
        return max(self.prompt_tokens, self.engine_total("prompt_tokens"))

    @property
    def engine_cached_tokens(self) -> int:
        """Prompt tokens of finished and running rows that were found in the prefix cache."""
        return self.engine_total("cached_tokens")

    @property
    def prefix_hit_rate(self) -> float:
        """Share of prompt tokens that were found in the prefix cache."""
        return self.engine_cached_tokens / max(1, self.engine_total("prompt_tokens"))

    @property
    def kv_use(self) -> float:
        """Share of all KV cache blocks that running requests hold."""
        return self.engine_total("num_used_blocks") / max(1, self.engine_total("num_blocks"))

    @property
    def num_running(self) -> int:
        return self.engine_total("num_running")

    @property
    def num_waiting(self) -> int:
        """Requests waiting in a replica, and rows waiting for one."""
        return self.engine_total("num_waiting") + self.num_planned

    def engine_total(self, name: str) -> int:
        """Return the sum of one of the replicas' statistics (`EngineStats`)."""
        return sum(getattr(stats, name) for stats in self.replicas)

    def add(self, prepared: PreparedRow | None, result: JobResult, *, computed: bool = True) -> None:
        """Count a finished row: its work and its outcome.

        `prepared` is the row or one equal to it; None: the row failed before it was prepared. `computed` says whether
        a replica computed it; else it got the answer of an equal row.
        """
        self.add_work(prepared, result, computed=computed)
        self.add_row(prepared, result, computed=computed)

    def add_row(self, prepared: PreparedRow | None, result: JobResult, *, computed: bool) -> None:
        """Count the outcome of a row. Arguments as for `add`."""
        self.rows_done += 1
        self.rows_deduplicated += not computed
        sampling = None if prepared is None or prepared.task is not None else prepared.sampling
        self.outcomes.add(result, sampling, None if prepared is None else prepared.images)
        if self.leading.is_open:
            self.leading.add(result)
        if result.error is not None:
            self.errors[result.error.type] += 1

    def add_work(self, prepared: PreparedRow | None, result: JobResult, *, computed: bool) -> None:
        """Count the work of a row or of one of its prompts. Arguments as for `add`."""
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
    """Watches whether the first rows read all fail. They finish in any order, even after later ones."""

    def __init__(self, count: int) -> None:
        """`count` rows must all fail with one error type; 0: do not watch."""
        self._count = count
        self._expected: set[int] = set()
        """Indices of first rows that are not finished."""
        self._num_expected = 0
        self._num_failed = 0
        self.is_open = count > 0
        """Whether it is still undecided if these rows all fail with one cause."""
        self.first: ErrorInfo | None = None
        """The error of the first row that failed."""

    @property
    def all_failed(self) -> bool:
        """Whether they have all failed with one cause before any row was answered."""
        return self._num_failed == self._count > 0

    def expect(self, index: int) -> None:
        """Record a row that was read; rows come in order."""
        if self._num_expected < self._count:
            self._num_expected += 1
            self._expected.add(index)

    def add(self, result: JobResult) -> None:
        """Record a finished row."""
        error = result.error
        if error is None or not self.is_open:
            self.is_open = False
        elif result.context.index in self._expected:
            self._expected.discard(result.context.index)
            self.first = self.first or error
            self._num_failed += error.type == self.first.type
            self.is_open = error.type == self.first.type and not self.all_failed


MAX_EXAMPLES = 3
"""Number of examples of each finish reason and error type."""
MAX_EXAMPLE_CHARS = 300
_MAX_EXAMPLE_IMAGES = 3


class Example(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An example of an outcome."""

    id: JobId
    index: int
    """The number of the row over all inputs, from 0."""
    text: str
    """The beginning of its answer, or the error's message: at most `MAX_EXAMPLE_CHARS` characters."""
    images: list[str] = []
    """`data:` URLs of small pictures of its first images, if they are wanted (`Outcomes.shows_images`)."""


@dataclass(slots=True)
class ScoreTotals:
    """Totals of scored rows."""

    rows_with_answer: int = 0
    """Rows that name the right choice."""
    rows_correct: int = 0
    prompts: int = 0
    """Rows whose prompt was scored itself."""
    prompt_tokens: int = 0
    """The scored tokens of these rows."""
    prompt_logprob: float = 0.0
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
    """Outcomes of the rows that a run finished."""

    def __init__(self, default_sampling: SamplingParams | None = None) -> None:
        """`default_sampling` is that of a row without its own."""
        self._default_sampling = default_sampling or SamplingParams()
        self.shows_images = False
        """Whether examples have pictures of their images. Set before the first row."""
        self.finish_reasons: Counter[str] = Counter()
        """Number of answers by finish reason; a row with `n` answers counts `n` times."""
        self.answer_examples: dict[str, list[Example]] = {}
        """The first rows to finish, by finish reason."""
        self.error_examples: dict[str, list[Example]] = {}
        """The first rows to fail, by error type."""
        self.prompt_lengths: Counter[int] = Counter()
        """Number of answered rows by bin of their prompt's tokens (`bin_of`)."""
        self.prompt_tokens = 0
        """The prompt tokens of these rows together."""
        self.scores = ScoreTotals()
        self.own_sampling: Counter[str] = Counter()
        """Number of rows with another value than the default, by sampling parameter."""

    def add(self, result: JobResult, sampling: SamplingParams | None, images: PromptImages | None = None) -> None:
        """Count a finished row. `sampling` is the row's; None: it failed before that was known."""
        pixels = images.pixels[:_MAX_EXAMPLE_IMAGES] if images is not None and self.shows_images else ()
        if result.error is not None:
            _keep(self.error_examples, result.error.type, result, result.error.message, pixels)
        else:
            self.prompt_lengths[bin_of(result.usage.prompt_tokens)] += 1
            self.prompt_tokens += result.usage.prompt_tokens
            if isinstance(result.answer, ScoreAnswer):
                self.scores.add(result.answer)
            for choice in result.choices:
                self.finish_reasons[choice.finish_reason] += 1
                _keep(self.answer_examples, choice.finish_reason, result, choice.text, pixels)
        default = self._default_sampling
        if sampling is not None and sampling != default:
            for key in SamplingParams.__struct_fields__:
                if getattr(sampling, key) != getattr(default, key):
                    self.own_sampling[key] += 1


def _keep(
    examples: dict[str, list[Example]], kind: str, result: JobResult, text: str, images: Sequence[Pixels]
) -> None:
    kept = examples.setdefault(kind, [])
    if len(kept) < MAX_EXAMPLES and not (kept and kept[-1].index == result.context.index):
        context, text = result.context, shorten(text, MAX_EXAMPLE_CHARS)
        pictures = [thumbnail(image) for image in images]
        kept.append(Example(id=context.id, index=context.index, text=text, images=pictures))


_BINS_PER_OCTAVE = 16


class LengthClass(NamedTuple):
    """A group of samples, by the bit lengths of their `max_tokens` and of their prompt's tokens.

    A row that may have ten tokens says little about one that may have ten thousand, and long prompts may have long
    answers.
    """

    max_tokens: int
    prompt: int


def length_class(max_tokens: int, num_prompt_tokens: int) -> LengthClass:
    """Return the class of samples with this `max_tokens` and this number of prompt tokens."""
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


@dataclass(slots=True)
class ClassTotals:
    """Totals of the samples of one length class that were read."""

    samples: int = 0
    asked_samples: int = 0
    """Samples whose row, or the configuration, names a `max_tokens`; the others may fill `max_model_len`."""
    max_tokens: int = 0
    prompt_tokens: int = 0
    """Prompt tokens, counted for each sample."""


class ReadTotals:
    """Totals of the rows read and prepared, by length class."""

    def __init__(self) -> None:
        self.classes: dict[LengthClass, ClassTotals] = {}

    def add(self, row: PreparedRow) -> None:
        """Add a row with all its samples."""
        key = length_class(row.max_tokens, row.num_prompt_tokens)
        totals = self.classes.get(key) or ClassTotals()
        samples = row.sampling.num_samples
        totals.samples += samples
        totals.max_tokens += samples * row.max_tokens
        totals.prompt_tokens += samples * row.num_prompt_tokens
        if row.sampling.max_tokens is not None:
            totals.asked_samples += samples
        self.classes[key] = totals  # last: another thread may look at any time


@dataclass(slots=True)
class EndedSamples:
    """The samples of one length class that have ended."""

    samples: int = 0
    """Samples that need no more work, including those that failed or were not computed."""
    stopped: Counter[int] = field(default_factory=Counter)
    """Number of samples that ended by themselves, by bin of their length."""
    cut: Counter[int] = field(default_factory=Counter)
    """Number of samples that reached their `max_tokens`, by bin of their length. They would have been longer."""


class AnswerLengths:
    """Lengths of the samples that have ended, by length class."""

    def __init__(self) -> None:
        self.classes: defaultdict[LengthClass, EndedSamples] = defaultdict(EndedSamples)
        self.generated_tokens = 0
        """The tokens of all these samples."""
        self.prompt_tokens = 0
        """The prompt tokens of all these samples that were computed."""

    def add(self, row: PreparedRow, length: int, *, is_cut: bool) -> None:
        """Add an ended sample of a row, with its length in tokens. `is_cut`: it reached its limit."""
        self.drop(row, 1)
        ended = self.classes[length_class(row.max_tokens, row.num_prompt_tokens)]
        (ended.cut if is_cut else ended.stopped)[bin_of(length)] += 1
        self.generated_tokens += length
        self.prompt_tokens += row.num_prompt_tokens

    def drop(self, row: PreparedRow, samples: int) -> None:
        """Record that this number of samples of a row are not computed (any further)."""
        self.classes[length_class(row.max_tokens, row.num_prompt_tokens)].samples += samples
