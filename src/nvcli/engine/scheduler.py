"""Scheduler: for each running request, how many tokens to compute next.

One mechanism serves whole prompts, chunks of prompts, prefix hits, decoding and recomputation after a preemption.
The engine keeps one step in flight: `schedule` is called for step n+1 before `process` is called for step n, so a
decoding request may be scheduled for a token whose predecessor's value is not known here yet. A request that turns out
to have ended costs one wasted token, which is dropped.

Decoding requests go first, one token each; the rest of the token budget goes to prompts, oldest first. Blocks for all
known tokens of a prompt are taken when it is admitted; decoding takes one block at a time. When none is left, the
request admitted last is preempted: its blocks are released and its tokens recomputed later.

With several micro-batches (pipeline stages) as many steps are in flight, and a decoding request is in one of them at a
time: it is passed over until its token has come back, and a step takes no more of them than its share of the running
ones, so that the micro-batches stay balanced. Slices of one prompt need no tokens to come back: they follow each other
from step to step.

A step that ran out of memory is taken back (`put_back`), and those submitted behind it: every running request waits
again, what the steps that ran have left in the prefix cache is found there (unless nothing is left of it:
`start_anew`), and the limits are lowered. This module knows no ranks, text or devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from nvcli.engine.block_manager import BlockManager
from nvcli.engine.request import EngineStats, FinishReason, Request, RequestOutput
from nvcli.engine.state import RequestState
from nvcli.engine.step_draft import StepDraft
from nvcli.messages import StepInput, StepOutput, pack, unpack


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """The part of the configuration that the scheduler keeps to."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    num_micro_batches: int = 1
    """Steps in flight that no decoding request may share."""


@dataclass(slots=True)
class ScheduledStep:
    """A step as submitted, kept until its output arrives."""

    input: StepInput
    sampling: list[RequestState]
    """Requests that sample a token, in batch order."""
    registered: list[int]
    """Blocks that were registered for reuse since the step before it: it, or the one before it, fills them."""

    @property
    def num_requests(self) -> int:
        return (len(self.input.decode_slots) + len(self.input.extend_slots)) // 4

    @property
    def num_tokens(self) -> int:
        return (len(self.input.decode_slots) + len(self.input.token_ids)) // 4


class Scheduler:
    """Requests in, steps out, outputs in, finished requests out."""

    def __init__(self, limits: SchedulerLimits, block_manager: BlockManager) -> None:
        self.limits = limits
        self.block_manager = block_manager
        self._waiting: deque[RequestState] = deque()
        self._running: list[RequestState] = []
        """Every request that holds a slot, in order of admission."""
        self._prefilling: list[RequestState] = []
        self._decoding: list[RequestState] = []
        """Running requests whose next step is one token; with `_prefilling` and those that wait for an output (their
        last, with several micro-batches any), these are the running ones."""
        self._by_id: dict[int, RequestState] = {}
        self._free_slots = list(range(limits.max_num_seqs - 1, -1, -1))
        self._freed_slots: list[int] = []
        """Released since the last step; the ranks hear of it with the next."""
        self._decode_slots: bytes | None = b""
        """Packed slots of `_decoding`; None when its members changed."""
        self._registered: list[int] = []
        """Blocks, since the last step."""
        self._restarts = False
        """The next step is the first after one that did not run."""
        self._next_step_id = 0
        self._unsent: list[RequestOutput] = []
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._num_preemptions = 0

    # ------------------------------------------------------------------ requests

    def add(self, requests: Iterable[Request]) -> None:
        for request in requests:
            state = RequestState(request)
            assert state.num_prompt > 0
            assert state.num_prompt + request.max_tokens <= self.limits.max_model_len
            assert request.request_id not in self._by_id
            self._by_id[request.request_id] = state
            self._waiting.append(state)

    def abort(self, request_ids: Iterable[int]) -> None:
        """End requests early. Those that are gone already are passed over: their last output is on its way."""
        for request_id in request_ids:
            state = self._by_id.get(request_id)
            if state is not None:
                self._finish(state, "abort")

    @property
    def has_unfinished(self) -> bool:
        """Requests, or outputs that were not taken: an abort may end the last request between two steps."""
        return bool(self._by_id or self._unsent)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_blocks=self.block_manager.num_blocks,
            num_used_blocks=self.block_manager.num_used,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            num_steps=self._next_step_id,
            num_preemptions=self._num_preemptions,
        )

    # ------------------------------------------------------------------ one step

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nothing can be computed now."""
        draft = StepDraft()
        held_back = self._hold_back() if self._is_pipelined else []
        preempted = self._grow_decoding(draft)
        sampling = self._decoding.copy()
        decode_slots = self._packed_decode_slots()
        decode_ids = pack(state.token_ids[-1] for state in sampling) if self._is_pipelined else b""
        self._advance_decoding()
        if self._is_pipelined:
            self._set_decoding([state for state in held_back if state.slot is not None])

        budget = self.limits.max_num_batched_tokens - len(sampling)
        budget = self._continue_prompts(draft, sampling, budget)
        if not preempted:
            self._admit(draft, sampling, budget)

        step = draft.finish(
            self._next_step_id,
            decode_slots=decode_slots,
            decode_ids=decode_ids,
            freed_slots=self._freed_slots,
            restarts=self._restarts,
        )
        if step is None:
            return None
        self._next_step_id += 1
        self._freed_slots.clear()
        self._restarts = False
        registered, self._registered = self._registered, []
        return ScheduledStep(step, sampling, registered)

    def process(self, step: ScheduledStep, output: StepOutput) -> None:
        """Take the tokens of a step in; finished and streaming requests appear in `take_outputs`."""
        assert output.step_id == step.input.step_id
        owners = step.sampling
        if output.counts:
            counts = unpack(output.counts)
            owners = [state for state, count in zip(owners, counts, strict=True) for _ in range(count)]
        if output.logprobs:
            for state, logprobs in zip(owners, output.logprobs, strict=True):
                if logprobs is not None and not state.finished:
                    state.logprobs.append(logprobs)
        block_size = self.limits.block_size
        for state, token in zip(owners, unpack(output.token_ids), strict=True):
            if state.finished:
                continue
            # This loop runs for every token of the job, so it is flat.
            state.num_pending -= 1
            token_ids = state.token_ids
            token_ids.append(token)
            self._generated_tokens += 1
            if token in state.stop_ids:
                self._finish(state, "stop", stopped_by_id=True)
            elif not state.num_unscheduled and not state.num_pending:
                self._finish(state, "length")
            else:
                if len(token_ids) % block_size == 0:
                    self._register_blocks(state)
                if state.stream:
                    self._unsent.append(self._report(state))
        if self._is_pipelined:
            self._decoding += [state for state in step.sampling if state.slot is not None]

    def take_outputs(self) -> list[RequestOutput]:
        outputs, self._unsent = self._unsent, []
        return outputs

    # ------------------------------------------------------------------ steps that did not run

    def put_back(self, steps: Sequence[ScheduledStep]) -> None:
        """These steps, all that are in flight, did not run. Running requests wait, first in line, to be recomputed.

        Their tokens are the ones that were known: nothing is lost, and nothing that was never computed is reused.
        """
        for step in steps:
            for state in step.sampling:
                state.num_pending -= 1
                state.num_unscheduled += 1
            self.block_manager.unregister(step.registered)
        self.block_manager.unregister(self._registered)
        self._registered = []
        for state in reversed(self._running.copy()):
            self._send_to_wait(state)
        # The ranks have not heard of all that the dropped steps freed and filled.
        self._freed_slots = list(range(len(self._free_slots)))
        self._restarts = True

    def lower_limits(self) -> bool:
        """Halve `max_num_batched_tokens`, and once it is no more than `max_num_seqs`, both.

        False, and nothing changed, where a step has one request and one token. No request may be running.
        """
        assert not self._running
        num_tokens, num_seqs = self.limits.max_num_batched_tokens, self.limits.max_num_seqs
        if num_tokens > num_seqs:
            num_tokens = max(num_tokens // 2, num_seqs)
        elif num_seqs > 1:
            num_seqs //= 2
            num_tokens = min(num_tokens, num_seqs)
        elif num_tokens > 1:
            num_tokens //= 2
        else:
            return False
        self.limits = replace(self.limits, max_num_batched_tokens=num_tokens, max_num_seqs=num_seqs)
        self._free_slots = list(range(num_seqs - 1, -1, -1))
        return True

    def start_anew(self, num_blocks: int) -> None:
        """The ranks are new ones: their slots are empty, their KV blocks hold nothing. No request may be running."""
        assert not self._running
        self.block_manager = BlockManager(num_blocks, enable_prefix_caching=self.block_manager.enable_prefix_caching)
        self._freed_slots = []
        self._restarts = False

    # ------------------------------------------------------------------ parts of schedule

    @property
    def _is_pipelined(self) -> bool:
        return self.limits.num_micro_batches > 1

    def _hold_back(self) -> list[RequestState]:
        """Leave in `_decoding` this micro-batch's share of the running requests; returns the others."""
        share = -(-len(self._running) // self.limits.num_micro_batches)
        held_back = self._decoding[share:]
        self._set_decoding(self._decoding[:share])
        return held_back

    def _grow_decoding(self, draft: StepDraft) -> bool:
        """Give every decoding request room for one more token. True when a request had to be preempted."""
        block_size = self.limits.block_size
        needy = [state for state in self._decoding if state.num_computed == len(state.blocks) * block_size]
        preempted = False
        for state in needy:
            while state.slot is not None:
                blocks = self.block_manager.allocate(1)
                if blocks is not None:
                    draft.add_blocks(state.slot, len(state.blocks), blocks)
                    state.blocks += blocks
                    break
                if len(self._running) == 1 and not state.num_pending:
                    self._finish_too_large(state, state.num_computed + 1)
                else:  # alone, it waits for the token that is on its way, which may be its last
                    self._preempt(self._running[-1])
                    preempted = True
        if preempted:  # some, it may be, after they were given a block in this step
            draft.keep_blocks_of({state.slot for state in self._running})
        return preempted

    def _packed_decode_slots(self) -> bytes:
        if self._decode_slots is None:
            self._decode_slots = pack(state.slot for state in self._decoding)  # type: ignore[misc]
        return self._decode_slots

    def _advance_decoding(self) -> None:
        last = False
        for state in self._decoding:
            state.num_computed += 1
            state.num_pending += 1
            state.num_unscheduled -= 1
            if not state.num_unscheduled:
                last = True
        if last:
            self._set_decoding([state for state in self._decoding if state.num_unscheduled])

    def _set_decoding(self, decoding: list[RequestState]) -> None:
        self._decoding = decoding
        self._decode_slots = None

    def _continue_prompts(self, draft: StepDraft, sampling: list[RequestState], budget: int) -> int:
        """Next slices of prompts that are under way; returns what is left of the budget."""
        if not self._prefilling:
            return budget
        prefilling, self._prefilling = self._prefilling, []
        for state in prefilling:
            budget -= self._extend(state, draft, sampling, budget)
        return budget

    def _admit(self, draft: StepDraft, sampling: list[RequestState], budget: int) -> None:
        """First slices of waiting requests, in order, as far as slots, blocks and budget go."""
        waiting, block_size = self._waiting, self.limits.block_size
        prefix_id_limit = self.limits.max_model_len + self.limits.max_num_batched_tokens
        while waiting and budget > 0 and self._free_slots:
            state = waiting[0]
            if state.finished:
                waiting.popleft()
                continue
            if state.num_pending:
                break  # preempted a moment ago; its last token is still on its way
            num_tokens = len(state.token_ids)
            num_blocks = -(-num_tokens // block_size)
            if num_blocks > self.block_manager.num_blocks:
                waiting.popleft()
                self._finish_too_large(state, num_tokens)
                continue
            # The last token is always computed: its logits are wanted.
            hashes = state.hash_leading_blocks((num_tokens - 1) // block_size, block_size)
            blocks = self.block_manager.match(hashes)
            num_cached = len(blocks) * block_size
            num_prefix_ids = num_cached if state.request.sampling.has_penalties else 0
            too_many_ids = draft.has_new_slots and draft.num_prefix_ids + num_prefix_ids > prefix_id_limit
            # Every running request keeps room for one more block, so that admitting does not end in preempting.
            reserve = len(self._running)
            fresh = self.block_manager.allocate(num_blocks - len(blocks), reserve=reserve)
            if fresh is None or too_many_ids:
                self.block_manager.release(blocks + (fresh or []))
                break
            waiting.popleft()
            state.blocks = blocks + fresh
            state.num_computed = num_cached
            state.num_hashed_blocks = len(blocks)
            state.slot = self._free_slots.pop()
            self._running.append(state)
            if state.num_cached_tokens is None:
                state.num_cached_tokens = num_cached
                self._cached_tokens += num_cached
            draft.enter(state, num_prefix_ids)
            budget -= self._extend(state, draft, sampling, budget)

    def _extend(self, state: RequestState, draft: StepDraft, sampling: list[RequestState], budget: int) -> int:
        """Schedule the next slice of a prompt; returns its length."""
        length = min(state.num_uncomputed, budget)
        if length == 0:
            self._prefilling.append(state)
            return 0
        assert state.slot is not None
        start = state.num_computed
        state.num_computed += length
        num_counted = min(state.num_computed, state.num_prompt)
        if num_counted > state.num_counted:
            self._prompt_tokens += num_counted - state.num_counted
            state.num_counted = num_counted
        ends = state.num_uncomputed == 0
        draft.extend(state.slot, state.token_ids[start : state.num_computed].tobytes(), samples=ends)
        # Steps run in order and store before they attend, so these blocks can be shared from now on.
        self._register_blocks(state)
        if not ends:
            self._prefilling.append(state)
            return length
        sampling.append(state)
        state.num_pending += 1
        state.num_unscheduled -= 1
        if state.num_unscheduled and not self._is_pipelined:
            self._decoding.append(state)
            self._decode_slots = None
        return length

    def _register_blocks(self, state: RequestState) -> None:
        """Register full blocks whose tokens are known and whose computation is submitted."""
        num_full = min(len(state.token_ids), state.num_computed) // self.limits.block_size
        first = state.num_hashed_blocks
        if num_full > first:
            hashes = state.hash_leading_blocks(num_full, self.limits.block_size)
            for block, block_hash in zip(state.blocks[first:num_full], hashes[first:], strict=True):
                self.block_manager.register(block, block_hash)
            self._registered += state.blocks[first:num_full]
            state.num_hashed_blocks = num_full

    # ------------------------------------------------------------------ tokens and ends

    def _preempt(self, state: RequestState) -> None:
        """Take slot and blocks back, for want of blocks."""
        self._send_to_wait(state)
        self._num_preemptions += 1

    def _send_to_wait(self, state: RequestState) -> None:
        """Take slot and blocks back; the request waits, first in line, to be recomputed."""
        self._release(state)
        state.num_computed = 0
        state.num_hashed_blocks = 0
        self._waiting.appendleft(state)

    def _finish_too_large(self, state: RequestState, num_tokens: int) -> None:
        capacity = self.block_manager.num_blocks * self.limits.block_size
        message = (
            f"{num_tokens} tokens do not fit the KV cache, which holds {capacity}; "
            "raise gpu_memory_utilization or kv_cache_memory, or lower max_tokens"
        )
        self._finish(state, "error", error_type="kv_cache_too_small", error=message)

    def _finish(
        self,
        state: RequestState,
        reason: FinishReason,
        *,
        stopped_by_id: bool = False,
        error_type: str = "",
        error: str = "",
    ) -> None:
        state.finished = True
        del self._by_id[state.request.request_id]
        if state.slot is not None:
            self._release(state)
        output = self._report(state, reason, stopped_by_id=stopped_by_id, error_type=error_type, error=error)
        self._unsent.append(output)

    def _report(
        self,
        state: RequestState,
        reason: FinishReason | None = None,
        *,
        stopped_by_id: bool = False,
        error_type: str = "",
        error: str = "",
    ) -> RequestOutput:
        token_ids = state.token_ids[state.num_reported :].tobytes()
        state.num_reported = len(state.token_ids)
        logprobs, state.logprobs = state.logprobs, []
        return RequestOutput(
            request_id=state.request.request_id,
            token_ids=token_ids,
            finish_reason=reason,
            stopped_by_id=stopped_by_id,
            num_cached_tokens=state.num_cached_tokens or 0,
            logprobs=logprobs,
            error_type=error_type,
            error=error,
        )

    def _release(self, state: RequestState) -> None:
        """Give slot and blocks back. Safe while a step that uses them is in flight: steps run in order."""
        assert state.slot is not None
        self.block_manager.release(state.blocks)
        state.blocks = []
        self._freed_slots.append(state.slot)
        self._free_slots.append(state.slot)
        state.slot = None
        self._running.remove(state)
        if state in self._prefilling:
            self._prefilling.remove(state)
        elif state in self._decoding:
            self._decoding.remove(state)
            self._decode_slots = None

    def check_integrity(self) -> None:
        """Assert that slots, lists and blocks agree."""
        self.block_manager.check_integrity([state.blocks for state in self._running])
        slots = [state.slot for state in self._running if state.slot is not None]
        assert len(slots) == len(self._running)
        assert sorted([*self._free_slots, *slots]) == list(range(self.limits.max_num_seqs))
        assert all(s.slot is None and not s.blocks for s in self._waiting)
        assert set(self._prefilling) | set(self._decoding) <= set(self._running)
        assert not set(self._prefilling) & set(self._decoding)
        for state in self._running:
            assert state.num_computed <= len(state.blocks) * self.limits.block_size
            assert state.num_computed <= len(state.token_ids) + state.num_pending
            assert not state.finished
