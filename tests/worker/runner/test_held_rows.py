"""Rows whose masks are late are left out of steps: the others go on, and every answer is what it is without delays."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from late_masks import use_late_masks

from combinations import full
from constrained_requests import END_IDS, load_vocabulary, make_requests
from fake_runners import engine_config
from late_worker import LateMasks
from nvcli.core.grammars import Vocabulary
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.structured import Constraint, Structured
from nvcli.demo import demo_path
from nvcli.engine.client import EngineClient
from nvcli.engine.core import EngineCore
from nvcli.engine.request import Request, RequestOutput
from nvcli.engine.scheduler import Scheduler
from nvcli.errors import WorkerError
from one_rank import make_core as make_core_of
from one_rank import make_runner, make_scheduler
from requests_factory import answers_of, make_request
from warm_process import engines_are_copies

CONFIG: dict[str, Any] = {"max_model_len": 400, "block_size": 4, "kv_cache_memory": 64 << 20, "max_num_seqs": 40}
Outputs = dict[int, RequestOutput]


def make_core(*, num_blocks: int | None = None, **config: Any) -> tuple[EngineCore, Scheduler]:
    runner = make_runner(demo_path(), "cpu", **{**CONFIG, **config})
    scheduler = make_scheduler(runner, num_blocks)
    return make_core_of(runner, scheduler), scheduler


def run(core: EngineCore, scheduler: Scheduler, *, max_steps: int = 20_000) -> Outputs:
    outputs: Outputs = {}
    for _ in range(max_steps):
        if not core.has_work:
            break
        outputs.update({output.request_id: output for output in core.step()})
        scheduler.check_integrity()
    return outputs


def answer(requests: list[Request], **config: Any) -> tuple[Outputs, Scheduler]:
    core, scheduler = make_core(**config)
    core.scheduler.add(requests)
    return run(core, scheduler), scheduler


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return load_vocabulary()


@pytest.fixture(scope="module")
def requests(vocabulary: Vocabulary) -> list[Request]:
    return make_requests(vocabulary)


@pytest.fixture(scope="module")
def answers(requests: list[Request]) -> Outputs:
    return answer(requests)[0]


@pytest.mark.parametrize(
    ("circumstance", "config"),
    [
        full(("together", {}), in_parts=True),
        full(("in turn", {"max_num_seqs": 5}), in_parts=True),
        ("chunked", {"max_num_seqs": 7, "max_num_batched_tokens": 9}),
        ("preempted", {"num_blocks": 30}),
        ("one step in flight", {"overlap_steps": False}),
        ("with forced tokens", {"max_draft_tokens": 1}),
    ],
)
def test_answers_are_the_same_whichever_masks_are_late(
    requests: list[Request],
    answers: Outputs,
    circumstance: str,
    config: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their tokens, log-probabilities, reasons and usage; a late row counts nowhere."""
    late = use_late_masks(monkeypatch, LateMasks(share=0.3, seconds=0.04))
    found, scheduler = answer(requests, **config)
    assert found.keys() == answers.keys()
    for number, output in found.items():
        expected = answers[number]
        assert (output.token_ids, output.finish_reason) == (expected.token_ids, expected.finish_reason)
        assert_same_logprobs(output, expected)
    assert late.num_held > 4
    assert scheduler.stats.generated_tokens == sum(len(output.token_ids) // 4 for output in answers.values())
    assert (scheduler.stats.num_preemptions > 0) == (circumstance == "preempted")
    assert (scheduler.stats.forced_tokens > 0) == (circumstance == "with forced tokens")


def test_all_ranks_leave_the_same_rows_out(requests: list[Request], answers: Outputs) -> None:
    """Two ranks with masked shards of the vocabulary; steps sample more rows than tokens come of."""
    some = requests[:6]
    config = engine_config(
        model_path=demo_path(), tensor_parallel_size=2, max_num_batched_tokens=512, record_steps=True, **CONFIG
    )
    with engines_are_copies():
        client = EngineClient.start(config, runner="late_runner:create")
    try:
        client.wait_ready()
        done = answers_of(client, some)
        records = client.take_steps()
        pids = descendants_of(client.pid)
    finally:
        client.close()
    assert len(pids) > 2 + 3
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "processes are left"
    assert {number: output.token_ids for number, output in done.items()} == {
        request.request_id: answers[request.request_id].token_ids for request in some
    }
    num_tokens = sum(len(output.token_ids) // 4 for output in done.values())
    # What is sampled behind the end of an answer is two tokens at the most.
    assert sum(record.num_sampled for record in records) > num_tokens + 2 * len(some)


def assert_same_logprobs(found: RequestOutput, expected: RequestOutput) -> None:
    """Those of the CPU depend on the batch in their last bits."""
    assert len(found.logprobs) == len(expected.logprobs)
    for one, other in zip(found.logprobs, expected.logprobs, strict=True):
        assert one.top_ids == other.top_ids
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def make_pair(vocabulary: Vocabulary, **fields: Any) -> list[Request]:
    """Two answers under different grammars, told apart by their least length: 0 and 1."""
    return [
        make_request(
            number,
            [5 + number, 6, 7],
            30,
            stop_ids=END_IDS,
            sampling=SamplingParams(temperature=1.0, min_tokens=number),
            row=number,
            constraint=Constraint(grammar=vocabulary.compile(Structured(regex=regex)), end_ids=END_IDS),
            **fields,
        )
        for number, regex in enumerate(("[a-z]{30,50}", "[0-9]{30,50}"))
    ]


def test_others_go_on_while_a_mask_is_made(
    vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 20 steps the other answer gets a token each, but for those in flight, and the first one gets none."""
    requests = make_pair(vocabulary)
    expected, _ = answer(requests)
    gate = tmp_path / "gate"
    late = use_late_masks(monkeypatch, LateMasks(gated="a-z", gate=str(gate)))
    core, scheduler = make_core()
    core.scheduler.add(requests)
    for _ in range(20):
        core.step()
        scheduler.check_integrity()
    assert core.scheduler.stats.generated_tokens == 19
    assert late.num_held == late.num_given == 19
    gate.touch()
    outputs = run(core, scheduler)
    assert token_ids_of(outputs) == token_ids_of(expected)


def token_ids_of(outputs: Outputs) -> dict[int, bytes]:
    return {number: output.token_ids for number, output in outputs.items()}


def test_a_step_waits_where_no_row_would_be_left(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone, an answer has as many steps as without delays."""
    request = make_pair(vocabulary)[0]
    late = use_late_masks(monkeypatch, LateMasks(share=1.0, seconds=0.005))
    answer([request])
    assert late.num_held == 0


def test_a_slot_is_taken_again_while_a_mask_of_its_last_answer_is_made(
    vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first answer is aborted while its mask is in work. The next one has its row of the masks."""
    first, second = make_pair(vocabulary)
    constraint = Constraint(grammar=vocabulary.compile(Structured(regex="[0-9a-f]{30,50}")), end_ids=END_IDS)
    third = msgspec.structs.replace(first, request_id=2, constraint=constraint, row=2)
    expected, _ = answer([second, third])
    gate = tmp_path / "gate"
    late = use_late_masks(monkeypatch, LateMasks(gated="a-z", gate=str(gate)))
    core, scheduler = make_core(max_num_seqs=2)
    core.scheduler.add([first, second])
    for _ in range(4):
        core.step()
    core.scheduler.abort([0])
    core.scheduler.add([third])
    threading.Timer(0.2, gate.touch).start()
    found = run(core, scheduler)
    assert late.num_held > 3
    del found[0]
    assert token_ids_of(found) == token_ids_of(expected)


@pytest.mark.parametrize(
    ("circumstance", "config"),
    [
        full(("together", {}), in_parts=True),
        ("preempted", {"num_blocks": 30}),
        full(("one step in flight", {"overlap_steps": False}), in_parts=True),
        ("with forced tokens", {"max_draft_tokens": 1}),
    ],
)
def test_answers_are_the_same_whichever_processes_are_killed(
    requests: list[Request], answers: Outputs, circumstance: str, config: dict[str, Any]
) -> None:
    """They begin anew, behind a free part too, with the tokens that they have. No answer fails.

    The one that was started first is killed: one that has had no time to make a mask ends the run the third time.
    """
    core, scheduler = make_core(**config)
    core.scheduler.add(requests)
    rng, outputs, num_killed = random.Random(5), Outputs(), 0
    while core.has_work:
        outputs.update({output.request_id: output for output in core.step()})
        scheduler.check_integrity()
        workers = core._executor._runner.constraints._workers  # type: ignore[attr-defined]
        if (there := children_of(workers._process.pid)) and rng.random() < 0.2 and num_killed < 8:
            os.kill(min(there), signal.SIGKILL)
            num_killed += 1
    assert num_killed == 8
    assert token_ids_of(outputs) == token_ids_of(answers)
    assert {number: output.finish_reason for number, output in outputs.items()} == {
        number: output.finish_reason for number, output in answers.items()
    }


def test_an_answer_that_kills_its_process_fails_alone(
    requests: list[Request], answers: Outputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the middle of it: the others go on, those of its process and of its grammar that end before too."""
    use_late_masks(monkeypatch, LateMasks(deadly="[a-f]{4,9}", deadly_tokens=2), num_workers=2)
    core, scheduler = make_core()
    core.scheduler.add(requests)
    found = run(core, scheduler)
    failed = {number for number, output in found.items() if output.finish_reason == "error"}
    assert {found[number].error_type for number in failed} == {"structured_too_complex"}
    guilty = {
        request.request_id
        for request in requests
        if request.constraint is not None
        and "[a-f]{4,9}" in request.constraint.grammar
        and len(answers[request.request_id].token_ids) // 4 > 2
    }
    assert failed == guilty
    assert failed
    assert {number: found[number].token_ids for number in found.keys() - failed} == {
        number: answers[number].token_ids for number in answers.keys() - failed
    }
    (note,) = core.take_notes()
    assert "was killed by SIGSEGV" in note


def test_a_process_that_is_killed_once_at_an_answer_costs_nothing(
    requests: list[Request], answers: Outputs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    late = LateMasks(deadly="[a-f]{4,9}", deadly_tokens=3, deadly_once=str(tmp_path / "once"))
    use_late_masks(monkeypatch, late, num_workers=2)
    assert token_ids_of(answer(requests)[0]) == token_ids_of(answers)
    assert (tmp_path / "once").exists()


def test_exceptions_of_the_processes_cost_their_own_answers(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where they go on for answers that have failed already, it is not the answers that are at fault."""
    use_late_masks(monkeypatch, LateMasks(deadly="a-z", deadly_raises=True), num_workers=2)
    core, scheduler = make_core()
    core.scheduler.add(make_pair(vocabulary))
    found = run(core, scheduler)
    assert [found[number].error_type for number in range(2)] == ["structured_too_complex", ""]
    assert "failed: MemoryError: no room" in core.take_notes()[0]
    use_late_masks(monkeypatch, LateMasks(fails=True), num_workers=2)
    with pytest.raises(WorkerError, match="failed: RuntimeError: no mask, 3 times in a row"):
        answer(make_pair(vocabulary))


def children_of(pid: int) -> list[int]:
    return [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]


def descendants_of(pid: int) -> list[int]:
    children = children_of(pid)
    return children + [each for child in children for each in descendants_of(child)]


def test_nothing_is_left_of_the_processes(vocabulary: Vocabulary) -> None:
    """They end with what they make masks for."""
    core, _ = make_core()
    core.scheduler.add(make_pair(vocabulary))
    core.step()
    first = core._executor._runner.constraints._workers._process.pid  # type: ignore[attr-defined]
    pids = [first, *children_of(first)]
    assert len(pids) > 2
    del core
    gc.collect()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_rows_wait_where_they_cannot_be_computed_again(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind other stages, with recurrent states, and by a backend that plans with exact lengths."""
    late = use_late_masks(monkeypatch, LateMasks(share=0.5, seconds=0.005))
    runner = make_runner(demo_path(), "cpu", **CONFIG)
    assert runner._may_hold_rows()
    config = runner.config
    runner.config = msgspec.structs.replace(config, pipeline_parallel_size=2)
    assert not runner._may_hold_rows()
    runner.config = config
    attention = runner._attention
    groups = (*attention.kv_groups, msgspec.structs.replace(attention.kv_groups[0], is_state=True))
    runner._attention = replace(attention, kv_groups=groups)
    assert not runner._may_hold_rows()
    runner._attention = attention
    monkeypatch.setattr(runner.backend, "needs_exact_lens", True)
    assert not runner._may_hold_rows()
    runner._make_slots()
    runner._make_steps()
    runner._allocate_kv_cache()
    scheduler = make_scheduler(runner)
    core = make_core_of(runner, scheduler)
    core.scheduler.add(make_pair(vocabulary))
    run(core, scheduler)
    assert late.num_held == 0
