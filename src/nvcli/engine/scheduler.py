"""Scheduler: for each running request, how many tokens to compute next.

One mechanism serves whole prompts, chunks of prompts, prefix hits, decoding and recomputation after a preemption: a row
computes a request's next n tokens, and logits for the last l of them. A prefill chunk has n known tokens, and l is 1 if
the chunk reaches the last known token, else 0. A decode row begins with the last token, and l = n.

A step gives 0 to l tokens for a row, and is still in flight when the next one is scheduled: `schedule` is called for
step n + 1 before `process` is called for step n. Requests are therefore scheduled by upper bounds of their lengths
(`RequestState`), and hold exactly the blocks that these need; `process` takes back what a step did not give, blocks
included. A row may give more tokens than its request can use: tokens after a stop id or `max_tokens` are dropped, as
are all tokens of a request that has ended meanwhile, or that has them already (`ForcedTokens`). A request pauses when
it has asked for as many tokens as it may have, or when it has to know its last token
(`RequestState.needs_last_token`), which its next row then brings.

Decode rows go first; the rest of the token budget goes to prompts, oldest first. A prompt gets blocks for all its known
tokens when it is admitted (in KV groups with a window, chunk by chunk); decoding takes one block at a time. `Admission`
aims to have enough of them. When there are too few, a request is preempted (`choose_victim`): its blocks are released,
and its tokens recomputed later.

A decode row is one token wide, or wider if drafts follow the token (`DraftPolicy`). It may be wider than its request
has tokens left; `StepInput.row_limits` keeps the ranks from giving more. Drafts take only free blocks: if there are too
few, a step has no drafts, and drafts in flight give back the blocks that they do not use before a request is preempted.

With several micro-batches (pipeline stages), one step of each is in flight, and every request needs its last token, so
that a decoding request is in only one of them at a time. A step takes at most its share of the running requests, which
keeps the micro-batches balanced. Chunks of a prompt go into consecutive steps.

A step that ran out of memory is taken back (`put_back`), as are those submitted after it: all running requests wait
again, to find in the prefix cache what earlier steps left there (unless it is lost: `start_anew`), and the limits are
lowered. This module knows no ranks, text or devices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import compress

from nvcli.core.messages import StepOutput, pack, unpack
from nvcli.engine import failures
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.draft_policy import DraftPolicy
from nvcli.engine.failures import Failure, FirstPrompts
from nvcli.engine.forced_tokens import ForcedTokens
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.prompt_turns import PromptTurns
from nvcli.engine.request import EngineStats, FinishReason, Request, RequestOutput
from nvcli.engine.running_requests import RunningRequests, lacking_room
from nvcli.engine.state import Prompt, RequestState
from nvcli.engine.step_draft import ScheduledStep, StepDraft
from nvcli.engine.whole_images import least_chunk, whole_chunk, whole_spans


class Scheduler:
    """Turns requests into steps, and the outputs of steps into finished requests."""

    def __init__(self, limits: SchedulerLimits, block_manager: BlockManager) -> None:
        self.limits = limits
        self._waiting: deque[RequestState] = deque()
        self._running = RunningRequests(limits, block_manager)
        self._homes = self._running.homes
        self._drafts = DraftPolicy(limits.drafting)
        self._turns = PromptTurns()
        self._in_flight: deque[ScheduledStep] = deque()
        """Steps whose outputs are awaited, the oldest first."""
        self._forced = ForcedTokens(self._running, takes_all=limits.takes_all_runs)
        self._by_id: dict[int, RequestState] = {}
        self._restarts = False
        """Whether the next step is the first after one that did not run."""
        self._next_step_id = 0
        self._unsent: list[RequestOutput] = []
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._generated_tokens = 0
        self._num_preemptions = 0
        self._num_decode_rows = 0
        self._first_prompts = FirstPrompts()

    @property
    def block_manager(self) -> BlockManager:
        """The blocks of the first home."""
        return self._homes[0].tables.block_manager

    @property
    def num_used_blocks(self) -> int:
        """Used blocks of all homes."""
        return self._homes.num_used_blocks

    # ------------------------------------------------------------------ requests

    def add(self, requests: Iterable[Request]) -> None:
        """Queue requests behind the waiting ones, with each sample as a request of its own."""
        for request in requests:
            prompt = Prompt(request)
            for sample in request.samples():
                whole = whole_spans(sample, prompt.num_tokens, self.limits)
                state = RequestState(sample, prompt, self.limits.num_micro_batches > 1, whole)
                assert 0 < state.num_prompt < state.max_len <= self.limits.max_model_len
                assert sample.request_id not in self._by_id
                self._by_id[sample.request_id] = state
                self._waiting.append(state)
                if state.watch is not None:
                    self._look(state)  # it may have output before its first token

    def abort(self, request_ids: Iterable[int]) -> None:
        """End requests early. Requests that have ended already are skipped: their last output is on its way."""
        for request_id in request_ids:
            if (state := self._by_id.get(request_id)) is not None:
                self._finish(state, "abort")

    def forget_prefixes(self) -> None:
        """Empty the prefix cache, and forget the hashes of prompts that are not here."""
        for home in self._homes:
            home.tables.forget_prefixes()

    @property
    def has_unfinished(self) -> bool:
        """Whether requests are unfinished, or outputs not taken yet: an abort may end the last request between two
        steps."""
        return bool(self._by_id or self._unsent)

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting) + self._running.merged.num_resting,
            num_blocks=self._homes.num_blocks,
            num_used_blocks=self._homes.num_used_blocks,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            generated_tokens=self._generated_tokens,
            num_preemptions=self._num_preemptions,
            kv_bytes_saved=self._running.num_bytes_saved,
            decode_rows=self._num_decode_rows + self._forced.num_runs,
            drafted=tuple(self._drafts.num_drafted),
            accepted=tuple(self._drafts.num_accepted),
            forced_tokens=self._forced.num_taken,
        )

    def running_lengths(self) -> bytes:
        """Return the lengths of running answers (`EngineStats.running_lengths`)."""
        return self._running.lengths()

    # ------------------------------------------------------------------ one step

    def schedule(self) -> ScheduledStep | None:
        """Return the next step, or None when nothing can be computed now."""
        draft = StepDraft(self.limits)
        for home in self._homes:
            home.tables.begin_step()
        now = self._next_step_id // self.limits.num_micro_batches
        self._running.regroup(self._waiting, draft, now)
        num_running, num_preemptions = len(self._running), self._num_preemptions
        has_prompts = self._turns.has_prompts(self._running, len(self._waiting), has_drafts=self._drafts.has_drafts)
        rows, widths = self._plan_decode_rows(draft, has_prompts=has_prompts)
        budgets = self._homes.budgets(self.limits.tokens_per_home, rows, widths)
        chunks = self._plan_chunks(budgets, draft)
        preempted = self._num_preemptions > num_preemptions
        if len(self._running) < num_running:  # some may have lost their slots after they got blocks in this step
            is_running = [state.slot is not None for state in rows]
            rows, widths = list(compress(rows, is_running)), list(compress(widths, is_running))
            chunks = [(state, length) for state, length in chunks if state.slot is not None]
            draft.keep_slots({state.slot for state in self._running})

        row_limits = pack([state.most_computed for state in rows]) if max(widths, default=1) > 1 else b""
        decode_slots, decode_lens, parked = self._running.decoding.advance(rows, widths)
        draft.add_last_tokens([state for state in parked if state.needs_last_token])
        for state, length in chunks:
            self._add_chunk(state, length, draft)
            budgets[state.home] -= length
        if chunks:
            self._running.drop_prefilled()
        if not preempted and (has_prompts or not row_limits):
            self._admit(draft, budgets, now)

        if not decode_slots and not draft.chunks:
            self._running.rest_on(self._waiting)
            return None
        step = draft.finish(
            self._next_step_id,
            decoding=rows,
            decode_slots=decode_slots,
            decode_widths=widths,
            decode_lens=decode_lens,
            registered=self._homes.take_registered(),
            draft_tokens=self._drafts.shared_tokens(len(rows)) if row_limits else 0,
            row_limits=row_limits,
            extends_drafts=self._drafts.extends(has_drafts=bool(row_limits), has_prompts=bool(draft.chunks)),
            freed_slots=pack(self._running.take_freed_slots()),
            restarts=self._restarts,
            **self._running.merged.take_changes(),
            **self._homes.share(draft, len(rows)),
        )
        self._next_step_id += 1
        self._in_flight.append(step)
        self._num_decode_rows += len(rows)
        self._restarts = False
        return step

    def process(self, step: ScheduledStep, output: StepOutput) -> None:
        """Take in a step's tokens; finished and streaming requests then appear in `take_outputs`.

        Raises ModelError if many prompts, and only such prompts, have had non-finite logits.
        """
        oldest = self._in_flight.popleft()
        assert oldest is step
        assert output.step_id == step.input.step_id
        owners: Sequence[RequestState] = step.sampling
        if output.counts or len(output.token_ids) > 4 * len(owners):
            owners = self._take_back_missing(step, output)
        self._drafts.learn(step.input, output, step.sampling[: step.input.num_decodes])
        if output.logprobs:
            for state, logprobs in zip(owners, output.logprobs, strict=True):
                if logprobs is not None and not state.finished:
                    state.logprobs.append(logprobs)
        step.take_query_results(output)
        num_dropped = 0
        owners, tokens = self._forced.take(owners, unpack(output.token_ids), output.forced, self._in_flight)
        for state, token in zip(owners, tokens, strict=True):
            # This loop runs for every token of the job, so it is flat.
            if state.slot is None:
                if state.finished:
                    num_dropped += 1
                    continue
                state.num_owed -= 1  # it was preempted
            generated = state.generated
            generated.append(token)
            if token in state.stop_ids:
                if token >= 0:
                    self._finish(state, "stop", stopped_by_id=True)
                else:
                    num_dropped += 1
                    self._fail(state)
            elif len(generated) >= state.checked_at:
                self._check(state)
        self._generated_tokens += len(owners) - num_dropped
        self._running.decoding.unpark(step.sampling)
        if not self._generated_tokens:
            self._first_prompts.check()

    def _check(self, state: RequestState) -> None:
        """Finish, register or report a request as needed after a token that is not a stop id."""
        if state.num_tokens == state.max_len:
            self._finish(state, "length")
            return
        if state.watch is not None:
            self._look(state)
        if not state.finished:
            self._homes.register(state)
            if state.stream:
                self._unsent.append(state.report())

    def _look(self, state: RequestState) -> None:
        """Let a request check its answer, then end it or continue accordingly. Forced tokens follow as a prefill
        chunk."""
        num_added, reason = state.look(self.limits.block_size)
        self._generated_tokens += num_added
        if reason is not None:
            self._finish(state, reason)
        elif num_added and state.slot is not None:
            self._running.prefill_again(state)

    def take_outputs(self) -> list[RequestOutput]:
        """Return the outputs since the last call."""
        outputs, self._unsent = self._unsent, []
        return outputs

    # ------------------------------------------------------------------ steps that did not run

    def put_back(self, steps: Sequence[ScheduledStep]) -> None:
        """Take back all steps in flight, because they did not run.

        Running requests go back to the head of the queue with their known tokens. The prefix cache forgets blocks that
        were never filled.
        """
        self._running.end_rest()
        for state in reversed(list(self._running)):
            self._send_to_wait(state)
        for step in steps:
            step.put_back()
            self._homes.unregister(step.registered)
        self._homes.unregister(self._homes.take_registered())
        self._running.free_all_slots()
        self._restarts = True
        self._in_flight.clear()
        self._forced.put_back()
        for home in self._homes:
            home.tables.forget_sent()

    def lower_limits(self) -> bool:
        """Go on with `SchedulerLimits.lowered`; return whether there are lower limits. No request may be running."""
        limits = self.limits.lowered()
        if limits is None:
            return False
        self.limits = limits
        self._running.lower_limits(limits)
        return True

    def start_anew(self, num_blocks: int) -> None:
        """Begin again with new ranks, whose slots and KV blocks are empty, `num_blocks` in each home. No request may be
        running."""
        self._running.start_anew(num_blocks)
        self._restarts = False

    # ------------------------------------------------------------------ decode rows

    @property
    def _awaits_drafts(self) -> bool:
        """Whether a step in flight has drafts, which may give back blocks that they took."""
        return any(step.input.row_limits for step in self._in_flight)

    def _plan_decode_rows(self, draft: StepDraft, *, has_prompts: bool) -> tuple[list[RequestState], list[int]]:
        """Choose the requests that decode in the next step, the first that are ready, and take blocks for their tokens.
        Returns the requests and the width of each row."""
        rows = self._running.decoding.leading(self.limits.max_decode_rows(len(self._running)))
        widths = self._drafts.widths(rows, self.limits.max_num_batched_tokens, has_prompts=has_prompts)
        lacking = lacking_room(rows, widths)
        if lacking and (max(widths) > 1 or self._awaits_drafts) and not self._homes.has_room(lacking):
            widths = [1] * len(rows)
            lacking = lacking_room(rows, widths)
            if self._awaits_drafts and not self._homes.has_room(lacking):
                return [], []
        for state, width in lacking:
            if self._make_room(state, width, draft, least=width) < width and state.slot is not None:
                end = rows.index(state)  # this row and those after it wait for blocks that drafts took
                return rows[:end], widths[:end]
        return rows, widths

    def _take_back_missing(self, step: ScheduledStep, output: StepOutput) -> list[RequestState]:
        """Lower the bounds of requests that got fewer tokens than the step computed logits for.

        Returns the request of each token that the step gave.
        """
        counts: Sequence[int] = unpack(output.counts) if output.counts else step.num_logits
        rows = zip(step.sampling, step.num_logits, counts, strict=True)
        for state, num_missing in self._forced.missing(rows):
            if state.slot is None:
                state.num_owed -= num_missing
            if state.blocks:
                state.num_computed -= num_missing
                self._homes.tables_of(state).trim(state)
        self._running.decoding.bounds_changed()
        return step.owners(counts)

    # ------------------------------------------------------------------ prefill chunks

    def _plan_chunks(self, budgets: Sequence[int], draft: StepDraft) -> list[tuple[RequestState, int]]:
        """Choose the next chunks of prompts under way, as (request, number of tokens), and take their blocks."""
        chunks, left = [], list(budgets)
        for state in self._running.prefilling.copy():
            length = whole_chunk(state, min(state.num_uncomputed, left[state.home]))
            if state.num_computed + length > state.capacity:
                length = whole_chunk(state, self._make_room(state, length, draft, least=least_chunk(state)))
            if length and state.slot is not None:
                chunks.append((state, length))
                left[state.home] -= length
        return chunks

    def _admit(self, draft: StepDraft, budgets: list[int], now: int) -> None:
        """Admit waiting requests in order, each with its first chunk, as far as slots, blocks and the homes' tokens
        go."""
        waiting = self._waiting
        while waiting and (homes := self._homes.open_to(budgets)):
            if waiting[0].finished:
                waiting.popleft()
                continue
            if not self._running.adapters.bring_forward(waiting):
                break
            state = waiting[0]
            if state.finished:
                continue
            if state.num_pending:
                break  # preempted a moment ago; its last tokens are still on their way
            if not homes[0].tables.can_fit(state.num_tokens):
                waiting.popleft()
                self._finish_too_large(state, state.num_tokens)
                continue
            entered = self._homes.enter(state, homes, budgets, now)
            if entered is None:
                if not self._running and self._running.release_resting():
                    continue  # nothing else would give blocks back
                break
            home, length = entered
            if not draft.has_room_for(state):
                self._running.turn_away(state, home)
                break
            waiting.popleft()
            self._running.enter(state, home)
            if state.num_cached_tokens is None:
                state.num_cached_tokens = state.num_computed
                self._cached_tokens += state.num_computed
            draft.enter(state)
            self._add_chunk(state, length, draft)
            if state.num_uncomputed:
                self._running.prefilling.append(state)
            budgets[home.number] -= length
        self._turns.tried(lacked_memory=bool(waiting) and self._homes.num_free_slots > 0)

    def _add_chunk(self, state: RequestState, length: int, draft: StepDraft) -> None:
        """Schedule the next chunk of a prompt, whose blocks are taken already."""
        state.num_computed += length
        num_counted = min(state.num_computed, state.num_prompt)
        if num_counted > state.num_counted:
            self._prompt_tokens += num_counted - state.num_counted
            state.num_counted = num_counted
        draft.add_chunk(state, length)
        # Steps run in order and store before they attend, so these blocks can be shared from now on.
        self._homes.register(state)
        if not state.num_uncomputed:
            self._running.decoding.add(state)
            self._homes.tables_of(state).decodes(state)

    # ------------------------------------------------------------------ room and ends

    def _make_room(self, state: RequestState, num_tokens: int, draft: StepDraft, *, least: int) -> int:
        """Take blocks for a running request's next `num_tokens` tokens; return the number that fit.

        If there are too few blocks even for `least` tokens, other requests are preempted; if this one is, the result is
        0. It is also 0 while steps in flight may give back blocks that drafts took. A lone request with no token on its
        way ends with an error.
        """
        while state.slot is not None:
            room = self._homes.tables_of(state).grow(state, num_tokens, draft, least=least)
            if room >= least:
                return room
            if self._awaits_drafts:
                return 0
            if self._running.release_resting():
                continue
            if self._homes[state.home].num_running > 1 or state.num_pending:
                # Alone, it waits for the tokens that are on their way, which may be its last.
                self._send_to_wait(self._running.choose_victim(state.home))
                self._num_preemptions += 1
            else:
                self._finish_too_large(state, state.num_computed + 1)
        return 0

    def _send_to_wait(self, state: RequestState) -> None:
        """Take back a request's slot and blocks, and put it at the head of the queue to be recomputed."""
        state.num_owed = state.num_pending
        self._running.release(state)
        self._waiting.appendleft(state)

    def _finish_too_large(self, state: RequestState, num_tokens: int) -> None:
        most = self._homes[0].tables.most_tokens(num_tokens)  # every home has as many blocks
        self._finish(state, "error", failure=failures.too_large(num_tokens, most))

    def _fail(self, state: RequestState) -> None:
        """End a request whose last id stands for a failure."""
        failure = failures.of_token(state.generated.pop(), state)
        if not self._generated_tokens:
            self._first_prompts.note(state, failure)
        if failure.is_tainted:
            self._homes.tables_of(state).forget(state)
        self._finish(state, "error", failure=failure)

    def _finish(
        self, state: RequestState, reason: FinishReason, *, stopped_by_id: bool = False, failure: Failure | None = None
    ) -> None:
        state.finished = True
        del self._by_id[state.request.request_id]
        if self._running.drop(state):
            self._turns.ended()
        self._homes[state.home].admission.end(state)
        error_type, error = ("", "") if failure is None else (failure.type, failure.message)
        self._unsent.append(state.report(reason, stopped_by_id=stopped_by_id, error_type=error_type, error=error))

    def check_integrity(self) -> None:
        """Assert that slots, lists, bounds and blocks agree."""
        self._running.check_integrity()
        for state in self._waiting:
            assert state.finished or (state.slot is None and bool(state.blocks) >= bool(state.num_computed))
