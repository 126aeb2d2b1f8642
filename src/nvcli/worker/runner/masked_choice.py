"""MaskedChoice: what structured answers add to a step.

A step calls it at three moments: on arrival (`begin`), before it launches its forward pass (`before_forward`), and
after the pass, to choose the tokens (`choose`, then `record`). The masks come from `Constraints`.

A step's graph normally chooses the tokens itself. Constrained rows have no masks by then, so a step with such rows
would choose twice, the second time by separate launches. A shape that has had several such steps is therefore *split*:
its graph is recaptured without the choice, and a small second graph chooses. That one waits for late masks, applies all
masks, samples, stores the tokens, and takes back the rows that are held. One copy brings everything that it needs to
know about a step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.forward_batch import BatchShape
from nvcli.core.messages import StepInput
from nvcli.kernels.step_tensors import StepInputs
from nvcli.worker.runner.constraints import Constraints, StepMasks
from nvcli.worker.runner.drafter import Drafter
from nvcli.worker.runner.graph_runner import GraphRunner
from nvcli.worker.runner.input_buffers import StepBatch
from nvcli.worker.runner.logprobs import PendingLogprobs
from nvcli.worker.runner.memory import out_of_memory_line
from nvcli.worker.runner.sampler import NO_MASK, Sampler, SamplingNeeds
from nvcli.worker.runner.sampling_table import SamplingFlag
from nvcli.worker.runner.slot_table import SlotTable
from nvcli.worker.runner.uploader import PinnedRing

_STEPS_BEFORE = 32
"""Steps of a shape that choose twice before the shape is split, which costs as much as some hundred choices."""
_PATIENCE_WORDS = 2
_MAY_NOT_FORCE = SamplingFlag.ALLOWED | SamplingFlag.BAD_WORDS | SamplingFlag.LOGPROBS
"""Demands of rows that may choose another token than the only one that a mask allows, or ask for its
log-probability."""
_NO_ROWS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The output of a second graph, for the N rows of its shape."""

    ids: Tensor
    """[N] int32"""
    late: Tensor
    """[2, N] int32, as `take_late_masks` returns it."""


class MaskedChoice:
    """The constrained rows of one rank's steps."""

    def __init__(
        self,
        constraints: Constraints,
        sampler: Sampler,
        slots: SlotTable,
        drafter: Drafter,
        *,
        max_rows: int,
        steps_in_flight: int,
    ) -> None:
        """`max_rows`: the most tokens that a step samples."""
        self._constraints, self._sampler, self._slots, self._drafter = constraints, sampler, slots, drafter
        self._is_concerned = False
        """Whether the current step has work for the constraints."""
        self._last: StepMasks | None = None
        """The masks of the last choice, until it is recorded."""
        self._num_steps: Counter[BatchShape] = Counter()
        self._given_up: set[BatchShape] = set()
        self._split: set[BatchShape] = set()
        self._sources: dict[BatchShape, tuple[Tensor, StepInputs]] = {}
        """Split shape → the logits and inputs from which its second graph chooses, at fixed addresses."""
        device = slots.state.lengths.device
        self._on_gpu = device.type == "cuda"
        self._graphs = GraphRunner[_Chosen]([], self._choose_split)
        """The second graphs. They have their own pool, because the logits of the first ones must survive."""
        words = 2 * max_rows + _PATIENCE_WORDS
        self._staged = torch.empty(words, dtype=torch.int32, device=device)
        """Each row's mask, what the mask waits for, and the patience, as `take_late_masks` takes them."""
        self._staging = PinnedRing(words, device, steps_in_flight=steps_in_flight)
        self._arriving = PinnedRing(2 * max_rows, device, steps_in_flight=steps_in_flight)

    # ------------------------------------------------------------------ the moments of a step

    def begin(self, step: StepInput) -> None:
        """Request masks while the host prepares the step, in case it is slower than the device."""
        self._is_concerned = self._constraints.concerns(step)
        if self._is_concerned:
            self._constraints.look_ahead()

    def before_forward(self, step: StepInput) -> None:
        """Note that the step's forward pass is about to be launched."""
        if self._is_concerned:
            self._constraints.begin(step)

    def choose(
        self,
        step: StepInput,
        logits: Tensor,
        ids: Tensor | None,
        batch: StepBatch,
        padded: BatchShape | None,
        needs: SamplingNeeds,
    ) -> tuple[Tensor, PendingLogprobs | None]:
        """Choose the tokens of the step's sampled rows after its forward pass and store them in the slot table, unless
        the step did both (`ids`). Returns the ids [num_sampled] and log-probabilities; of rows with drafts some count
        (`DraftRows.counts`).

        logits: [N, M] of the rows that are kept; padded: the shape of the graph that gave them, if one did.
        """
        if self._is_concerned:
            self._constraints.follow(step)
        num_sampled = batch.num_sampled
        if needs.is_simple and ids is not None:
            return ids[:num_sampled], None
        rows = _NO_ROWS if needs.is_simple else needs.rows(SamplingFlag.CONSTRAINED)
        masks = None
        if len(rows):
            may_force = needs.flags[rows] & _MAY_NOT_FORCE == 0
            masks = self._constraints.masks(needs.slots[rows], num_sampled, may_force, rows)
        logprobs, late = None, None
        if padded in self._sources and needs.is_simple_behind_masks:
            assert padded is not None
            chosen = self._choose_in_second_graph(padded, masks)
            ids, late = chosen.ids[:num_sampled], chosen.late[:, :num_sampled]
        else:
            slots = batch.inputs.sample_slots[:num_sampled]
            positions = batch.inputs.sample_positions[:num_sampled]
            if masks is not None:
                late = self._take_late(masks, num_sampled)
            of_rows = None if masks is None else masks.masks
            if batch.drafts is not None:
                self._drafter.keep_drafts(batch.inputs, num_sampled)
            ids, logprobs = self._sampler.sample_fully(logits[:num_sampled], slots, positions, needs, of_rows)
            held = None
            if masks is not None and late is not None and self._constraints.may_hold:
                late = self._sampler.group.broadcast(late)
                if self._sampler.group.size > 1 or masks.any_late:
                    held = late[0]
            self._drafter.keep(batch, ids, held)
        if masks is not None:
            masks.late = late if masks.any_late else None
            self._last = masks
        return ids, logprobs

    def record(self, host_ids: Tensor) -> StepMasks | None:
        """Record the chosen tokens, [num_sampled] int32, on the host or on their way there. Returns the step's masks,
        whose outcome is complete once the tokens are there; None if it had none."""
        masks, self._last = self._last, None
        if masks is None:
            return None
        if (late := masks.late) is not None and self._on_gpu:
            arriving = self._arriving.next()[: late.numel()].view(late.shape)
            masks.late = arriving.copy_(late.contiguous(), non_blocking=True)
        self._constraints.record_choice(host_ids, masks)
        return masks

    def take_note(self) -> str:
        """Return a note for the user, once; empty if there is none."""
        return self._constraints.take_note()

    def _take_late(self, masks: StepMasks, num_sampled: int) -> Tensor:
        """Make the device wait for late masks, and return their outcome: [2, num_sampled] int32."""
        if masks.memory is None:
            return torch.zeros(2, num_sampled, dtype=torch.int32, device=self._staged.device)
        return masks.memory.take_late(*self._slots.upload(*masks.by_row(num_sampled), masks.patience))

    # ------------------------------------------------------------------ graphs in two parts

    def is_split(self, shape: BatchShape) -> bool:
        """Whether the graph of a shape leaves the choice out."""
        return shape in self._split

    def should_split(self, shape: BatchShape, slots: np.ndarray) -> bool:
        """Count a step of a shape that samples `slots`; return whether to split the shape now."""
        is_whole = self._constraints.memory is not None and self._sampler.group.size == 1 and shape not in self._split
        is_whole &= shape.tokens_per_row == 1
        if not is_whole or not len(self._sampler.needs(slots).rows(SamplingFlag.CONSTRAINED)):
            return False
        self._num_steps[shape] += 1
        return self._num_steps[shape] > _STEPS_BEFORE and shape not in self._given_up

    def split(self, shape: BatchShape, capture: Callable[[], Tensor], inputs: StepInputs) -> None:
        """Split a shape. `capture` makes the first graph and returns its logits; it asks `is_split`.

        If there is no memory for one of the graphs, steps of the shape stay in one part: with the earlier graph, or
        with one that leaves the choice to separate launches.
        """
        self._split.add(shape)
        try:
            self._add(shape, capture(), inputs)
        except RuntimeError as error:
            if out_of_memory_line(error) is None:
                raise
            self._split.discard(shape)
            self._sources.pop(shape, None)
            self._given_up.add(shape)

    def _add(self, shape: BatchShape, logits: Tensor, inputs: StepInputs) -> None:
        """Capture the second graph of a shape. Nothing runs; everything that it launches was launched before."""
        self._sources[shape] = logits, inputs
        if self._on_gpu:
            self._graphs.capture_late(shape)

    def _choose_in_second_graph(self, shape: BatchShape, masks: StepMasks | None) -> _Chosen:
        """Choose the tokens of a step whose constrained rows, if any, have these masks. The result is valid until the
        next choice."""
        staging = self._staging.next()
        staged = staging.numpy()
        by_row = staged[:-_PATIENCE_WORDS].reshape(2, -1)
        if masks is None:
            by_row[0], by_row[1] = NO_MASK, 0
        else:
            by_row[:] = masks.by_row(by_row.shape[1])
            staged[-_PATIENCE_WORDS:] = masks.patience
        self._staged.copy_(staging, non_blocking=True)
        return self._graphs.replay(shape) if self._on_gpu else self._choose_split(shape)

    def _choose_split(self, shape: BatchShape) -> _Chosen:
        """Launch the work of a second graph."""
        logits, inputs = self._sources[shape]
        memory = self._constraints.memory
        assert memory is not None
        mask_of, wanted = self._staged[:-_PATIENCE_WORDS].view(2, -1)[:, : len(logits)]
        late = memory.take_late(mask_of, wanted, self._staged[-_PATIENCE_WORDS:])
        slots, positions = inputs.sample_slots, inputs.sample_positions
        ids = self._sampler.sample_masked(logits, slots, positions, memory.masks, mask_of)
        self._slots.keep(slots, positions, ids)
        self._slots.take_back(slots, late[0])
        return _Chosen(ids, late)
