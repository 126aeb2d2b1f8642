"""Gathers the tokens of running requests and turns finished rows into results.

A row with `n` samples is `n` requests and one result. Text is made when a row has finished, for many rows together;
only samples with stop strings are decoded as they grow.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

import msgspec

from nvcli.engine.request import Request, RequestOutput
from nvcli.errors import RowError
from nvcli.job_run.text.prepare import PreparedRow
from nvcli.job_run.text.stop_strings import StopStringDetector, StopStrings
from nvcli.job_run.text.tokenizer import Tokenizer
from nvcli.jobs.job import Choice, JobResult, Logprobs, Usage, failed
from nvcli.messages import TokenLogprobs, unpack


class OpenRow:
    """A row that was given to a replica, with its samples as far as they have come."""

    __slots__ = ("_stop_strings", "error", "num_open", "prepared", "request_ids", "samples", "streams")

    def __init__(self, prepared: PreparedRow, first_request_id: int) -> None:
        self.prepared = prepared
        self.samples = [Sample() for _ in range(prepared.sampling.n)]
        self.request_ids = range(first_request_id, first_request_id + prepared.sampling.n)
        self.num_open = len(self.samples)
        self.error: RowError | None = None
        self._stop_strings: StopStrings | None = None
        caller = prepared.place.caller
        self.streams = caller is not None and caller.streams
        """Whether somebody wants the text of its first sample as it comes."""

    @property
    def stop_strings(self) -> StopStrings | None:
        """The row's stop strings, which its samples share; None if no text is made before an answer has ended."""
        sampling = self.prepared.sampling
        if self._stop_strings is None and (sampling.stop or self.streams):
            self._stop_strings = StopStrings(sampling.stop_strings)
        return self._stop_strings

    def take(self, output: RequestOutput, tokenizer: Tokenizer) -> tuple[Sample, bool]:
        """Add an output of the engine to its sample, and return the sample and what `Sample.take` returns."""
        sample = self.samples[output.request_id - self.request_ids.start]
        return sample, sample.take(output, self, tokenizer)

    def request(self, run_seed: int) -> Request:
        """Return the request for all samples of the row.

        A row's own seed makes its answer independent of the run's seed and of the row's index.
        """
        prepared = self.prepared
        sampling = prepared.sampling
        seed = sampling.seed
        caller = prepared.place.caller
        if caller is not None and caller.seed is not None:
            run_seed = caller.seed
        return Request(
            request_id=self.request_ids.start,
            prompt_ids=prepared.prompt_ids,
            max_tokens=prepared.max_tokens,
            # Stop strings are found here, in the text that the tokens come to; the constraint says what is structured.
            sampling=msgspec.structs.replace(sampling, stop=[], structured=None)
            if sampling.stop or sampling.structured is not None
            else sampling,
            stop_ids=prepared.stop_ids,
            seed=run_seed if seed is None else seed,
            row=prepared.place.index if seed is None else 0,
            sample=0,
            n=sampling.n,
            constraint=prepared.constraint,
            stream=bool(sampling.stop) or self.streams,
        )


class Sample:
    """One answer of a row, as far as it has come."""

    __slots__ = ("_detector", "finish_reason", "logprobs", "num_cached_tokens", "stopped_by_id", "token_ids")

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.logprobs: list[TokenLogprobs] = []
        self.num_cached_tokens = 0
        self.finish_reason = ""
        self.stopped_by_id = False
        self._detector: StopStringDetector | None = None

    @property
    def text_before_stop(self) -> str | None:
        """The text of the sample if a stop string ended it, else None."""
        return self._detector.text if self._detector is not None else None

    @property
    def text_ids(self) -> array[int]:
        """The tokens that become text: all but a stop token that ended the answer."""
        return self.token_ids[:-1] if self.stopped_by_id else self.token_ids

    def take_settled(self) -> str:
        """Return the text since the last call that no stop string can take back. The row is one that streams."""
        return "" if self._detector is None else self._detector.take_settled()

    def take(self, output: RequestOutput, row: OpenRow, tokenizer: Tokenizer) -> bool:
        """Add an output of the engine to this sample of `row`.

        Returns True if the sample is complete with it, because the engine says so or because a stop string is complete.
        """
        self.token_ids.frombytes(output.token_ids)
        if output.logprobs:
            self.logprobs += output.logprobs
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.stopped_by_id = output.stopped_by_id
        stop_strings = row.stop_strings
        if stop_strings is not None:
            ids = unpack(output.token_ids)
            if self._detector is None:
                self._detector = StopStringDetector(
                    tokenizer.decode_one, stop_strings, min_tokens=row.prepared.sampling.min_tokens
                )
            if self._detector.push(ids[:-1] if output.stopped_by_id else ids):
                del self.token_ids[self._detector.num_tokens :]
                del self.logprobs[self._detector.num_tokens :]
                self.finish_reason, self.stopped_by_id = "stop", False
                return True
        return output.finish_reason is not None


def results_of(rows: Sequence[OpenRow], tokenizer: Tokenizer) -> list[JobResult]:
    """Return the results of rows that have finished; their tokens are decoded together."""
    undecoded = [
        sample for row in rows if row.error is None for sample in row.samples if sample.text_before_stop is None
    ]
    texts = iter(tokenizer.decode([sample.text_ids for sample in undecoded]))
    return [_result_of(row, texts, tokenizer) for row in rows]


def _result_of(row: OpenRow, texts: Iterator[str], tokenizer: Tokenizer) -> JobResult:
    """Make one row's result. `texts` gives the texts of the samples that no stop string ended, in their order."""
    prepared = row.prepared
    if row.error is not None:
        return failed(prepared.place, row.error)
    choices = []
    for number, sample in enumerate(row.samples):
        text = sample.text_before_stop
        choices.append(
            Choice(
                index=number,
                text=next(texts) if text is None else text,
                finish_reason=sample.finish_reason,
                token_ids=sample.token_ids.tolist() if prepared.sampling.return_token_ids else None,
                logprobs=_logprobs_of(sample, tokenizer) if prepared.sampling.logprobs is not None else None,
            )
        )
    usage = Usage(
        prompt_tokens=prepared.num_prompt_tokens,
        completion_tokens=sum(len(sample.token_ids) for sample in row.samples),
        # The samples of a row share its prompt: the first one may compute it, the others find it in the cache.
        cached_tokens=min(sample.num_cached_tokens for sample in row.samples),
    )
    return JobResult(place=prepared.place, choices=choices, usage=usage)


def _logprobs_of(sample: Sample, tokenizer: Tokenizer) -> Logprobs:
    top: list[dict[str, float]] = []
    for token in sample.logprobs:
        alternatives: dict[str, float] = {}
        for token_id, logprob in zip(token.top_ids, token.top_logprobs, strict=True):
            alternatives.setdefault(tokenizer.token_text(token_id), logprob)  # of equal texts the likeliest stays
        top.append(alternatives)
    return Logprobs(
        tokens=[tokenizer.token_text(token_id) for token_id in sample.token_ids],
        token_logprobs=[token.logprob for token in sample.logprobs],
        top_logprobs=top,
    )
