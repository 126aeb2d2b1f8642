"""StepRunner: runs one step on a rank, from the engine's message to the ids on their way back.

All steps take the same path. The host lays out the rows and plans; the slot table takes in the changes; one kernel
prepares the inputs; the model runs; the rows that need them get logits and a token. If a CUDA graph was captured for
the shape, it holds everything that the device does after preparing the inputs; an eager step launches the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.backend import AttentionBackend
from nvcli.attention.forward_batch import BatchShape
from nvcli.attention.kept_states import KeptStates
from nvcli.attention.kv_cache import KVCache
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import StepInput
from nvcli.kernels.key_copies import COPY_FIELDS
from nvcli.models.causal_lm import CausalLM
from nvcli.worker.distributed.stage_link import StageLink
from nvcli.worker.distributed.tensor_parallel import StageState
from nvcli.worker.runner.constraints import Constraints
from nvcli.worker.runner.drafter import Drafter
from nvcli.worker.runner.graph_runner import GraphRunner
from nvcli.worker.runner.input_buffers import InputBuffers, StepBatch
from nvcli.worker.runner.interface import RequestExtras
from nvcli.worker.runner.late_states import LateStates
from nvcli.worker.runner.masked_choice import MaskedChoice
from nvcli.worker.runner.model_drafter import ModelDrafter
from nvcli.worker.runner.query_reader import PromptQueryReader, QueryPlan
from nvcli.worker.runner.sampler import Sampler
from nvcli.worker.runner.slot_table import SlotTable, unpack_ids
from nvcli.worker.runner.step_clock import StepClock
from nvcli.worker.runner.step_results import PendingStep, StepForward, StepLogits, unowned_output
from nvcli.worker.runner.uploader import PinnedRing


class StepRunner:
    """Runs the steps of one rank over one slot table, once it has a KV cache (`use_kv_cache`)."""

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        slots: SlotTable,
        buffers: InputBuffers,
        backend: AttentionBackend,
        *,
        sampler: Sampler,
        constraints: Constraints,
        extras: Sequence[RequestExtras],
        link: StageLink,
        clock: StepClock,
        model_drafter: ModelDrafter | None,
        kept_states: KeptStates | None,
        may_draft: bool,
    ) -> None:
        """`model_drafter`: drafts by a head of the model, if it has one. `kept_states`: given for a model with
        recurrent states whose rows may have drafts."""
        steps_in_flight, device = config.max_steps_in_flight, slots.state.lengths.device
        self._model, self._slots, self._buffers, self._backend = model, slots, buffers, backend
        self._sampler, self._extras, self._link, self._clock = sampler, extras, link, clock
        self._kept_states = kept_states
        self._sets_lengths = may_draft and not model.stage.is_last
        """Whether the lengths of requests come with each step (`SlotTable.set_lengths`)."""
        self._drafter = drafter = Drafter(
            slots, model_drafter, max_positions=config.max_model_len, accept_rate=config.draft_accept_rate
        )
        self._masks = MaskedChoice(
            *(constraints, sampler, slots, drafter),
            max_rows=config.max_step_logits,
            steps_in_flight=steps_in_flight,
        )
        self._reader = PromptQueryReader(model, model.group, device, config)
        self.graphs: GraphRunner[StepForward] | None = None
        """The graphs that run steps, where one of them serves; None: steps are launched kernel by kernel."""
        self._graph_batches: dict[BatchShape, StepBatch] = {}
        self._on_gpu = device.type == "cuda"
        most_sampled = config.max_step_logits + 4 * config.max_padded_rows
        # The thread that posts outputs may still read those of two steps besides.
        self._pinned = PinnedRing(most_sampled, device, steps_in_flight=steps_in_flight)
        """Pinned buffers for what a step returns: its tokens, and four numbers for each row with drafts."""

    def use_kv_cache(self, kv_cache: KVCache) -> None:
        """Run steps over a KV cache from now on, without graphs."""
        self._kv_cache, self.graphs = kv_cache, None
        self._states = LateStates(self._kept_states, kv_cache, self._slots.upload)
        self._graph_batches.clear()

    def make_graphs(self, shapes: Sequence[BatchShape]) -> GraphRunner[StepForward]:
        """Make a runner of graphs for these shapes, which are not captured yet."""

        def prepare(shape: BatchShape) -> None:
            """Load a batch of nothing but padding."""
            batch = self._buffers.stage(StepInput(step_id=-1), self._padded_batch(shape))
            self._backend.prepare_capture(batch.forward)
            self._backend.plan(batch.forward)
            self._buffers.load(batch)

        return GraphRunner(shapes, self.run_padded, prepare=prepare, view=unowned_output)

    def run_padded(self, shape: BatchShape) -> StepForward:
        """Launch a step over the rows loaded for the shape. A graph holds the same work."""
        return self._compute(self._padded_batch(shape), sample=not self._masks.is_split(shape))

    def run(self, step: StepInput) -> PendingStep | None:
        """Run one step, or queue it on the GPU; never wait for the device. Returns None in a stage that is not the
        last."""
        self._masks.begin(step)
        shape = self._buffers.choose_shape(step, self._backend)
        queries = self._reader.plan(step) if step.queries else None
        is_eager = sum(each.plan(step) for each in self._extras) or queries is not None or step.copies_new_keys
        graphs = None if is_eager else self.graphs
        padded = None if graphs is None else graphs.padded_shape(shape)
        batch = self._batch(shape, step) if padded is None else self._padded_batch(padded)
        batch = self._buffers.stage(step, batch, self._drafter.may_draft(step, batch), self._states.begin(step, batch))
        self._plan(batch, padded)
        self._link.receive(batch.forward.num_tokens)
        step_time = self._clock.start(is_graph=padded is not None, num_tokens=batch.forward.num_tokens)
        self._apply_changes(step)
        needs = self._sampler.needs(batch.sampled_slots, batch.is_first)  # including those of new slots
        self._buffers.load(batch, keeps_layout=not needs.is_simple)
        self._masks.before_forward(step)
        if padded is None:
            if queries is not None:
                batch = replace(batch, forward=self._buffers.keeping(step, batch.forward, queries.kept))
            if step.copies_new_keys:
                batch = replace(batch, forward=replace(batch.forward, key_copies=self._slots.key_copies(step)))
            output = self._compute(batch, sample=needs.is_simple, queries=queries)
        else:
            assert graphs is not None
            output = graphs.replay(padded)
        if isinstance(output, StageState):
            self._clock.stop(step_time)
            self._link.send(output)
            return None
        ids, logprobs = self._masks.choose(step, output.logits, output.ids, batch, padded, needs)
        if not needs.is_simple or output.ids is None:
            self._drafter.extend(batch, output.states)
        self._states.end(step, batch)
        host_ids, drafts = self._drafter.to_host(step, batch, ids, self._to_host)
        masks = self._masks.record(host_ids)
        self._clock.stop(step_time)
        return PendingStep(
            *(step.step_id, host_ids, logprobs, step_time),
            is_graph=padded is not None,
            query_results=output.query_results,
            masks=masks,
            note=self._masks.take_note() or next(filter(None, (each.take_note() for each in self._extras)), ""),
            drafts=drafts,
        )

    def _apply_changes(self, step: StepInput) -> None:
        """Bring slots and KV cache up to date with the engine's message, before the step's rows are loaded."""
        self._slots.apply(step)
        if self._sets_lengths:
            self._slots.set_lengths(step)
        for each in self._extras:
            each.apply(step)
        if step.block_ids and self._backend.reads_behind_rows:
            own = self._buffers.own_step(step)
            spec = self._kv_cache.spec
            (blocks,) = self._slots.upload(partly_filled_blocks(own, spec.block_size, spec.state_groups))
            self._kv_cache.clear(blocks.long())
        if step.key_copies and not step.copies_new_keys:
            self._kv_cache.copy_keys(self._slots.key_copies(step))

    def _plan(self, batch: StepBatch, padded: BatchShape | None) -> None:
        """Plan a step on the host, and capture the graph of its padded shape if that is due."""
        graphs = self.graphs
        if padded is None or graphs is None:
            self._backend.plan(batch.forward)
            return
        should_split = self._masks.should_split(padded, batch.sampled_slots)
        is_captured = graphs.has_captured(padded) and not should_split
        if not is_captured:
            self._backend.prepare_capture(batch.forward)
        self._backend.plan(batch.forward)

        def capture() -> Tensor:
            graphs.capture_late(padded)
            output = graphs.output(padded)
            assert isinstance(output, StepLogits)
            return output.logits

        if should_split:
            self._masks.split(padded, capture, self._padded_batch(padded).inputs)
        elif not is_captured:
            graphs.capture_late(padded)

    def _compute(self, batch: StepBatch, *, sample: bool, queries: QueryPlan | None = None) -> StepForward:
        """Launch the device's part of a step whose rows are loaded. With `sample`, the last stage also chooses tokens
        and stores them in the slot table. `queries`: what to read from prompts."""
        forward = batch.forward
        self._drafter.find(batch)
        self._buffers.prepare(batch)
        self._drafter.limit_positions(batch)
        for each in self._extras:
            forward = each.prepare(batch.rows, forward)
        self._backend.plan_on_device(forward)
        hidden, states = self._model.run(forward, self._link.received(forward.num_tokens))
        if isinstance(hidden, StageState):
            return hidden
        query_results = None
        if queries is not None:
            query_results = self._reader.read(hidden, queries)
            hidden = hidden[queries.sampled]
        if len(hidden) == 0:  # chunks that do not end a prompt
            self._drafter.extend(batch, states)
            return StepLogits(hidden, torch.empty(0, dtype=torch.int32, device=hidden.device), query_results)
        logits = self._model.compute_logits(hidden)
        if not sample:
            return StepLogits(logits, None, query_results, states)
        inputs, num_rows = batch.inputs, len(logits)
        ids = self._sampler.sample(logits, inputs.sample_slots[:num_rows], inputs.sample_positions[:num_rows])
        self._drafter.keep(batch, ids)
        self._drafter.extend(batch, states)
        return StepLogits(logits, ids, query_results, states)

    def _batch(self, shape: BatchShape, step: StepInput) -> StepBatch:
        """Make views for a step without padding."""
        num_logits, are_all = self._buffers.kept_logits(step, shape)
        return self._make_views(shape, num_logits, needs_all_logits=are_all)

    def _padded_batch(self, shape: BatchShape) -> StepBatch:
        """Return the views for a shape's graph, made once."""
        if shape not in self._graph_batches:
            num_logits, needs_all_logits = self._buffers.num_logits(shape), shape.prefill_rows == 0
            self._graph_batches[shape] = self._make_views(shape, num_logits, needs_all_logits=needs_all_logits)
        return self._graph_batches[shape]

    def _make_views(self, shape: BatchShape, num_logits: int, *, needs_all_logits: bool) -> StepBatch:
        return self._buffers.batch(
            *(shape, num_logits, self._kv_cache, self._backend),
            needs_all_logits=needs_all_logits,
            segments=self._slots.segments,
            kept_states=self._states.kept,
        )

    def _to_host(self, ids: Tensor) -> Tensor:
        """Start copying ids [N] to the host; the copy is complete when the step is."""
        if not self._on_gpu:
            return ids
        return self._pinned.next()[: len(ids)].copy_(ids, non_blocking=True)


def partly_filled_blocks(
    step: StepInput, block_size: int, state_groups: Sequence[int] = ()
) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Return blocks that a step gave to slots and that may be read before they are full: the last of each run of
    columns, and all blocks of decode rows with drafts, which may not come so far. This leaves out blocks with keys that
    are there, unless they are copied afterwards, and those of `state_groups`, the KV groups whose states are read as
    they were written."""
    groups, slots, columns = map(unpack_ids, (step.block_groups, step.block_slots, step.block_columns))
    is_last = np.ones(len(slots), dtype=np.bool_)
    is_last[:-1] = (groups[1:] != groups[:-1]) | (slots[1:] != slots[:-1]) | (columns[1:] != columns[:-1] + 1)
    if step.row_limits:
        is_last |= np.isin(slots, unpack_ids(step.slots)[: step.num_decodes])
    if state_groups:
        is_last &= ~np.isin(groups, state_groups)
    blocks: np.ndarray[tuple[int], np.dtype[np.int32]] = unpack_ids(step.block_ids)
    num_there = {new.slot: new.num_cached_tokens for new in step.new_slots}
    if any(num_there.values()):
        copied = unpack_ids(step.key_copies).reshape(-1, 1 + COPY_FIELDS)[:, 2]
        ends = np.array([num_there.get(slot, 0) for slot in slots.tolist()])
        is_last &= (columns * block_size >= ends) | np.isin(blocks, copied)
    return blocks[is_last]
