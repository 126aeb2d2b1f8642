"""ForcedTokens: tokens that must come next in an answer because its grammar allows nothing else.

The ranks find them and return them with the output of the step whose token they follow (`StepOutput.forced`). By then
the next step may already be in flight; its token for the answer is the first of them. If it saves a step, the answer
takes all of them at once and continues with a prefill chunk of known tokens, as it does after the forced tokens of a
thought. Otherwise, and where the runs of a step together save too little for the chunks, they are decoded one at a
time, as usual.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nvcli.core.messages import unpack
from nvcli.engine.running_requests import RunningRequests
from nvcli.engine.state import RequestState
from nvcli.engine.step_draft import ScheduledStep

_MOST_RUNS = 32
"""Maximum number of runs taken at a time. With more chunks, a step would use a CUDA graph for many more tokens
(`sizing.graph_sizes`)."""
_LEAST_SAVED = 0.2
"""Minimum decode rows that a step's runs must save, as a share of the step's tokens. Chunks make a step
longer: by 0.35 of a decode step with Qwen3-0.6B and 256 requests on an H200."""


@dataclass(slots=True)
class _Run:
    """Tokens that must come next in an answer."""

    tokens: array[int]
    widths: list[int] = field(default_factory=list)
    """The number of logits of each of the request's rows in flight. Such a row gives one token, the next of the run."""

    @property
    def num_saved(self) -> int:
        """Decode rows that the request saves by taking the run."""
        return len(self.tokens) - len(self.widths)


class ForcedTokens:
    """The forced tokens of one replica's requests."""

    def __init__(self, running: RunningRequests, *, takes_all: bool) -> None:
        """`takes_all`: runs are taken even if they save too little to make the job faster."""
        self._running = running
        self._least_saved = 0.0 if takes_all else _LEAST_SAVED
        self.num_taken = 0
        """Tokens taken without a decode row of their own."""
        self.num_runs = 0
        """Runs taken."""
        self._coming: dict[RequestState, int] = {}
        """Request → the number of tokens that steps in flight will give and that it already has."""

    def put_back(self) -> None:
        """Record that none of the steps in flight will run."""
        self._coming.clear()

    def missing(self, rows: Iterable[tuple[RequestState, int, int]]) -> list[tuple[RequestState, int]]:
        """Return the requests whose rows in a step gave fewer tokens than they have logits, and how many fewer.
        Requests whose bounds `take` has made exact are left out. `rows`: (request, number of logits, number of tokens
        given)."""
        return [(state, n - count) for state, n, count in rows if count != n and state not in self._coming]

    def take(
        self, owners: Sequence[RequestState], tokens: array[int], packed: bytes, in_flight: Iterable[ScheduledStep]
    ) -> tuple[Sequence[RequestState], array[int]]:
        """Process the tokens [n] of a step, their `owners` [n], and the step's `StepOutput.forced`. `in_flight`: the
        steps after it.

        Returns the new tokens, forced ones included, with their owners. Requests that take forced tokens continue with
        chunks. Their bounds are made exact: such a request has no drafts, so a step in flight computes one token for
        it, however wide its row is.
        """
        if not packed and not self._coming:
            return owners, tokens
        runs = self._choose(owners, _unpack_runs(packed), in_flight)
        new_owners: list[RequestState] = []
        new_tokens = array("i")
        for index, (state, token) in enumerate(zip(owners, tokens, strict=True)):
            if state in self._coming:
                self._coming[state] -= 1
                if not self._coming[state]:
                    del self._coming[state]
                continue
            new_owners.append(state)
            new_tokens.append(token)
            run = runs.get(index)
            if run is None:
                continue
            new_owners += [state] * len(run.tokens)
            new_tokens += run.tokens
            if run.widths:
                self._coming[state] = len(run.widths)
            if num_surplus := sum(run.widths) - len(run.widths):
                state.num_computed -= num_surplus
                self._running.homes.tables_of(state).trim(state)
                self._running.decoding.bounds_changed()
            self._running.prefill_again(state)
            self.num_taken += run.num_saved
            self.num_runs += 1
        return new_owners, new_tokens

    def _choose(
        self, owners: Sequence[RequestState], found: dict[int, array[int]], in_flight: Iterable[ScheduledStep]
    ) -> dict[int, _Run]:
        """Choose which of the runs found to take. Both mappings are keyed by the index of the token that the run
        follows."""
        runs: dict[int, _Run] = {}
        by_owner: dict[RequestState, _Run] = {}
        for index, tokens in found.items():
            state = owners[index]
            if state.slot is not None and state not in self._coming and state.barrier >= state.max_len:
                runs[index] = by_owner[state] = _Run(tokens)
        if not runs:
            return {}
        for step in in_flight:
            for state, num_logits in zip(step.sampling, step.num_logits, strict=True):
                if state in by_owner:
                    by_owner[state].widths.append(num_logits)
        saving = {index: run for index, run in runs.items() if run.num_saved > 0}
        if len(saving) > _MOST_RUNS:
            best = sorted(saving, key=lambda index: saving[index].num_saved, reverse=True)[:_MOST_RUNS]
            saving = {index: saving[index] for index in best}
        num_saved = sum(run.num_saved for run in saving.values())
        return saving if num_saved >= self._least_saved * len(owners) else {}


def _unpack_runs(packed: bytes) -> dict[int, array[int]]:
    """Return the tokens that follow each token, by the token's index."""
    numbers, runs, place = unpack(packed), {}, 0
    while place < len(numbers):
        index, count = numbers[place : place + 2]
        runs[index] = numbers[place + 2 : place + 2 + count]
        place += 2 + count
    return runs
