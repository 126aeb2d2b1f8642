"""Counts how rows came out: finish reasons and errors with examples, prompt lengths, and sampling that rows brought.

Memory is bounded however many rows there are: examples are few and short, and lengths are counted in bins.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from nvcli.job_run.answer_lengths import bin_of
from nvcli.jobs.job import ErrorInfo, JobId, JobResult
from nvcli.jobs.tasks import ScoreAnswer
from nvcli.sampling_params import SamplingParams
from nvcli.validation import shorten

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
        """Rows with an answer by the bin of their prompt's tokens (`answer_lengths.bin_of`)."""
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
    if len(kept) < MAX_EXAMPLES and not (kept and kept[-1].index == result.place.index):
        message = text.message if isinstance(text, ErrorInfo) else text
        kept.append(Example(id=result.place.id, index=result.place.index, text=shorten(message, MAX_EXAMPLE_CHARS)))
