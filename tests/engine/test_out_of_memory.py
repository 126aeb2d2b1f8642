"""Steps that run out of memory: nothing of them counts, smaller ones follow, and the answers are the same."""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from checkpoints import write_tiny_qwen3
from combinations import seeds
from fake_runners import BLOCK_SIZE, HashingRunner, engine_config
from nvcli.core.messages import StepInput, StepOutput, unpack
from nvcli.core.weight_changes import LoadWeights, Sleep, Wake, WeightsChange, WeightsChanged
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.client import EngineClient
from nvcli.engine.core import EngineCore
from nvcli.engine.request import Request, RequestOutput
from nvcli.engine.scheduler import Scheduler, SchedulerLimits
from nvcli.errors import CapacityError, LimitsTooHigh
from nvcli.worker.runner.interface import RankContext
from requests_factory import make_request

pytestmark = pytest.mark.usefixtures("warm_engines")


class FailingExecutor:
    """A rank in this process whose steps run out of memory as `fails` says, some of them half done."""

    def __init__(self, fails: Callable[[StepInput], bool], *, blocks_anew: Callable[[], int] | None = None) -> None:
        """`blocks_anew`: the rank is replaced by a new one, with so many KV blocks."""
        self.runner = make_rank()
        self.fails = fails
        self.blocks_anew = blocks_anew
        self.num_refusals = 0
        """So many times in a row what other limits leave is too little for a start."""
        self.failed: list[StepInput] = []
        self.passes_over = False
        self.sizes: list[tuple[int, int]] = []
        """Requests and tokens of the steps that ran."""
        self.outputs: deque[StepOutput] = deque()

    def submit(self, step: StepInput) -> None:
        if self.passes_over and not step.restarts:
            self.outputs.append(StepOutput(step_id=step.step_id, token_ids=b"", out_of_memory="passed over"))
        elif self.fails(step):
            self.passes_over = True
            self.failed.append(step)
            if len(self.failed) % 3 == 1:
                self.runner.apply(step)
            elif len(self.failed) % 3 == 2:
                self.runner.launch(step)
            self.outputs.append(StepOutput(step_id=step.step_id, token_ids=b"", out_of_memory="as planned"))
        else:
            self.passes_over = False
            self.sizes.append(size_of(step))
            output = self.runner.launch(step)
            assert output is not None
            self.outputs.append(output.result())

    def collect(self) -> StepOutput:
        return self.outputs.popleft()

    def recover(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> int | None:
        assert not self.outputs
        if self.num_refusals:
            self.num_refusals -= 1
            raise LimitsTooHigh("as planned")
        if self.blocks_anew is None:
            return None
        self.runner = make_rank()
        self.passes_over = False
        return self.blocks_anew()


def make_rank() -> HashingRunner:
    context = RankContext(rank=0, report_phase=lambda phase: None)
    return HashingRunner(engine_config(), context)


def size_of(step: StepInput) -> tuple[int, int]:
    """Requests and tokens."""
    return step.num_rows, step.total_tokens


def make_core(
    fails: Callable[[StepInput], bool],
    *,
    num_blocks: int = 64,
    blocks_anew: Callable[[], int] | None = None,
    max_in_flight: int = 2,
    **limits: int,
) -> tuple[EngineCore, Scheduler, FailingExecutor]:
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 256, "block_size": BLOCK_SIZE}
    scheduler = Scheduler(SchedulerLimits(**{**values, **limits}), BlockManager(num_blocks))
    executor = FailingExecutor(fails, blocks_anew=blocks_anew)
    return EngineCore(scheduler, executor, max_in_flight=max_in_flight), scheduler, executor


def run(core: EngineCore, scheduler: Scheduler) -> dict[int, RequestOutput]:
    done: dict[int, RequestOutput] = {}
    while core.has_work:
        for output in core.step():
            assert output.request_id not in done
            done[output.request_id] = output
        scheduler.check_integrity()
    assert scheduler.block_manager.num_used == 0
    return done


def answers(done: dict[int, RequestOutput]) -> dict[int, tuple[list[int], str | None]]:
    return {request_id: (unpack(o.token_ids).tolist(), o.finish_reason) for request_id, o in done.items()}


def undisturbed(requests: list[Request]) -> dict[int, tuple[list[int], str | None]]:
    core, scheduler, _ = make_core(lambda step: False, num_blocks=1000, max_num_batched_tokens=1000)
    core.add(requests)
    return answers(run(core, scheduler))


def test_batches_are_halved_until_they_fit() -> None:
    requests = [make_request(i, range(i, i + 30), 20) for i in range(20)]
    core, scheduler, executor = make_core(lambda step: size_of(step)[1] > 9, max_num_batched_tokens=40)
    core.add(requests)
    assert answers(run(core, scheduler)) == undisturbed(requests)
    limits = scheduler.limits
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (8, 8)  # 40, 20, 10, 8
    assert len(executor.failed) == len(core.notes) == 3
    assert "max_num_batched_tokens 20 and max_num_seqs 8" in core.take_notes()[0]
    assert core.take_notes() == []
    assert core.stats.num_preemptions == 0


def test_fewer_requests_run_where_smaller_batches_are_not_enough() -> None:
    requests = [make_request(i, range(5), 20) for i in range(20)]
    core, scheduler, executor = make_core(lambda step: size_of(step)[0] > 2)
    core.add(requests)
    assert answers(run(core, scheduler)) == undisturbed(requests)
    assert scheduler.limits.max_num_seqs == 2
    assert max(executor.sizes)[0] == 2


def test_what_was_computed_is_found_again() -> None:
    """Blocks of steps that ran are reused; a long prompt is not computed twice for one failed decode step."""
    core, scheduler, executor = make_core(lambda step: step.step_id == 20, max_num_batched_tokens=64)
    core.add([make_request(0, range(50), 30)])
    run(core, scheduler)
    assert len(executor.failed) == 1
    assert sum(tokens for _, tokens in executor.sizes) < 50 + 30 + 2 * BLOCK_SIZE


def test_nothing_is_found_again_in_ranks_that_were_started_anew() -> None:
    """Their blocks are empty, and there may be fewer of them."""
    core, scheduler, executor = make_core(
        lambda step: step.step_id == 10, num_blocks=64, blocks_anew=lambda: 20, max_num_batched_tokens=64
    )
    core.add(requests := [make_request(i, [*range(20), i], 20) for i in range(6)])
    assert answers(run(core, scheduler)) == undisturbed(requests)
    assert len(executor.failed) == 1
    assert core.stats.num_blocks == 20
    assert re.search(r"max_num_seqs 8\. Restarting all ranks took 0\.0 s", core.take_notes()[0])


def test_limits_are_lowered_until_ranks_can_be_started_anew() -> None:
    core, scheduler, executor = make_core(
        lambda step: step.step_id == 10, blocks_anew=lambda: 20, max_num_batched_tokens=64
    )
    executor.num_refusals = 3
    core.add(requests := [make_request(i, [*range(20), i], 20) for i in range(6)])
    assert answers(run(core, scheduler)) == undisturbed(requests)
    (note,) = core.take_notes()
    assert "from now on with max_num_batched_tokens 4 and max_num_seqs 4" in note  # 32, 16, 8


def test_limits_that_cannot_be_lowered_any_further_end_the_run() -> None:
    core, scheduler, executor = make_core(lambda step: step.step_id == 3, blocks_anew=lambda: 20)
    executor.num_refusals = 100
    core.add([make_request(0, range(5), 20)])
    with pytest.raises(CapacityError, match=r"a single token per step \(as planned\)"):
        run(core, scheduler)


def test_prompts_that_are_computed_again_count_once() -> None:
    core, scheduler, executor = make_core(lambda step: step.step_id in (1, 7, 9), blocks_anew=lambda: 64)
    core.add([make_request(i, range(i, i + 30), 5) for i in range(4)])
    run(core, scheduler)
    assert len(executor.failed) == 3
    assert core.stats.prompt_tokens == 4 * 30


def test_block_that_the_last_step_was_to_fill_is_not_reused() -> None:
    """It is registered when its last token is known, one step before that token's keys are stored."""
    core, scheduler, executor = make_core(lambda step: step.step_id == 2)
    core.add([first := make_request(0, range(6), 3)])
    ((ids, _),) = answers(run(core, scheduler)).values()
    core.add([second := make_request(1, [*range(6), *ids[:2], 1, 2], 5)])
    assert answers(run(core, scheduler)) == undisturbed([second])
    assert len(executor.failed) == 1
    assert undisturbed([first])[0][0] == ids


def test_no_end_of_memory_ends_the_run_with_advice() -> None:
    core, scheduler, executor = make_core(lambda step: True)
    core.add([make_request(0, range(50), 30)])
    with pytest.raises(CapacityError, match=r"a single token per step \(as planned\): lower gpu_memory_utilization"):
        run(core, scheduler)
    assert len(core.notes) == len(executor.failed) - 1
    assert scheduler.limits.max_num_batched_tokens == scheduler.limits.max_num_seqs == 1


@pytest.mark.parametrize("seed", seeds(40))
def test_random_failures_leave_the_answers_as_they_are(seed: int) -> None:
    """Whatever fails whenever: shared prefixes, chunks, stops, aborts, preemption, one step in flight or two."""
    rng = random.Random(seed)
    failures = rng.randint(1, 4)
    share = rng.choice([0.03, 0.1, 0.5])

    def fails(step: StepInput) -> bool:
        return len(executor.failed) < failures and rng.random() < share

    core, scheduler, executor = make_core(
        fails,
        num_blocks=rng.randint(24, 60),
        blocks_anew=(lambda: rng.randint(24, 60)) if rng.random() < 0.5 else None,
        max_in_flight=2 if rng.random() < 0.8 else 1,
        max_num_seqs=rng.randint(4, 12),
        max_num_batched_tokens=rng.randint(12, 64),
    )
    prefixes = [[rng.randrange(50) for _ in range(rng.randrange(30))] for _ in range(3)]
    requests = [
        make_request(
            number,
            rng.choice(prefixes) + [rng.randrange(50) for _ in range(rng.randint(1, 20))],
            rng.randint(1, 30),
            stop_ids=[100 + rng.randrange(50)] if rng.random() < 0.5 else [],
        )
        for number in range(60)
    ]
    expected = undisturbed(requests)
    aborted: set[int] = set()

    num_added = 0
    got: dict[int, RequestOutput] = {}
    while num_added < len(requests) or core.has_work:
        more = requests[num_added : num_added + rng.randrange(4)]
        core.add(more)
        num_added += len(more)
        if num_added and rng.random() < 0.03:
            aborted.add(victim := rng.randrange(num_added))
            core.abort([victim])
        for output in core.step():
            assert output.request_id not in got
            got[output.request_id] = output
        scheduler.check_integrity()
    assert scheduler.block_manager.num_used == 0
    assert len(core.notes) == len(executor.failed)
    assert got.keys() == expected.keys()
    for request_id, answer in answers(got).items():
        if answer[1] == "abort":
            assert request_id in aborted
            assert answer[0] == expected[request_id][0][: len(answer[0])]
        else:
            assert answer == expected[request_id]


# ---------------------------------------------------------------------- real processes


def collect(client: EngineClient, requests: list[Request]) -> dict[int, tuple[list[int], str | None]]:
    client.wait_ready()
    client.add(requests)
    done: dict[int, RequestOutput] = {}
    while len(done) < len(requests):
        done.update({o.request_id: o for o in client.poll(1.0)})
    return answers(done)


@pytest.mark.parametrize("tp", [1, 2])
def test_a_rank_goes_on_with_smaller_steps(monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    """A lone one as it is; two, of which only the last runs out, by being started anew."""
    monkeypatch.setenv("NVCLI_TEST_STEPS", "5,24,6")
    requests = [make_request(i, range(i, i + 30), 20) for i in range(30)]
    streaming = [msgspec.structs.replace(request, stream=True) for request in requests]
    client = EngineClient.start(
        engine_config(record_steps=True, tensor_parallel_size=tp), runner="fake_runners:OutOfMemoryRunner"
    )
    try:
        client.wait_ready()
        client.add(streaming)
        tokens: dict[int, list[int]] = {i: [] for i in range(30)}
        left = set(tokens)
        while left:
            for output in client.poll(1.0):
                tokens[output.request_id] += unpack(output.token_ids)
                left -= {output.request_id} if output.finish_reason else set()
        notes = client.take_notes()
        assert sum(record.num_sampled for record in client.take_steps()) >= 30 * 20
    finally:
        client.close()
    assert tokens == {request_id: answer[0] for request_id, answer in undisturbed(requests).items()}
    assert len(notes) == 4
    assert re.search(rf"\(rank {tp - 1}: none left for step 5, [^)]* say, of …\)", notes[0])  # cut between words
    assert all(("Restarting all ranks took" in note) == (tp > 1) for note in notes)


@pytest.mark.parametrize("tp", [1, 2])
def test_it_ends_where_it_cannot_go_on(monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    monkeypatch.setenv("NVCLI_TEST_STEPS", "3,1000")
    config = engine_config(tensor_parallel_size=tp, max_num_seqs=2, max_num_batched_tokens=4)
    client = EngineClient.start(config, runner="fake_runners:OutOfMemoryRunner")
    try:
        with pytest.raises(CapacityError, match=rf"a single token per step \(rank {tp - 1}: none left for step"):
            collect(client, [make_request(0, [1], 100)])
    finally:
        client.close()


def change_weights(client: EngineClient, message: WeightsChange) -> WeightsChanged:
    client.change_weights(message)
    while (changed := client.take_changed()) is None:
        assert client.poll(1.0) == []
    return changed


@pytest.mark.parametrize("tp", [1, 2])
def test_the_real_runner_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    """A forward pass that breaks off in the middle has changed lengths and keys of its slots; no answer shows it.

    Of two ranks the other waits in the layer's sum for ever."""
    monkeypatch.setenv("NVCLI_TEST_STEPS", "100,130,12")
    rng = random.Random(3)
    prompts = [[rng.randrange(2, 97) for _ in range(rng.randint(1, 60))] for _ in range(12)]
    first, second = write_tiny_qwen3(tmp_path / "first"), write_tiny_qwen3(tmp_path / "second", seed=1)
    client = EngineClient.start(
        engine_config(model_path=first, tensor_parallel_size=tp),
        runner="fake_runners:create_model_runner_out_of_memory",
    )
    try:
        client.wait_ready()
        for message in (LoadWeights(str(second)), Sleep(2), Wake()):  # ranks started anew load the second again
            assert change_weights(client, message) == WeightsChanged()
        whole = collect(client, [make_request(i, prompt, 24) for i, prompt in enumerate(prompts)])
        assert client.take_notes() == []
        client.forget_prefixes()
        disturbed = collect(client, [make_request(100 + i, prompt, 24) for i, prompt in enumerate(prompts)])
        notes = client.take_notes()
    finally:
        client.close()
    assert disturbed == {100 + request_id: answer for request_id, answer in whole.items()}
    assert notes
    assert f"(rank {tp - 1}: CUDA out of memory. Tried to allocate 2.00 GiB.)" in notes[0]


def test_too_little_memory_at_the_start_is_a_matter_of_capacity(tmp_path: Path) -> None:
    """Not of an error that nobody expected: the plan held, until another program took what was free."""
    client = EngineClient.start(
        engine_config(model_path=write_tiny_qwen3(tmp_path / "model")),
        runner="fake_runners:create_model_runner_without_room",
    )
    try:
        with pytest.raises(CapacityError, match=r"out of memory at kv cache \(CUDA out of memory\. Tried to allocate"):
            client.wait_ready()
    finally:
        client.close()
