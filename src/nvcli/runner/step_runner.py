"""StepRunner: it runs one step of a rank, from the engine's message to the ids on their way back.

There is one way for all steps. The host lays the rows out and plans; the slot table takes in what changed; one kernel
prepares the inputs; the model runs; the rows that need it get logits and a token. A CUDA graph holds all that the
device does from the prepared inputs on, where one was captured for the shape; an eager step launches the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.backend import AttentionBackend
from nvcli.attention.forward_batch import BatchShape
from nvcli.attention.kv_cache import KVCache
from nvcli.distributed.stage_link import StageLink
from nvcli.distributed.tensor_parallel import StageState
from nvcli.kernels.prepare_inputs import prepare_inputs
from nvcli.messages import StepInput, StepOutput
from nvcli.models.causal_lm import CausalLM
from nvcli.runner.choice_graphs import Choice, ChoiceGraphs
from nvcli.runner.constraints import Constraints, with_failures
from nvcli.runner.graph_runner import GraphRunner, unowned
from nvcli.runner.input_buffers import InputBuffers, StepBatch, exact_shape
from nvcli.runner.mask_memory import MaskMemory
from nvcli.runner.memory import out_of_memory_line
from nvcli.runner.prompt_reader import PendingReadings, PromptReader, ReadPlan
from nvcli.runner.sampler import PendingLogprobs, Sampler, SamplingNeeds
from nvcli.runner.sampling_table import SamplingFlag
from nvcli.runner.slot_table import SlotTable, partly_filled_blocks, unpack_ids
from nvcli.runner.step_clock import StepClock, StepTime
from nvcli.runner.step_masks import MaskOutcome, StepMasks

_NO_ROWS = np.zeros(0, dtype=np.int64)
_WORDS_BACK = 3
"""int32 words of a sampled row that come back: its id, and what became of its mask."""
_STEPS_POSTED = 2
"""Steps, beside those in flight, whose ids the thread that posts outputs may still read."""


@dataclass(frozen=True, slots=True)
class StepLogits:
    """The output of a step of the last stage, for the N rows that are kept for logits."""

    logits: Tensor
    """[N, M] of this rank's part of the vocabulary."""
    ids: Tensor | None
    """[N] int32, in the slot table already, `NOT_FINITE` for none; None where the rows ask for more than
    `Sampler.sample` does."""
    readings: PendingReadings | None = None
    """What was read of prompts; None where nothing is wanted of them."""

    def unowned(self) -> StepLogits:
        return replace(self, logits=unowned(self.logits))


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The output of a step in a stage that is not the last."""

    state: StageState

    def unowned(self) -> StageOutput:
        residual, delta = self.state.residual, self.state.delta
        return StageOutput(StageState(unowned(residual), None if delta is None else unowned(delta)))


@dataclass(frozen=True, slots=True)
class PendingStep:
    """A step's ids on their way to the host."""

    step_id: int
    ids: Tensor
    """[num_sampled] int32, on the host once the step is over."""
    logprobs: PendingLogprobs | None
    time: StepTime
    is_graph: bool
    readings: PendingReadings | None
    masks: MaskOutcome | None
    """What became of the masks of its constrained rows; None: it has none."""
    note: str
    """What the user should know; empty: nothing."""

    def result(self) -> StepOutput:
        """Wait for the step, and return its output."""
        self.time.wait()
        ids = self.ids.numpy()
        held_rows = failed_rows = _NO_ROWS
        if self.masks is not None:
            held_rows, failed_rows = self.masks.held_rows, self.masks.failed_rows
        if len(failed_rows):
            ids = with_failures(ids, failed_rows)
        logprobs = [] if self.logprobs is None else self.logprobs.result()
        counts = b""
        if len(held_rows):
            is_given = np.ones(len(ids), dtype=np.int32)
            is_given[held_rows] = 0
            ids, counts = ids[is_given > 0], is_given.tobytes()
            logprobs = [entry for entry, given in zip(logprobs, is_given, strict=True) if given] if logprobs else []
        return StepOutput(
            step_id=self.step_id,
            token_ids=ids.tobytes(),
            counts=counts,
            logprobs=logprobs,
            seconds=self.time.seconds,
            idle_seconds=self.time.idle_seconds,
            is_graph=self.is_graph,
            readings=[] if self.readings is None else self.readings.result(),
            note=self.note,
        )


class StepRunner:
    """Runs the steps of one rank over one slot table and KV cache."""

    def __init__(
        self,
        model: CausalLM,
        slots: SlotTable,
        buffers: InputBuffers,
        kv_cache: KVCache,
        backend: AttentionBackend,
        sampler: Sampler,
        constraints: Constraints,
        reader: PromptReader,
        link: StageLink,
        clock: StepClock,
        *,
        steps_in_flight: int,
        max_sampled: int,
    ) -> None:
        """`max_sampled` is the most tokens that a step gives."""
        self._model, self._slots, self._buffers = model, slots, buffers
        self._kv_cache, self._backend = kv_cache, backend
        self._sampler, self._constraints, self._reader = sampler, constraints, reader
        self._link, self._clock = link, clock
        self._graphs: GraphRunner[StepLogits | StageOutput] | None = None
        self._graph_batches: dict[BatchShape, StepBatch] = {}
        self._choices: ChoiceGraphs | None = None
        if sampler.num_ranks == 1:
            self._choices = ChoiceGraphs(sampler, slots, max_rows=max_sampled, steps_in_flight=steps_in_flight)
        self._in_two_parts: set[BatchShape] = set()
        """The shapes whose graphs do not choose; `_choices` does."""
        self._on_gpu = slots.state.lengths.is_cuda
        self._pinned = [
            torch.empty(_WORDS_BACK * max_sampled, dtype=torch.int32, pin_memory=self._on_gpu)
            for _ in range(steps_in_flight + _STEPS_POSTED)
        ]
        """Where what steps choose arrives on the host."""

    def make_graphs(self, shapes: Sequence[BatchShape]) -> GraphRunner[StepLogits | StageOutput]:
        """Make the graphs of these shapes, which are not captured yet."""

        def prepare(shape: BatchShape) -> None:
            """Load a batch of nothing but padding."""
            batch = self._buffers.stage(StepInput(step_id=-1), self._padded_batch(shape))
            self._backend.prepare_capture(batch.forward)
            self._backend.plan(batch.forward)
            self._buffers.load(batch)

        return GraphRunner(shapes, self.run_padded, prepare=prepare)

    def run_padded(self, shape: BatchShape) -> StepLogits | StageOutput:
        """Launch a step over the rows that were loaded for the shape. A graph holds the same."""
        return self._compute(self._padded_batch(shape), sample=shape not in self._in_two_parts)

    def use_graphs(self, graphs: GraphRunner[StepLogits | StageOutput]) -> None:
        """Run steps, from now on, as graphs where one serves them."""
        self._graphs = graphs

    def run(self, step: StepInput) -> PendingStep | None:
        """Run one step, or queue it on the GPU: nothing here waits for the device. A stage that is not the last returns
        None."""
        follows = self._constraints.concerns(step)
        if follows:
            self._constraints.look_ahead()
        shape = exact_shape(step)
        reads = self._reader.plan(step) if step.reads else None
        graphs = None if reads is not None or step.copies_new_keys else self._graphs
        padded = None if graphs is None else graphs.padded_shape(shape)
        batch = self._batch(shape, step) if padded is None else self._padded_batch(padded)
        batch = self._buffers.stage(step, batch)
        self._plan(batch, padded)
        self._link.receive(batch.forward.num_tokens)
        step_time = self._clock.start(is_graph=padded is not None, num_tokens=batch.forward.num_tokens)
        self._slots.apply(step)
        if step.block_ids and self._backend.reads_behind_rows:
            (blocks,) = self._slots.upload(partly_filled_blocks(step, self._kv_cache.spec.state_groups))
            self._kv_cache.clear(blocks.long())
        if step.key_copies and not step.copies_new_keys:
            self._kv_cache.copy_keys(self._slots.key_copies(step))
        needs = self._sampler.needs(batch.sampled_slots)  # of new slots too
        self._buffers.load(batch)
        if follows:
            self._constraints.begin(step)
        if padded is None:
            if step.copies_new_keys:
                batch = replace(batch, forward=replace(batch.forward, key_copies=self._slots.key_copies(step)))
            output = self._compute(batch, sample=needs.is_simple, reads=reads)
        else:
            assert self._graphs is not None
            output = self._graphs.replay(padded)
        if isinstance(output, StageOutput):
            self._clock.stop(step_time)
            self._link.send(output.state)
            return None
        if follows:
            self._constraints.follow(step)
        masks, constrained = None, _NO_ROWS if needs.is_simple else needs.rows(SamplingFlag.CONSTRAINED)
        if len(constrained):
            masks = self._constraints.masks(needs.slots[constrained], batch.num_sampled)
        ids, logprobs, found = self._choose(output, batch, padded, needs, constrained, masks)
        host_ids, host_found = self._to_host(ids, found if masks is not None and masks.any_late else None)
        outcome = None
        if masks is not None:
            outcome = MaskOutcome(constrained, masks.has_failed, host_found)
            self._constraints.chose(host_ids, needs.slots[constrained], outcome)
        self._clock.stop(step_time)
        return PendingStep(
            step.step_id,
            host_ids,
            logprobs,
            step_time,
            is_graph=padded is not None,
            readings=output.readings,
            masks=outcome,
            note=self._constraints.take_note(),
        )

    def _choose(
        self,
        output: StepLogits,
        batch: StepBatch,
        padded: BatchShape | None,
        needs: SamplingNeeds,
        constrained: np.ndarray,
        masks: StepMasks | None,
    ) -> tuple[Tensor, PendingLogprobs | None, Tensor | None]:
        """Choose the tokens of a step's sampled rows, of which `constrained` have masks, and put them into the slot
        table, if that was not done with the logits. Returns the ids [num_sampled], log-probabilities, and what became
        of masks that were late (`take_late_masks`) if there are masks."""
        num_sampled = batch.num_sampled
        if needs.is_simple and output.ids is not None:
            return output.ids[:num_sampled], None, None
        if padded in self._in_two_parts and needs.is_simple_behind_masks:
            assert padded is not None
            assert self._choices is not None
            ids, found = self._choices.choose(padded, constrained, masks)
            return ids[:num_sampled], None, found[:, :num_sampled]
        slots = batch.inputs.sample_slots[:num_sampled]
        positions = batch.inputs.sample_positions[:num_sampled]
        late = None if masks is None else self._take_late(masks, constrained, num_sampled)
        ids, logprobs = self._sampler.sample_fully(
            output.logits[:num_sampled], slots, positions, needs, None if masks is None else masks.masks
        )
        self._slots.keep(slots, positions, ids)
        if masks is not None and late is not None and self._constraints.may_hold:
            if self._sampler.num_ranks > 1:
                late = self._sampler.share(late)
            if self._sampler.num_ranks > 1 or masks.any_late:
                self._slots.take_back(slots, late[0])
        return ids, logprobs, late

    def _take_late(self, masks: StepMasks, constrained: np.ndarray, num_sampled: int) -> Tensor:
        """Let the device wait for masks that are late, and return what became of them: [2, num_sampled] int32."""
        if masks.memory is None:
            return torch.zeros(2, num_sampled, dtype=torch.int32, device=self._slots.state.lengths.device)
        by_row = masks.by_row(constrained, num_sampled)
        return masks.memory.take_late(*self._slots.upload(by_row[0], by_row[1], masks.patience))

    def _plan(self, batch: StepBatch, padded: BatchShape | None) -> None:
        """Plan a step on the host, and capture the graph of its padded shape where that is due."""
        graphs, choices = self._graphs, self._choices
        if padded is None or graphs is None:
            self._backend.plan(batch.forward)
            return
        memory = self._constraints.memory
        is_split = (
            memory is not None
            and choices is not None
            and padded not in self._in_two_parts
            and bool(len(self._sampler.needs(batch.sampled_slots).rows(SamplingFlag.CONSTRAINED)))
            and choices.is_due(padded)
        )
        if graphs.has_captured(padded) and not is_split:
            self._backend.plan(batch.forward)
            return
        self._backend.prepare_capture(batch.forward)
        self._backend.plan(batch.forward)
        if is_split and choices is not None and memory is not None:
            self._split(padded, graphs, choices, memory)
        else:
            graphs.capture_late(padded)

    def _split(
        self,
        padded: BatchShape,
        graphs: GraphRunner[StepLogits | StageOutput],
        choices: ChoiceGraphs,
        memory: MaskMemory,
    ) -> None:
        """Capture a shape anew, in two parts. Where there is no memory for one of them, steps of the shape go on in
        one: with the earlier graph, or with one that leaves the choice to launches."""
        self._in_two_parts.add(padded)
        try:
            graphs.capture_late(padded)
            logits = graphs.output(padded)
            assert isinstance(logits, StepLogits)
            inputs = self._padded_batch(padded).inputs
            choices.add(padded, Choice(logits.logits, inputs.sample_slots, inputs.sample_positions, memory))
        except RuntimeError as error:
            if out_of_memory_line(error) is None:
                raise
            self._in_two_parts.discard(padded)
            choices.give_up(padded)

    def _compute(self, batch: StepBatch, *, sample: bool, reads: ReadPlan | None = None) -> StepLogits | StageOutput:
        """Launch the device's part of a step whose rows are loaded. With `sample`, the last stage also chooses tokens
        and puts them into the slot table. `reads` is what it reads of prompts."""
        forward = batch.forward if reads is None else replace(batch.forward, logits_rows=reads.kept)
        prepare_inputs(batch.rows, self._slots.state, batch.inputs)
        self._backend.plan_on_device(forward)
        hidden = self._model.forward(forward, self._link.received(forward.num_tokens))
        if isinstance(hidden, StageState):
            return StageOutput(hidden)
        readings = None
        if reads is not None:
            readings = self._reader.read(hidden, reads)
            hidden = hidden[reads.sampled]
        if len(hidden) == 0:  # chunks that end no prompt
            return StepLogits(hidden, torch.empty(0, dtype=torch.int32, device=hidden.device), readings)
        logits = self._model.compute_logits(hidden)
        if not sample:
            return StepLogits(logits, None, readings)
        slots, positions = batch.inputs.sample_slots, batch.inputs.sample_positions
        ids = self._sampler.sample(logits, slots, positions)
        self._slots.keep(slots, positions, ids)
        return StepLogits(logits, ids, readings)

    def _batch(self, shape: BatchShape, step: StepInput) -> StepBatch:
        """Make views for a step without padding."""
        num_logits = int(unpack_ids(step.num_logits).sum())
        return self._make_views(shape, num_logits, needs_all_logits=num_logits == shape.num_tokens)

    def _padded_batch(self, shape: BatchShape) -> StepBatch:
        """Return the views for the graph of a shape, which are made once."""
        batch = self._graph_batches.get(shape)
        if batch is None:
            num_logits = self._buffers.num_logits(shape)
            batch = self._make_views(shape, num_logits, needs_all_logits=shape.prefill_rows == 0)
            self._graph_batches[shape] = batch
        return batch

    def _make_views(self, shape: BatchShape, num_logits: int, *, needs_all_logits: bool) -> StepBatch:
        return self._buffers.batch(
            shape,
            num_logits,
            self._kv_cache,
            self._backend,
            needs_all_logits=needs_all_logits,
            segments=self._slots.segments,
        )

    def _to_host(self, ids: Tensor, found: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Start copies to the host, which are complete when the step is, of ids [N] and what is [2, N]."""
        if not self._on_gpu:
            return ids, found
        self._pinned = self._pinned[1:] + self._pinned[:1]
        count = len(ids)
        host_ids = self._pinned[0][:count].copy_(ids, non_blocking=True)
        if found is None:
            return host_ids, None
        host_found = self._pinned[0][count : _WORDS_BACK * count].view(_WORDS_BACK - 1, count)
        return host_ids, host_found.copy_(found.contiguous(), non_blocking=True)
