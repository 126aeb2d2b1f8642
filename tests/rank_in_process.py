"""RankInProcess: an executor around a HashingRunner, which checks every step against what ranks may expect.

It stands for ranks of any kind: KV groups with windows, decode rows of several tokens of which a random number counts,
stages (outputs that come late), and steps that run out of memory, some of them half done.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence

import msgspec

from fake_runners import (
    HashingRunner,
    decode_slots_of,
    engine_config,
    rows_of,
    spans_of,
)
from nvcli.core.message_sizes import max_step_input_bytes
from nvcli.core.messages import StepInput, StepOutput, pack, unpack
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.core import EngineCore
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.request import RequestOutput
from nvcli.engine.scheduler import Scheduler
from nvcli.engine.state import RequestState
from nvcli.errors import LimitsTooHigh
from nvcli.worker.runner.interface import RankContext

_MANY_BLOCKS = 1_000_000
"""More than a home has."""


class RankInProcess:
    """Runs steps at once; their outputs are collected when the engine wants them."""

    def __init__(
        self,
        limits: SchedulerLimits,
        *,
        accept: Callable[[int], int] | None = None,
        force: Callable[[], int] | None = None,
        fails: Callable[[StepInput], bool] = lambda step: False,
        blocks_anew: Callable[[], int] | None = None,
    ) -> None:
        """`accept`: given a row's number of logits, how many of its tokens count (None: all). `force`: how many of the
        next tokens are told ahead. `fails`: which steps run out of memory. `blocks_anew`: then the rank is replaced by
        a new one with so many KV blocks."""
        self.limits = limits
        self.max_num_seqs = limits.max_num_seqs
        """As it was lowered last."""
        self.accept = accept
        self.force = force
        self.fails = fails
        self.blocks_anew = blocks_anew
        self.steps: list[StepInput] = []
        self.failed: list[StepInput] = []
        self.ran: list[StepInput] = []
        self.num_refusals = 0
        """So many times in a row what lowered limits leave is too little for new ranks."""
        self.num_short_rows = 0
        self.passes_over = False
        self.outputs: deque[tuple[set[int], StepOutput]] = deque()
        """Slots that sample, and what they sampled."""
        self.most_outputs = 0
        self.runner = self.make_runner()

    def make_runner(self) -> HashingRunner:
        context = RankContext(rank=0, report_phase=lambda phase: None)
        runner = HashingRunner(engine_config(block_size=self.limits.block_size), context)
        runner.groups = self.limits.kv_groups
        runner.accept = self.accept
        runner.force = self.force
        return runner

    def submit(self, step: StepInput) -> None:
        self.check(step)
        self.steps.append(step)
        output = StepOutput(step_id=step.step_id, token_ids=b"", out_of_memory="as planned")
        if not self.passes_over or step.restarts:
            self.passes_over = self.fails(step)
            if self.passes_over:
                self.failed.append(step)
                if len(self.failed) % 3 == 1:
                    self.runner.apply(self.in_one_cache(step))
                elif len(self.failed) % 3 == 2:
                    self.runner.launch(self.in_one_cache(step))
            else:
                self.check_waits(step)
                launched = self.runner.launch(self.in_one_cache(step))
                assert launched is not None
                output = launched.result()
                self.ran.append(step)
        self.outputs.append(({slot for slot, _, num_logits in rows_of(step) if num_logits}, output))
        self.most_outputs = max(self.most_outputs, len(self.outputs))

    def in_one_cache(self, step: StepInput) -> StepInput:
        """The step with other ids for the blocks of each home, in which they count from 1."""
        if self.limits.num_homes == 1:
            return step
        ids = zip(unpack(step.block_ids), unpack(step.block_slots), strict=True)
        own = [block and block + slot % self.limits.num_homes * _MANY_BLOCKS for block, slot in ids]
        return msgspec.structs.replace(step, block_ids=pack(own))

    def check_homes(self, step: StepInput) -> None:
        """No home computes more than its share, and nothing is shared or copied among several."""
        limits = self.limits
        shares = Counter[int]()
        for slot, num_tokens, _ in rows_of(step):
            shares[slot % limits.num_homes] += num_tokens
        assert max(shares.values()) <= limits.tokens_per_home
        assert limits.num_homes == 1 or not any((step.segments, step.shared_prefixes, step.key_copies))

    def check(self, step: StepInput) -> None:
        """What holds for every step, whether it runs or not."""
        limits = self.limits
        encoded = msgspec.msgpack.encode(step)
        assert msgspec.msgpack.decode(encoded, type=StepInput) == step
        assert len(encoded) <= max_step_input_bytes(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.num_homes * limits.tokens_per_home,
            max_model_len=limits.max_model_len,
            max_blocks_per_seq=-(-limits.max_model_len // limits.block_size) * len(limits.kv_groups),
            max_draft_tokens=limits.drafting.most_tokens - 1,
        )
        rows, lens = rows_of(step), unpack(step.seq_lens)
        assert 0 < len(rows) == len(lens) == len({slot for slot, _, _ in rows}) <= limits.max_num_seqs
        assert max(slot for slot, _, _ in rows) < self.max_num_seqs
        self.check_homes(step)
        assert max(lens) < limits.max_model_len + limits.drafting.most_tokens
        decodes, chunks = rows[: step.num_decodes], rows[step.num_decodes :]
        assert all(0 < num_tokens == num_logits <= limits.drafting.most_tokens for _, num_tokens, num_logits in decodes)
        assert all(0 <= num_logits <= 1 <= num_tokens for _, num_tokens, num_logits in chunks)
        assert len(decodes) <= -(-limits.max_num_seqs // limits.num_micro_batches)
        brought = {(slot, start + len(tokens)) for slot, start, tokens in spans_of(step)}
        chunk_ends = {(slot, end) for (slot, _, _), end in zip(chunks, lens[step.num_decodes :], strict=True)}
        assert chunk_ends <= brought, "a chunk without its tokens"

    def check_waits(self, step: StepInput) -> None:
        """With stages a decode row brings its token along, and is in no step whose output has not been collected."""
        freed = set(unpack(step.freed_slots))
        for waiting, _ in self.outputs:
            waiting -= freed  # they belong to other requests now
        if self.limits.num_micro_batches > 1:
            decodes = decode_slots_of(step)
            assert not any(waiting & set(decodes) for waiting, _ in self.outputs), "a request is in two steps in flight"
            brought = {slot: (start, tokens) for slot, start, tokens in spans_of(step)}
            entering = {new.slot for new in step.new_slots}  # of which the rank knows nothing yet
            for slot in set(decodes) - entering:
                start, tokens = brought[slot]
                assert start + len(tokens) - 1 == self.runner.lens[slot]
                known = self.runner.tokens[slot]
                assert tokens == [known.get(start + i, token) for i, token in enumerate(tokens)]

    def collect(self) -> StepOutput:
        return self.outputs.popleft()[1]

    def recover(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> int | None:
        assert not self.outputs
        if self.num_refusals:
            self.num_refusals -= 1
            raise LimitsTooHigh("as planned")
        self.max_num_seqs = max_num_seqs
        if self.blocks_anew is None:
            return None
        self.runner = self.make_runner()
        self.passes_over = False
        return self.blocks_anew()


def wait_for_last_tokens(scheduler: Scheduler, request_id: int) -> None:
    """Make one request wait for its last token before each row, as all requests do where there are stages.

    One that has ended as it came, because its answer is full of forced tokens, has no rows.
    """
    state = scheduler._by_id.get(request_id)
    if state is not None:
        state.needs_last_token = True
        state.parks_at = 0


def make_core(
    limits: SchedulerLimits, rank: RankInProcess, *, num_blocks: int, max_in_flight: int = 2
) -> tuple[EngineCore, Scheduler]:
    scheduler = Scheduler(limits, BlockManager(num_blocks))
    return EngineCore(scheduler, rank, max_in_flight=max_in_flight), scheduler


def run(core: EngineCore, scheduler: Scheduler, *, max_steps: int = 20_000) -> dict[int, RequestOutput]:
    """Step until nothing is left, checking integrity after each; the last output of each request."""
    done: dict[int, RequestOutput] = {}
    for _ in range(max_steps):
        if not core.has_work:
            break
        for output in core.step():
            assert output.request_id not in done
            done[output.request_id] = output
        scheduler.check_integrity()
    assert not core.has_work, "the engine does not come to an end"
    assert scheduler.block_manager.num_used == 0
    return done


def random_count(rng: random.Random, *, is_single_certain: bool = False) -> Callable[[int], int]:
    """Any number of tokens, more often none or all. `is_single_certain`: all of them where there are no drafts."""

    def count(num_logits: int) -> int:
        if is_single_certain and num_logits == 1:
            return 1
        return rng.choice([0, num_logits, rng.randint(0, num_logits)])

    return count


def draw_widths(scheduler: Scheduler, rng: random.Random) -> None:
    """Make a scheduler that always drafts give each row a number of tokens drawn anew in each step, up to as many as it
    would have."""
    widths = scheduler._drafts.widths

    def drawn(rows: Sequence[RequestState], max_tokens: int, *, has_prompts: bool) -> list[int]:
        return [rng.randint(1, width) for width in widths(rows, max_tokens, has_prompts=has_prompts)]

    scheduler._drafts.widths = drawn  # type: ignore[method-assign]
