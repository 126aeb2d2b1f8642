"""Steps that run out of memory: nothing of them counts, smaller ones follow, and the answers are the same. Random
failures are in `test_random_engine.py`."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from checkpoints import write_tiny_qwen3
from fake_runners import BLOCK_SIZE, engine_config
from nvcli.core.messages import StepInput, unpack
from nvcli.core.weight_changes import LoadWeights, Sleep, Wake, WeightsChange, WeightsChanged
from nvcli.engine.client import EngineClient
from nvcli.engine.core import EngineCore
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.request import Request, RequestOutput
from nvcli.engine.scheduler import Scheduler
from nvcli.errors import CapacityError
from rank_in_process import RankInProcess, run
from rank_in_process import make_core as make_core_of
from requests_factory import answers_of, make_request

pytestmark = pytest.mark.usefixtures("warm_engines")


def make_core(
    fails: Callable[[StepInput], bool],
    *,
    num_blocks: int = 64,
    blocks_anew: Callable[[], int] | None = None,
    force: Callable[[], int] | None = None,
    **limits: int,
) -> tuple[EngineCore, Scheduler, RankInProcess]:
    values = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "max_model_len": 256, "block_size": BLOCK_SIZE}
    scheduler_limits = SchedulerLimits(**{**values, **limits})
    rank = RankInProcess(scheduler_limits, fails=fails, blocks_anew=blocks_anew, force=force)
    return *make_core_of(scheduler_limits, rank, num_blocks=num_blocks), rank


def answers(done: dict[int, RequestOutput]) -> dict[int, tuple[list[int], str | None]]:
    return {request_id: (unpack(o.token_ids).tolist(), o.finish_reason) for request_id, o in done.items()}


def undisturbed(requests: list[Request]) -> dict[int, tuple[list[int], str | None]]:
    core, scheduler, _ = make_core(lambda step: False, num_blocks=1000, max_num_batched_tokens=1000)
    core.scheduler.add(requests)
    return answers(run(core, scheduler))


def test_batches_are_halved_until_they_fit() -> None:
    requests = [make_request(i, range(i, i + 30), 20) for i in range(20)]
    core, scheduler, rank = make_core(lambda step: step.total_tokens > 9, max_num_batched_tokens=40)
    core.scheduler.add(requests)
    assert answers(run(core, scheduler)) == undisturbed(requests)
    limits = scheduler.limits
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (8, 8)  # 40, 20, 10, 8
    assert len(rank.failed) == len(core.notes) == 3
    assert "max_num_batched_tokens 20 and max_num_seqs 8" in core.take_notes()[0]
    assert core.take_notes() == []
    assert core.scheduler.stats.num_preemptions == 0


def test_fewer_requests_run_where_smaller_batches_are_not_enough() -> None:
    requests = [make_request(i, range(5), 20) for i in range(20)]
    core, scheduler, rank = make_core(lambda step: step.num_rows > 2)
    core.scheduler.add(requests)
    assert answers(run(core, scheduler)) == undisturbed(requests)
    assert scheduler.limits.max_num_seqs == 2
    assert max(step.num_rows for step in rank.ran) == 2


def test_what_was_computed_is_found_again() -> None:
    """Blocks of steps that ran are reused; a long prompt is not computed twice for one failed decode step."""
    core, scheduler, rank = make_core(lambda step: step.step_id == 20, max_num_batched_tokens=64)
    core.scheduler.add([make_request(0, range(50), 30)])
    run(core, scheduler)
    assert len(rank.failed) == 1
    assert sum(step.total_tokens for step in rank.ran) < 50 + 30 + 2 * BLOCK_SIZE


def test_nothing_is_found_again_in_ranks_that_were_started_anew() -> None:
    """Their blocks are empty, and there may be fewer of them."""
    core, scheduler, rank = make_core(
        lambda step: step.step_id == 10, num_blocks=64, blocks_anew=lambda: 20, max_num_batched_tokens=64
    )
    core.scheduler.add(requests := [make_request(i, [*range(20), i], 20) for i in range(6)])
    assert answers(run(core, scheduler)) == undisturbed(requests)
    assert len(rank.failed) == 1
    assert core.scheduler.stats.num_blocks == 20
    assert re.search(r"max_num_seqs 8\. Restarting all ranks took 0\.0 s", core.take_notes()[0])


def test_limits_are_lowered_until_ranks_can_be_started_anew() -> None:
    core, scheduler, rank = make_core(
        lambda step: step.step_id == 10, blocks_anew=lambda: 20, max_num_batched_tokens=64
    )
    rank.num_refusals = 3
    core.scheduler.add(requests := [make_request(i, [*range(20), i], 20) for i in range(6)])
    assert answers(run(core, scheduler)) == undisturbed(requests)
    (note,) = core.take_notes()
    assert "from now on with max_num_batched_tokens 4 and max_num_seqs 4" in note  # 32, 16, 8


def test_limits_that_cannot_be_lowered_any_further_end_the_run() -> None:
    core, scheduler, rank = make_core(lambda step: step.step_id == 3, blocks_anew=lambda: 20)
    rank.num_refusals = 100
    core.scheduler.add([make_request(0, range(5), 20)])
    with pytest.raises(CapacityError, match=r"a single token per step \(as planned\)"):
        run(core, scheduler)


def test_prompts_that_are_computed_again_count_once() -> None:
    core, scheduler, rank = make_core(lambda step: step.step_id in (1, 7, 9), blocks_anew=lambda: 64)
    core.scheduler.add([make_request(i, range(i, i + 30), 5) for i in range(4)])
    run(core, scheduler)
    assert len(rank.failed) == 3
    assert core.scheduler.stats.prompt_tokens == 4 * 30


def test_block_that_the_last_step_was_to_fill_is_not_reused() -> None:
    """It is registered when its last token is known, one step before that token's keys are stored."""
    core, scheduler, rank = make_core(lambda step: step.step_id == 2)
    core.scheduler.add([first := make_request(0, range(6), 3)])
    ((ids, _),) = answers(run(core, scheduler)).values()
    core.scheduler.add([second := make_request(1, [*range(6), *ids[:2], 1, 2], 5)])
    assert answers(run(core, scheduler)) == undisturbed([second])
    assert len(rank.failed) == 1
    assert undisturbed([first])[0][0] == ids


@pytest.mark.parametrize("failing", range(1, 5))
def test_tokens_that_a_failed_step_was_to_give_are_not_awaited(failing: int) -> None:
    """Requests had taken them already, because they were forced."""
    core, scheduler, rank = make_core(lambda step: step.step_id == failing, force=lambda: 3)
    core.scheduler.add(requests := [make_request(i, range(i, i + 5), 12) for i in range(3)])
    assert answers(run(core, scheduler)) == undisturbed(requests)
    assert len(rank.failed) == 1
    assert core.scheduler.stats.forced_tokens > 0


def test_no_end_of_memory_ends_the_run_with_advice() -> None:
    core, scheduler, rank = make_core(lambda step: True)
    core.scheduler.add([make_request(0, range(50), 30)])
    with pytest.raises(CapacityError, match=r"a single token per step \(as planned\): lower gpu_memory_utilization"):
        run(core, scheduler)
    assert len(core.notes) == len(rank.failed) - 1
    assert scheduler.limits.max_num_batched_tokens == scheduler.limits.max_num_seqs == 1


# ---------------------------------------------------------------------- real processes


def collect(client: EngineClient, requests: list[Request]) -> dict[int, tuple[list[int], str | None]]:
    client.wait_ready()
    return answers(answers_of(client, requests))


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
