"""The scheduler against a model of what ranks do: every request gets its tokens, in order, once, whatever happens."""

from __future__ import annotations

import msgspec
import pytest

from fake_runners import BLOCK_SIZE, CountingRunner, engine_config, rows_of, spans_of
from nvcli.core.message_sizes import max_step_input_bytes
from nvcli.core.messages import ForwardMode, StepInput, StepOutput, unpack
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.core import EngineCore
from nvcli.engine.scheduler import Scheduler, SchedulerLimits
from nvcli.worker.runner.interface import RankContext
from rank_in_process import run
from requests_factory import make_request


class CheckingExecutor:
    """Runs steps at once on a CountingRunner, and checks that each keeps to what the ranks may expect."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        context = RankContext(rank=0, report_phase=lambda phase: None)
        self.runner = CountingRunner(engine_config(), context)
        self.tables: dict[int, dict[int, int]] = {}
        self.num_computed: dict[int, int] = {}
        self.steps: list[StepInput] = []
        self.pending: list[StepOutput] = []
        self.num_prefill_tokens = 0

    def submit(self, step: StepInput) -> None:
        assert step.step_id == len(self.steps)
        self.steps.append(step)
        encoded = msgspec.msgpack.encode(step)
        assert msgspec.msgpack.decode(encoded, type=StepInput) == step
        assert len(encoded) <= max_step_input_bytes(
            max_num_seqs=self.limits.max_num_seqs,
            max_num_batched_tokens=self.limits.max_num_batched_tokens,
            max_model_len=self.limits.max_model_len,
            max_blocks_per_seq=-(-self.limits.max_model_len // self.limits.block_size),
        )
        for slot in unpack(step.freed_slots):
            del self.tables[slot], self.num_computed[slot]
        for new in step.new_slots:
            assert new.slot not in self.tables
            assert new.num_cached_tokens % self.limits.block_size == 0
            self.tables[new.slot] = {}
            self.num_computed[new.slot] = new.num_cached_tokens
        assert not any(unpack(step.block_groups))
        blocks = zip(unpack(step.block_slots), unpack(step.block_columns), unpack(step.block_ids), strict=True)
        for slot, column, block in blocks:
            assert block > 0
            assert self.tables[slot].setdefault(column, block) == block
        counts = {slot: num_tokens for slot, num_tokens, _ in rows_of(step)}
        assert len(counts) == step.num_rows
        assert min(counts.values()) > 0
        assert sum(counts.values()) == step.total_tokens <= self.limits.max_num_batched_tokens
        decodes, chunks = rows_of(step)[: step.num_decodes], rows_of(step)[step.num_decodes :]
        assert all(num_tokens == num_logits == 1 for _, num_tokens, num_logits in decodes)
        self.num_prefill_tokens += sum(num_tokens for _, num_tokens, _ in chunks)
        expected = ForwardMode.MIXED if decodes and chunks else ForwardMode.DECODE if decodes else ForwardMode.EXTEND
        assert step.mode == expected
        brought = {(slot, start): len(tokens) for slot, start, tokens in spans_of(step)}
        assert all(brought[slot, self.num_computed[slot]] == num_tokens for slot, num_tokens, _ in chunks)
        written: list[int] = []
        for slot, count in counts.items():
            start = self.num_computed[slot]
            columns = range(start // self.limits.block_size, -(-(start + count) // self.limits.block_size))
            written += [self.tables[slot][column] for column in columns]
            self.num_computed[slot] = start + count
        assert unpack(step.seq_lens).tolist() == [self.num_computed[slot] for slot in counts]
        assert len(set(written)) == len(written), "two requests write to one block"
        output = self.runner.launch(step)
        assert output is not None
        self.pending.append(output.result())

    def collect(self) -> StepOutput:
        return self.pending.pop(0)


def make_core(num_blocks: int = 64, **limits: int) -> tuple[EngineCore, Scheduler, CheckingExecutor]:
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 256, "block_size": BLOCK_SIZE}
    scheduler_limits = SchedulerLimits(**{**values, **limits})
    scheduler = Scheduler(scheduler_limits, BlockManager(num_blocks))
    executor = CheckingExecutor(scheduler_limits)
    return EngineCore(scheduler, executor, max_in_flight=2), scheduler, executor


def counted(n: int, prompt_len: int = 0) -> list[int]:
    return list(range(100, 100 + n))


def test_requests_get_their_tokens() -> None:
    core, scheduler, _ = make_core()
    core.scheduler.add(make_request(i, range(i + 1), 10 + i) for i in range(20))
    done = run(core, scheduler)
    for i in range(20):
        assert unpack(done[i].token_ids).tolist() == counted(10 + i)
        assert done[i].finish_reason == "length"


def test_the_engine_tells_how_long_running_answers_are() -> None:
    core, scheduler, _ = make_core(num_blocks=8192, max_num_seqs=1300, max_num_batched_tokens=4096)
    assert core.scheduler.running_lengths() == b""
    core.scheduler.add(make_request(i, [i], 10 + i % 7) for i in range(1300))
    for _ in range(4):
        core.step()
    numbers = unpack(core.scheduler.running_lengths())
    lengths, most, prompts = (numbers[at::3].tolist() for at in range(3))
    assert set(lengths) == {3}  # the fourth step's token is on its way
    assert set(prompts) == {1}
    assert (len(most), most[:3]) == (434, [10, 13, 16])  # every third: 512 at most
    run(core, scheduler)
    assert core.scheduler.running_lengths() == b""


def test_stop_id_ends_a_request_and_the_wasted_token_is_dropped() -> None:
    core, scheduler, _ = make_core()
    core.scheduler.add([make_request(0, [1], 50, stop_ids=[105]), make_request(1, [2], 9)])
    done = run(core, scheduler)
    assert unpack(done[0].token_ids).tolist() == counted(6)
    assert (done[0].finish_reason, done[0].stopped_by_id) == ("stop", True)
    assert unpack(done[1].token_ids).tolist() == counted(9)


def test_long_prompt_is_computed_in_chunks_beside_decoding() -> None:
    core, scheduler, executor = make_core(max_num_batched_tokens=8)
    core.scheduler.add([make_request(0, [1], 30)])
    core.step()
    core.scheduler.add([make_request(1, range(100), 3)])
    done = run(core, scheduler)
    assert unpack(done[1].token_ids).tolist() == counted(3)
    modes = [step.mode for step in executor.steps]
    assert modes.count(ForwardMode.MIXED) >= 14  # 100 tokens, 7 a step beside the one that decodes


def test_equal_prefix_is_computed_once_even_within_a_step() -> None:
    core, scheduler, executor = make_core(max_num_batched_tokens=256)
    core.scheduler.add(make_request(i, [*range(40), 200 + i], 2) for i in range(5))
    done = run(core, scheduler)
    assert [done[i].num_cached_tokens for i in range(5)] == [0, 40, 40, 40, 40]
    assert executor.num_prefill_tokens == 41 + 4


def test_wholly_cached_prompt_still_computes_its_last_token() -> None:
    core, scheduler, _ = make_core()
    core.scheduler.add([make_request(0, range(8), 1)])
    run(core, scheduler)
    core.scheduler.add([make_request(1, range(8), 3)])
    done = run(core, scheduler)
    assert done[1].num_cached_tokens == 4
    assert unpack(done[1].token_ids).tolist() == counted(3)


def test_preempted_requests_come_back_and_go_on_where_they_were() -> None:
    core, scheduler, _ = make_core(num_blocks=12)
    core.scheduler.add(make_request(i, [i, i, i], 30) for i in range(6))
    done = run(core, scheduler)
    assert core.scheduler.stats.num_preemptions > 0
    for i in range(6):
        assert unpack(done[i].token_ids).tolist() == counted(30)


@pytest.mark.parametrize(("prompt_len", "max_tokens"), [(70, 5), (20, 100)])
def test_lone_request_that_cannot_fit_becomes_an_error(prompt_len: int, max_tokens: int) -> None:
    """It must neither preempt itself for ever nor stop the others (nano-vllm #274)."""
    core, scheduler, _ = make_core(num_blocks=16)
    core.scheduler.add([make_request(0, range(prompt_len), max_tokens), make_request(1, [1, 2], 5)])
    done = run(core, scheduler)
    assert done[0].finish_reason == "error"
    assert done[0].error_type == "kv_cache_too_small"
    assert "64" in done[0].error
    assert unpack(done[1].token_ids).tolist() == counted(5)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize(("num_tokens", "reason"), [(3, "stop"), (4, "error")])
def test_answer_that_fills_the_cache_to_the_last_token_fits(
    num_micro_batches: int, num_tokens: int, reason: str
) -> None:
    """Its last token is never computed; that it is the last is known one step late."""
    core, scheduler, _ = make_core(num_blocks=2, num_micro_batches=num_micro_batches)
    core.scheduler.add([make_request(0, range(2 * BLOCK_SIZE - 2), 20, stop_ids=[99 + num_tokens])])
    (output,) = run(core, scheduler).values()
    assert output.finish_reason == reason
    assert unpack(output.token_ids).tolist() == [100, 101, 102]


def test_abort_in_every_state() -> None:
    core, scheduler, _ = make_core(max_num_seqs=2, max_num_batched_tokens=4)
    core.scheduler.add([make_request(0, [1], 50), make_request(1, range(20), 5), make_request(2, [1], 5)])
    outputs = core.step() + core.step()
    core.scheduler.abort([0, 1, 2, 77])  # decoding, in the middle of its prompt, waiting, unknown
    core.scheduler.abort([0])
    while core.has_work:
        outputs += core.step()
        scheduler.check_integrity()
    outputs += core.step()
    assert sorted(o.request_id for o in outputs) == [0, 1, 2]
    assert {o.finish_reason for o in outputs} == {"abort"}


@pytest.mark.parametrize("num_steps", [0, 2])
def test_abort_of_the_last_request_is_answered(num_steps: int) -> None:
    """Though nothing of it is in flight then: it has not begun, or takes turns with the other micro-batches."""
    core, _, _ = make_core(num_micro_batches=2)
    core.scheduler.add([make_request(0, [1, 2, 3], 6)])
    outputs = [output for _ in range(num_steps) for output in core.step()]
    core.scheduler.abort([0])
    while core.has_work:
        outputs += core.step()
    assert [(o.request_id, o.finish_reason) for o in outputs] == [(0, "abort")]


def test_streaming_request_reports_as_it_goes() -> None:
    core, _, _ = make_core()
    core.scheduler.add([make_request(0, [1, 2, 3], 6, stream=True)])
    pieces = []
    while core.has_work:
        pieces += core.step()
    assert [t for piece in pieces for t in unpack(piece.token_ids)] == counted(6)
    assert len(pieces) == 6
    assert [p.finish_reason for p in pieces] == [None] * 5 + ["length"]


def test_prefix_ids_of_penalised_requests_stay_within_the_channel() -> None:
    """Many requests with a long cached prefix in one step must not overflow the message (checked on submit)."""
    core, scheduler, executor = make_core(num_blocks=400, max_num_seqs=64, max_num_batched_tokens=200)
    prompt = list(range(180))
    core.scheduler.add([make_request(0, prompt, 1)])
    run(core, scheduler)
    penalised = SamplingParams(temperature=0, repetition_penalty=1.2)
    core.scheduler.add(make_request(i, [*prompt, 200 + i], 2, sampling=penalised) for i in range(1, 60))
    done = run(core, scheduler)
    assert len(done) == 59
    prefixes = [
        tokens
        for step in executor.steps
        for slot, start, tokens in spans_of(step)
        if start == 0 and any(new.slot == slot and new.num_cached_tokens for new in step.new_slots)
    ]
    assert len(prefixes) == 59
    assert all(prefix == prompt[: len(prefix)] for prefix in prefixes)


@pytest.mark.parametrize("fields", [{"bad_words": ((5, 6),)}, {"sampling": SamplingParams(repetition_penalty=1.2)}, {}])
def test_cached_tokens_travel_where_the_choice_of_a_token_depends_on_them(fields: dict[str, object]) -> None:
    core, scheduler, executor = make_core()
    core.scheduler.add([make_request(0, range(41), 1)])
    run(core, scheduler)
    core.scheduler.add([make_request(1, range(41), 2, **fields)])
    num_steps = len(executor.steps)
    assert run(core, scheduler)[1].num_cached_tokens == 40
    starts = [start for _, start, _ in spans_of(executor.steps[num_steps])]
    assert starts == ([0, 40] if fields else [40])
