"""Splits rows with several prompts, as in OpenAI's completions and embeddings, and joins their results.

Each prompt is prepared and computed like a row of its own. The row is done when all of them are, and is one result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, islice

import msgspec

from nvcli.job.job import EmbedAnswer, EmbedAnswers, Job, JobResult, Part, Usage, prompt_fields

MAX_PARTS_AT_ONCE = 256
"""Maximum number of prompts to prepare at a time."""


def split_rows(rows: Sequence[Job | JobResult]) -> Iterator[Sequence[Job | JobResult]]:
    """Yield rows in batches, with a job for each prompt of a row that has several."""
    if not any(isinstance(row, Job) and row.prompts for row in rows):
        yield rows
        return
    each = chain.from_iterable(_parts_of(row) if isinstance(row, Job) and row.prompts else (row,) for row in rows)
    while batch := list(islice(each, MAX_PARTS_AT_ONCE)):
        yield batch


def _parts_of(job: Job) -> Iterator[Job]:
    context, count = job.context, len(job.prompts)
    for number, prompt in enumerate(job.prompts):
        own = msgspec.structs.replace(
            context,
            line=f"{context.line}, prompt {number + 1} of {count}",
            extra=context.extra if number == 0 else {},  # which counts as memory once
            part=Part(number=number, count=count, whole=context),
        )
        yield msgspec.structs.replace(job, context=own, prompts=(), **prompt_fields(prompt))


class PartResults:
    """Results of prompts whose rows are not complete yet."""

    def __init__(self) -> None:
        self._results: dict[int, list[JobResult]] = {}
        """Results by identity of the row's context, which its parts keep alive."""

    def add(self, part: Part, result: JobResult) -> JobResult | None:
        """Take the result of a prompt. Returns that of its row if it is the last one."""
        key = id(part.whole)
        results = self._results.setdefault(key, [])
        results.append(result)
        if len(results) < part.count:
            return None
        del self._results[key]
        return _joined(part, results)


def _joined(part: Part, results: list[JobResult]) -> JobResult:
    """Return the result of a row, which is the first error of its prompts, if any."""
    results.sort(key=lambda result: -1 if result.context.part is None else result.context.part.number)
    thoughts = [count for result in results if (count := result.usage.reasoning_tokens) is not msgspec.UNSET]
    usage = Usage(
        prompt_tokens=sum(result.usage.prompt_tokens for result in results),
        completion_tokens=sum(result.usage.completion_tokens for result in results),
        cached_tokens=sum(result.usage.cached_tokens for result in results),
        reasoning_tokens=sum(thoughts) if thoughts else msgspec.UNSET,
    )
    failed = next((result for result in results if result.error is not None), None)
    if failed is not None:
        return msgspec.structs.replace(failed, context=part.whole)
    choices = [choice for result in results for choice in result.choices]
    vectors = [result.answer for result in results if isinstance(result.answer, EmbedAnswer)]
    return JobResult(
        context=part.whole,
        choices=[msgspec.structs.replace(choice, index=index) for index, choice in enumerate(choices)],
        usage=usage,
        answer=EmbedAnswers(vectors) if vectors else None,
    )
