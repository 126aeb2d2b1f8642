"""The results of a step: what its forward pass leaves on the device, and what is on its way to the host."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
from torch import Tensor

from nvcli.core.messages import StepOutput, pack
from nvcli.worker.distributed.tensor_parallel import StageState
from nvcli.worker.masks.forced_runs import Runs
from nvcli.worker.runner.constraints import StepMasks
from nvcli.worker.runner.drafter import PendingDrafts
from nvcli.worker.runner.graph_runner import unowned
from nvcli.worker.runner.logprobs import PendingLogprobs
from nvcli.worker.runner.query_reader import PendingQueryResults
from nvcli.worker.runner.step_clock import StepTime


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The output of a last-stage step, for the N rows kept for logits."""

    logits: Tensor
    """[N, M], this rank's part of the vocabulary."""
    ids: Tensor | None
    """[N] int32, already in the slot table, `NOT_FINITE` for none; None if the rows ask for more than `Sampler.sample`
    does."""
    query_results: PendingQueryResults | None = None
    """Results of prompt queries; None if there are none."""
    states: Tensor | None = None
    """[T, K], what the head that drafts is yet to take in once the tokens are chosen; None: nothing."""


StepForward = StepLogits | StageState
"""The output of a step's forward pass, in the last stage and in others."""


def unowned_output(output: StepForward) -> StepForward:
    """Return an output with its large tensors `unowned`."""
    if isinstance(output, StageState):
        delta = None if output.delta is None else unowned(output.delta)
        return replace(output, residual=unowned(output.residual), delta=delta)
    states = None if output.states is None else unowned(output.states)
    return replace(output, logits=unowned(output.logits), states=states)


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step's ids on their way to the host."""

    step_id: int
    ids: Tensor
    """[num_sampled] int32, on the host once the step has finished."""
    logprobs: PendingLogprobs | None
    time: StepTime
    is_graph: bool
    query_results: PendingQueryResults | None
    masks: StepMasks | None
    """The masks of its constrained rows, whose outcome is complete then too; None if there are none."""
    note: str
    """A line for the user, or empty."""
    drafts: PendingDrafts | None
    """The numbers of its drafts; None: its rows have none."""

    def result(self) -> StepOutput:
        """Wait for the step, and return its output."""
        self.time.wait()
        ids, counts = self.ids.numpy(), None
        logprobs = [] if self.logprobs is None else self.logprobs.result()
        if self.masks is not None:
            ids = self.masks.mark_failures(ids)
            counts = self.masks.counts(len(ids))
        if self.drafts is not None:
            counts, is_given = self.drafts.counts()
        elif counts is not None:
            is_given = counts > 0
        forced = b"" if self.masks is None else _pack_runs(self.masks.runs.take(), None if counts is None else is_given)
        if counts is not None:
            ids = ids[is_given]
            logprobs = list(compress(logprobs, is_given.tolist()))
        return StepOutput(
            step_id=self.step_id,
            token_ids=ids.tobytes(),
            counts=b"" if counts is None else counts.tobytes(),
            drafted=b"" if self.drafts is None else self.drafts.drafted.numpy().tobytes(),
            draft_sources=b"" if self.drafts is None else self.drafts.sources.numpy().tobytes(),
            forced=forced,
            logprobs=logprobs,
            seconds=self.time.seconds,
            idle_seconds=self.time.idle_seconds,
            is_graph=self.is_graph,
            query_results=[] if self.query_results is None else self.query_results.result(),
            note=self.note,
        )


def _pack_runs(runs: Runs, is_given: np.ndarray | None) -> bytes:
    """Pack runs as `StepOutput.forced`. `is_given`: [num_sampled] bool, the sampled ids that count; None: all."""
    if not runs:
        return b""
    index = None if is_given is None else np.cumsum(is_given) - 1
    numbers: list[int] = []
    for place, tokens in runs.items():
        if tokens and (is_given is None or is_given[place]):
            numbers += (place if index is None else int(index[place]), len(tokens), *tokens)
    return pack(numbers)
