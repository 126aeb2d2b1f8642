"""Collects the tokens of running requests and turns finished rows into results.

A row with `n` samples is `n` requests and one result. Text is made when a row has finished, for many rows together;
only samples with stop strings are decoded as they grow.
"""

from __future__ import annotations

import functools
import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nvcli.core.messages import PromptQueryResult, TokenLogprobs, unpack
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.request import Request, RequestOutput
from nvcli.errors import RowError, unexpected
from nvcli.job.job import Choice, JobResult, Logprobs, Usage, failed
from nvcli.job.run.prompt_results import alternatives, prompt_logprobs, prompt_scoring, task_requests, task_result
from nvcli.job.text.answer_reader import ParsedAnswer, tool_calls_of
from nvcli.job.text.prepare import PreparedRow
from nvcli.job.text.stop_strings import StopStringDetector, StopStrings
from nvcli.job.text.tokenizer import Tokenizer


class OpenRow:
    """A row in a replica, with its samples so far."""

    __slots__ = ("_stop_strings", "error", "num_open", "prepared", "request_ids", "samples", "streams")

    def __init__(self, prepared: PreparedRow, first_request_id: int) -> None:
        self.prepared = prepared
        num_samples = prepared.sampling.num_samples
        self.samples = [Sample() for _ in range(num_samples)]
        self.request_ids = range(first_request_id, first_request_id + num_samples)
        self.num_open = len(self.samples)
        self.error: RowError | None = None
        self._stop_strings: StopStrings | None = None
        caller = prepared.context.caller
        part = prepared.context.part
        is_first = part is None or part.number == 0
        self.streams = caller is not None and caller.streams and is_first and not prepared.sampling.is_ranked
        """Whether the text of its first sample is streamed."""

    @property
    def is_plain(self) -> bool:
        """Whether the answers are just decoded tokens, which are decoded together with those of other rows."""
        prepared = self.prepared
        is_answer = self.error is None and prepared.task is None
        return is_answer and prepared.reading is None and prepared.sampling.skip_special_tokens

    @property
    def stop_strings(self) -> StopStrings | None:
        """The stop strings of all samples; None if text is only made once an answer has ended."""
        sampling = self.prepared.sampling
        if self._stop_strings is None and (sampling.stop or self.streams):
            self._stop_strings = StopStrings(sampling.stop_strings)
        return self._stop_strings

    def take(self, output: RequestOutput, tokenizer: Tokenizer) -> tuple[Sample, bool]:
        """Add an output of the engine to its sample. Returns the sample and whether it is complete."""
        sample = self.samples[output.request_id - self.request_ids.start]
        return sample, sample.take(output, self, tokenizer)

    def requests(self, run_seed: int) -> list[Request]:
        """Return the requests of the row: one for all samples, or one for each text to score."""
        task = self.prepared.task
        if task is not None:
            return task_requests(self.prepared, task, self.request_ids.start)
        return [self.request(run_seed)]

    def take_rest(self, sample: Sample, tokenizer: Tokenizer) -> str:
        """Return the text of a complete streaming sample that was not streamed yet, with thoughts and calls.

        It includes bytes that have not become a character.
        """
        sampling = self.prepared.sampling
        text = sample.text_before_stop
        if text is None:
            ids = sample.text_ids(sampling)
            text = tokenizer.decode_one(ids, skip_special_tokens=sampling.skip_special_tokens)
        return text[sample.num_settled_chars :]

    def request(self, run_seed: int) -> Request:
        """Return the request for all samples of the row.

        A row's own seed makes its answer independent of the run's seed and of the row's index.
        """
        prepared = self.prepared
        sampling = prepared.sampling
        seed, rules = sampling.seed, prepared.rules
        caller = prepared.context.caller
        if caller is not None and caller.seed is not None:
            run_seed = caller.seed
        return Request(
            request_id=self.request_ids.start,
            prompt_ids=prepared.prompt_ids,
            images=[] if prepared.images is None else prepared.images.images,
            image_token_id=0 if prepared.images is None else prepared.images.token_id,
            max_tokens=prepared.max_tokens,
            sampling=_engine_sampling(prepared),
            stop_ids=prepared.stop_ids,
            forbidden_ids=() if rules is None else rules.forbidden_ids,
            bad_words=() if rules is None else rules.bad_words,
            thought_limit=prepared.thought_limit,
            seed=run_seed if seed is None else seed,
            row=prepared.context.index if seed is None else 0,
            sample=0 if prepared.context.part is None else prepared.context.part.number * sampling.num_samples,
            n=sampling.num_samples,
            constraint=prepared.constraint,
            stream=bool(sampling.stop) or self.streams,
            read=prompt_scoring(prepared),
            adapter=prepared.adapter,
        )


def _engine_sampling(prepared: PreparedRow) -> SamplingParams:
    """Return a row's sampling as the engine needs it."""
    sampling, rules = prepared.sampling, prepared.rules
    changes: dict[str, Any] = {"stop": []} if sampling.stop else {}  # stop strings are found in the text here
    if prepared.constraint is not None:
        changes["structured"] = None
    if rules is not None:
        changes |= {"logit_bias": rules.biases, "bad_words": []}
    if sampling.is_ranked and sampling.logprobs is None:
        changes["logprobs"] = 0
    return msgspec.structs.replace(sampling, **changes) if changes else sampling


@dataclass(slots=True, eq=False)
class Sample:
    """One answer of a row, so far."""

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    query_results: list[PromptQueryResult] = field(default_factory=list)
    """Log-probabilities or hidden states of the prompt."""
    num_cached_tokens: int = 0
    num_settled_chars: int = 0
    """Number of characters that `take_settled` has returned."""
    finish_reason: str = ""
    stopped_by_id: bool = False
    _detector: StopStringDetector | None = None

    @property
    def text_before_stop(self) -> str | None:
        """The text of the sample if a stop string ended it; None otherwise."""
        return self._detector.text if self._detector is not None else None

    def text_ids(self, sampling: SamplingParams) -> array[int]:
        """Return the tokens that become text: all but an unwanted stop token at the end."""
        is_whole = not self.stopped_by_id or sampling.include_stop_str_in_output
        return self.token_ids if is_whole else self.token_ids[:-1]

    def score(self, sampling: SamplingParams) -> float:
        """Return the score by which answers of a ranked row are sorted; the largest is the best."""
        total = math.fsum(token.logprob for token in self.logprobs)
        return total if sampling.rank_by == "sum" else total / max(1, len(self.logprobs))

    def take_settled(self) -> str:
        """Return the text since the last call that no stop string can take back, of a row that streams."""
        text = "" if self._detector is None else self._detector.take_settled()
        self.num_settled_chars += len(text)
        return text

    def take(self, output: RequestOutput, row: OpenRow, tokenizer: Tokenizer) -> bool:
        """Add an output of the engine to this sample of `row`.

        Returns True if the sample is complete with it, because the engine says so or because a stop string is complete.
        """
        self.token_ids.frombytes(output.token_ids)
        if output.logprobs:
            self.logprobs += output.logprobs
        if output.query_results:
            self.query_results += output.query_results
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stopped_by_id = output.stopped_by_id
        stop_strings = row.stop_strings
        if stop_strings is not None:
            ids = unpack(output.token_ids)
            if self._detector is None:
                sampling = row.prepared.sampling
                self._detector = StopStringDetector(
                    functools.partial(tokenizer.decode_one, skip_special_tokens=sampling.skip_special_tokens),
                    stop_strings,
                    min_tokens=sampling.min_tokens,
                    keeps_stop=sampling.include_stop_str_in_output,
                )
            if self._detector.push(ids[:-1] if output.stopped_by_id else ids):
                del self.token_ids[self._detector.num_tokens :]
                del self.logprobs[self._detector.num_tokens :]
                self.finish_reason, self.stopped_by_id = "stop", False
                return True
        return output.finish_reason is not None


def results_of(rows: Sequence[OpenRow], tokenizer: Tokenizer) -> list[JobResult]:
    """Return the results of finished rows, whose tokens are decoded together.

    A row whose answer cannot be read gets an `error`.
    """
    try:
        return _results_of(rows, tokenizer)
    except BaseException as error:
        fault = unexpected(error, "reading the answer")
    if len(rows) > 1:  # one of them is at fault
        return [result for row in rows for result in results_of([row], tokenizer)]
    for row in rows:
        row.error = fault
    return [failed(row.prepared.context, fault) for row in rows]


def _results_of(rows: Sequence[OpenRow], tokenizer: Tokenizer) -> list[JobResult]:
    undecoded = [
        sample.text_ids(row.prepared.sampling)
        for row in rows
        if row.is_plain
        for sample in row.samples
        if sample.text_before_stop is None
    ]
    texts = iter(tokenizer.decode(undecoded))
    return [_result_of(row, texts, tokenizer) for row in rows]


def _result_of(row: OpenRow, texts: Iterator[str], tokenizer: Tokenizer) -> JobResult:
    """Make a row's result. `texts` yields the texts of plain rows' samples that no stop string ended, in order."""
    prepared = row.prepared
    sampling = prepared.sampling
    if row.error is not None:
        return failed(prepared.context, row.error)
    if prepared.task is not None:
        cached = min(sample.num_cached_tokens for sample in row.samples)
        return task_result(
            prepared, [sample.query_results for sample in row.samples], tokenizer, num_cached_tokens=cached
        )
    answers = [(sample, _read(row, sample, texts, tokenizer)) for sample in row.samples]
    if sampling.is_ranked:
        answers.sort(key=lambda answer: -answer[0].score(sampling))
    query_results, num_top = row.samples[0].query_results, sampling.logprobs
    echoed = (
        prompt_logprobs(prepared, query_results, num_top, tokenizer) if sampling.echo and num_top is not None else None
    )
    choices = [
        Choice(
            index=number,
            text=prepared.echo + answer.text if prepared.echo else answer.text,
            finish_reason="tool_calls" if answer.calls and sample.finish_reason == "stop" else sample.finish_reason,
            reasoning_content=answer.reasoning,
            tool_calls=tool_calls_of(answer.calls, prepared.prompt_ids, number) if answer.calls else None,
            tool_call_error=answer.problem or None,
            token_ids=sample.token_ids.tolist() if sampling.return_token_ids else None,
            logprobs=_logprobs_of(sample, echoed, tokenizer) if num_top is not None else None,
            score=sample.score(sampling) if sampling.is_ranked else None,
        )
        for number, (sample, answer) in enumerate(answers[: sampling.n])
    ]
    tells_thoughts = prepared.reading is not None and prepared.reading.tells_thoughts
    usage = Usage(
        prompt_tokens=prepared.num_prompt_tokens,
        completion_tokens=sum(len(sample.token_ids) for sample in row.samples),
        # The samples of a row share its prompt: the first one may compute it, the others find it in the cache.
        cached_tokens=min(sample.num_cached_tokens for sample in row.samples),
        reasoning_tokens=sum(answer.num_reasoning_tokens for _, answer in answers) if tells_thoughts else msgspec.UNSET,
    )
    num_top = sampling.prompt_logprobs
    of_prompt = None if num_top is None else prompt_logprobs(prepared, query_results, num_top, tokenizer)
    return JobResult(context=prepared.context, choices=choices, usage=usage, prompt_logprobs=of_prompt)


def _read(row: OpenRow, sample: Sample, texts: Iterator[str], tokenizer: Tokenizer) -> ParsedAnswer:
    """Return an answer, parsed if its row wants that. `texts` are those of `_result_of`."""
    prepared = row.prepared
    sampling = prepared.sampling
    text = sample.text_before_stop
    if prepared.reading is not None:
        return prepared.reading.reader.read(
            sample.text_ids(sampling),
            prepared.reading,
            text_before_stop=text,
            skip_special_tokens=sampling.skip_special_tokens,
        )
    if text is None and row.is_plain:
        text = next(texts)
    elif text is None:
        text = tokenizer.decode_one(sample.text_ids(sampling), skip_special_tokens=sampling.skip_special_tokens)
    return ParsedAnswer(text=text)


def _logprobs_of(sample: Sample, echoed: Logprobs | None, tokenizer: Tokenizer) -> Logprobs:
    """Return the log-probabilities of an answer's tokens, after those of an echoed prompt."""
    before = echoed or Logprobs(tokens=[], token_logprobs=[], top_logprobs=[])
    return Logprobs(
        tokens=before.tokens + [tokenizer.token_text(token_id) for token_id in sample.token_ids],
        token_logprobs=before.token_logprobs + [token.logprob for token in sample.logprobs],
        top_logprobs=before.top_logprobs
        + [alternatives(token.top_ids, token.top_logprobs, tokenizer) for token in sample.logprobs],
    )
