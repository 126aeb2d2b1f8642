"""Requests of rows that are scored, embedded or classified, and their results."""

from __future__ import annotations

import base64
import math
from array import array
from collections.abc import Sequence
from typing import Any

from nvcli.core.messages import PromptQueryResult, unpack
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.task_config import Activation, Classifier
from nvcli.engine.request import Pooling, PromptScoring, Request
from nvcli.errors import RowError
from nvcli.job.job import (
    ClassifyAnswer,
    EmbedAnswer,
    EmbedTask,
    FoundClass,
    JobResult,
    Logprobs,
    ScoreAnswer,
    ScoredChoice,
    ScoreTask,
    Usage,
    failed,
)
from nvcli.job.text.prepare import PreparedRow
from nvcli.job.text.prompt_tasks import PreparedTask, ScoredText, request_tokens
from nvcli.job.text.tokenizer import Tokenizer

_NOT_FINITE = (
    "the logits or hidden states of this row are NaN or infinite; the weights may be damaged, or the dtype too narrow "
    "for the model"
)


def task_requests(prepared: PreparedRow, task: PreparedTask, first_id: int) -> list[Request]:
    """Return a request for each text to score, or the one of a row to embed or classify."""
    wanted: list[tuple[bytes, PromptScoring | Pooling]] = []
    if isinstance(task.task, EmbedTask | Classifier):
        wanted.append((prepared.prompt_ids, Pooling(position=task.task.position)))
    for text in task.texts:
        prompt_ids, first, last_id = request_tokens(prepared.prompt_ids, text)
        wanted.append((prompt_ids, PromptScoring(first=first, next_id=last_id)))
    return [
        Request(
            request_id=first_id + number,
            prompt_ids=prompt_ids,
            images=[] if prepared.images is None else prepared.images.images,
            image_token_id=0 if prepared.images is None else prepared.images.token_id,
            max_tokens=1,
            sampling=prepared.sampling,
            stop_ids=[],
            seed=0,
            row=0,
            sample=0,
            read=read,
            adapter=prepared.adapter,
        )
        for number, (prompt_ids, read) in enumerate(wanted)
    ]


def task_result(
    prepared: PreparedRow,
    query_results: Sequence[list[PromptQueryResult]],
    tokenizer: Tokenizer,
    *,
    num_cached_tokens: int,
) -> JobResult:
    """Make the result of a row that is scored, embedded or classified from the results of its requests."""
    assert prepared.task is not None
    task = prepared.task.task
    answer: ScoreAnswer | EmbedAnswer | ClassifyAnswer | None
    if isinstance(task, Classifier):
        answer = _classes(task, query_results[0])
    elif isinstance(task, EmbedTask):
        answer = _vector(task, query_results[0], prepared.num_prompt_tokens)
    else:
        answer = _scores(task, prepared.task.texts, query_results, tokenizer)
    if answer is None:
        return failed(prepared.context, RowError("non_finite_logits", _NOT_FINITE))
    usage = Usage(prompt_tokens=prepared.num_prompt_tokens, cached_tokens=num_cached_tokens)
    return JobResult(context=prepared.context, usage=usage, answer=answer)


def prompt_scoring(prepared: PreparedRow) -> PromptScoring | None:
    """Return the query for the log-probabilities of a whole prompt; None: the row wants none, or there are none."""
    num_top = _num_prompt_top(prepared.sampling)
    if num_top is None or prepared.num_prompt_tokens < 2:
        return None
    return PromptScoring(first=1, num_top=num_top)


def _num_prompt_top(sampling: SamplingParams) -> int | None:
    """Return the number of alternatives for each prompt token; None: no log-probabilities are wanted."""
    wanted = [sampling.prompt_logprobs, sampling.logprobs if sampling.echo else None]
    return max((number for number in wanted if number is not None), default=None)


def prompt_logprobs(
    prepared: PreparedRow, query_results: Sequence[PromptQueryResult], num_top: int, tokenizer: Tokenizer
) -> Logprobs:
    """Make the log-probabilities of a prompt's tokens, with `num_top` alternatives each, from what `prompt_scoring`
    asked for. Values that are not finite become null in JSON."""
    logprobs = _floats(b"".join(result.logprobs for result in query_results))
    top_ids = unpack(b"".join(result.top_ids for result in query_results))
    top_logprobs = _floats(b"".join(result.top_logprobs for result in query_results))
    num_read = _num_prompt_top(prepared.sampling) or 0
    top: list[dict[str, float] | None] = [None]
    for at in range(len(logprobs)):
        wanted = slice(at * num_read, at * num_read + num_top)
        top.append(alternatives(top_ids[wanted], top_logprobs[wanted], tokenizer))
    return Logprobs(
        tokens=[tokenizer.token_text(token) for token in unpack(prepared.prompt_ids)],
        token_logprobs=[None, *logprobs],
        top_logprobs=top,
    )


def alternatives(ids: Sequence[int], logprobs: Sequence[float], tokenizer: Tokenizer) -> dict[str, float]:
    """Return the log-probabilities of tokens by their text, the likeliest first. If texts are equal, the likeliest is
    kept."""
    found: dict[str, float] = {}
    for token_id, logprob in zip(ids, logprobs, strict=True):
        found.setdefault(tokenizer.token_text(token_id), logprob)
    return found


def _scores(
    task: ScoreTask, texts: Sequence[ScoredText], query_results: Sequence[list[PromptQueryResult]], tokenizer: Tokenizer
) -> ScoreAnswer | None:
    """Make the scores of a row; None if one is not finite."""
    choices = []
    for number, (text, parts) in enumerate(zip(texts, query_results, strict=True)):
        logprobs = _floats(b"".join(part.logprobs for part in parts))
        total = math.fsum(logprobs)
        if not math.isfinite(total):
            return None
        divisors = {"none": 1, "tokens": len(logprobs), "bytes": text.num_bytes}
        divisor = divisors[task.normalize]
        details: dict[str, Any] = {}
        if text.text is not None:
            details["text"] = text.text
        if task.token_logprobs:
            details["tokens"] = [tokenizer.token_text(token) for token in unpack(text.ids)]
            details["token_logprobs"] = logprobs.tolist()
        choices.append(
            ScoredChoice(
                index=number,
                logprob=total,
                num_tokens=len(logprobs),
                num_bytes=text.num_bytes,
                score=total / divisor if divisor else None,
                perplexity=perplexity(total, len(logprobs)),
                is_greedy=b"".join(part.best_ids for part in parts) == text.ids,
                **details,
            )
        )
    best = max(choices, key=lambda choice: -math.inf if choice.score is None else choice.score).index
    return ScoreAnswer(choices=choices, best=best, correct=None if task.answer is None else best == task.answer)


def perplexity(logprob: float, num_tokens: int) -> float:
    """Return exp(-logprob / num_tokens), at most the largest float."""
    return math.exp(min(-logprob / num_tokens, 700.0))


def _vector(task: EmbedTask, parts: Sequence[PromptQueryResult], num_tokens: int) -> EmbedAnswer | None:
    """Make the vector of a row; None if it is not finite."""
    import numpy as np  # other jobs do without it

    sums = np.array([np.frombuffer(part.hidden_sum, np.float32) for part in parts], dtype=np.float64)
    values: np.ndarray = sums.sum(axis=0)
    if task.position == "all" and not task.gets_mean:
        values /= num_tokens
    values = values[: task.dimensions]
    if task.normalize:
        values /= max(float(np.linalg.norm(values)), 1e-12)
    if not np.isfinite(values).all():
        return None
    vector = values.astype("<f4")
    if task.encoding == "base64":
        return EmbedAnswer(embedding=base64.b64encode(vector.tobytes()).decode())
    return EmbedAnswer(embedding=vector.tolist())


def _classes(task: Classifier, parts: Sequence[PromptQueryResult]) -> ClassifyAnswer | None:
    """Make the classes of a row; None if a logit is not finite."""
    logits = [logit / task.temperature for logit in _floats(b"".join(part.hidden_sum for part in parts))]
    if not all(map(math.isfinite, logits)):
        return None
    probabilities = _probabilities(task.activation, logits)
    found = [
        FoundClass(label=label, logit=logit, probability=probability)
        for label, logit, probability in zip(task.labels, logits, probabilities, strict=True)
    ]
    best = max(found, key=lambda each: each.logit)
    score = best.logit if best.probability is None or len(found) == 1 else best.probability
    return ClassifyAnswer(label=best.label, score=score, classes=found)


def _probabilities(activation: Activation, logits: Sequence[float]) -> Sequence[float | None]:
    """Return the probabilities of classes, or None for each if they have none."""
    if activation == "none":
        return [None] * len(logits)
    if activation == "sigmoid":
        return [math.exp(min(logit, 0.0)) / (1 + math.exp(-abs(logit))) for logit in logits]
    most = max(logits)
    odds = [math.exp(logit - most) for logit in logits]
    total = math.fsum(odds)
    return [each / total for each in odds]


def _floats(packed: bytes) -> array[float]:
    values = array("f")
    values.frombytes(packed)
    return values
