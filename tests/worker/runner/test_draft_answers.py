"""Answers with drafts are those without: every way to choose a token, with little room, by one rank and by several."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import generate, generate_here
from launched_graphs import LaunchedGraphs
from mixed_requests import SAMPLINGS, assert_equal, mixed_requests, samples_of

from checkpoints import write_tiny_model
from combinations import full
from constrained_requests import END_IDS, load_vocabulary
from family_shapes import SHAPES
from nvcli.attention.forward_batch import BatchShape
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.structured import Constraint, Structured
from nvcli.demo import demo_path
from nvcli.engine.request import Request, RequestOutput, ThoughtLimit
from nvcli.worker.runner.model_runner import ModelRunner
from one_rank import make_core, make_runner, make_scheduler, run_core
from rank_in_process import draw_widths
from requests_factory import make_request
from schema_maker import make_schemas

DRAFTS: dict[str, Any] = {"draft_policy": "always", "max_draft_tokens": 5}
UNEVEN: dict[str, Any] = {**DRAFTS, "max_num_seqs": 28, "max_num_batched_tokens": 64}
"""Steps whose tokens are too few for as many drafts in each row: they go to the rows where they are likelier to be
right."""
STRUCTURED_STEPS: dict[str, Any] = {"max_num_seqs": 24, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return mixed_requests(32)


@pytest.fixture(scope="module")
def structured() -> list[Request]:
    """Rows under schemas of many kinds, and one choice; their ids are not those of `requests`."""
    vocabulary = load_vocabulary()
    wanted = [Structured(json_schema=schema) for schema in make_schemas(23, seed=1)]
    samplings = [*SAMPLINGS[:4], SamplingParams(temperature=1.0, presence_penalty=0.5), SAMPLINGS[6]]
    return [
        make_request(
            5 + 10 * number,
            [20 + number, 30],
            [70, 33][number % 2],
            stop_ids=END_IDS,
            sampling=samplings[number % len(samplings)],
            row=number,
            constraint=Constraint(grammar=vocabulary.compile(each), end_ids=END_IDS),
        )
        for number, each in enumerate([Structured(choice=["spoon of the kitchen", "fork"]), *wanted])
    ]


@pytest.fixture(scope="module")
def structured_answers(structured: list[Request]) -> Any:
    """Their answers, and the statistics, where every token has a step of its own."""
    return run_here(structured, **STRUCTURED_STEPS)


def run_here(
    requests: list[Request],
    num_blocks: int | None = None,
    *,
    draws: bool = False,
    prepare: Callable[[ModelRunner], object] = lambda runner: None,
    **config: Any,
) -> Any:
    """The answers of one rank in this process, and its statistics. `draws`: each row has a number of tokens drawn anew
    in each step. `prepare`: what is done to the rank before."""
    own = {"max_model_len": 160, "block_size": 4, "kv_cache_memory": 64 << 20}
    runner = make_runner(demo_path(), "cpu", **{**own, **config})
    scheduler = make_scheduler(runner, num_blocks)
    prepare(runner)
    if draws:
        draw_widths(scheduler, random.Random(1))
    core = make_core(runner, scheduler)
    return run_core(core, samples_of(requests)), core.scheduler.stats


@pytest.fixture(scope="module")
def expected(requests: list[Request]) -> dict[int, RequestOutput]:
    outputs, stats = run_here(requests)
    assert stats.drafted_tokens == 0
    return dict(outputs)


@pytest.mark.parametrize(
    ("config", "num_blocks"),
    [
        full(({}, None), in_parts=True),
        ({"max_num_seqs": 16, "max_num_batched_tokens": 40, "max_draft_tokens": 15}, None),
        ({"max_num_seqs": 7, "max_num_batched_tokens": 9, "max_draft_tokens": 2, "overlap_steps": False}, None),
        ({"max_num_seqs": 12, "block_size": 2, "draws": True}, 110),
        full(({"max_num_seqs": 6, "enable_prefix_caching": False, "overlap_steps": False}, 60), in_parts=True),
        ({"max_draft_tokens": 1, "draft_policy": "auto"}, None),
    ],
    ids=["plain", "wide", "narrow steps, one at a time", "few blocks", "one step at a time", "auto"],
)
def test_answers_are_those_without_drafts(
    requests: list[Request], expected: dict[int, RequestOutput], config: dict[str, Any], num_blocks: int | None
) -> None:
    found, stats = run_here(requests, num_blocks, **{**DRAFTS, **config})
    assert_equal(found, expected)
    if config.get("draft_policy") != "auto":
        assert stats.accepted_tokens > 100
        assert stats.accepted[1] > 0, "other answers"
    assert stats.forced_tokens > 1
    if num_blocks is not None:
        assert stats.num_preemptions > 0


def test_rows_of_different_widths_are_padded(requests: list[Request], expected: dict[int, RequestOutput]) -> None:
    """Graphs hold more rows and tokens than a step has; no row of padding is wider than the rows of the graph."""
    shapes = [
        BatchShape(decode_rows=rows, tokens_per_row=8, uneven_tokens=tokens)
        for rows, tokens in ((16, 40), (16, 80), (32, 90), (32, 150))
    ]
    replayed: list[BatchShape] = []

    def use_graphs(runner: ModelRunner) -> None:
        graphs = LaunchedGraphs(shapes, runner.steps)
        graphs.captured += shapes
        graphs.replayed = replayed
        runner.steps.graphs = graphs

    settings = {**DRAFTS, "max_num_seqs": 24, "max_draft_tokens": 7, "max_num_batched_tokens": 200}
    found, _ = run_here(requests, draws=True, prepare=use_graphs, **settings)
    assert_equal(found, expected)
    assert len(set(replayed)) >= 3
    assert {shape.decode_rows for shape in replayed} == {16, 32}


@pytest.mark.gpu
def test_rows_of_different_widths_in_graphs() -> None:
    """Steps of so few tokens that not every row can have as many drafts."""
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = [make_request(i, [20 + i, 30, 40 + i % 3], 60, sampling=SAMPLINGS[i % 3], row=i) for i in range(30)]
    settings: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 96, "dtype": "float32"}
    expected = run_core(make_core(make_runner(demo_path(), **settings)), rows)
    runner = make_runner(demo_path(), **settings, **DRAFTS)
    assert_equal(run_core(make_core(runner), rows), expected)
    assert runner.steps.graphs is not None
    assert any(shape.uneven_tokens for shape in runner.steps.graphs._graphs)


def test_ranks_that_share_a_model_take_the_same_drafts(
    requests: list[Request], expected: dict[int, RequestOutput], structured: list[Request], structured_answers: Any
) -> None:
    fewer = [*samples_of(requests[:8]), *structured[:4]]
    found, stats = generate(demo_path(), fewer, tensor_parallel_size=2, **UNEVEN)
    all_expected = expected | structured_answers[0]
    assert_equal(found, {request.request_id: all_expected[request.request_id] for request in fewer})
    assert stats.accepted_tokens > 30
    assert stats.forced_tokens > 5


def test_tokens_that_grammars_force_come_several_a_step(structured: list[Request], structured_answers: Any) -> None:
    """With schemas of many kinds. A row that asks for log-probabilities takes its tokens one at a time."""
    expected, without = structured_answers
    found, stats = run_here(structured, **STRUCTURED_STEPS, max_draft_tokens=1)
    assert_equal(found, expected)
    assert without.forced_tokens == 0
    assert stats.forced_tokens > 80
    assert stats.generated_tokens == without.generated_tokens
    assert stats.decode_rows < without.decode_rows - stats.forced_tokens // 3  # fewer if masks are late


def test_forced_tokens_of_one_row_in_many_come_one_at_a_time() -> None:
    """A chunk would cost all rows more than it saves, unless drafts are to be taken always."""
    constraint = Constraint(
        grammar=load_vocabulary().compile(Structured(regex="([0-9] to [0-9] or ){3}")), end_ids=END_IDS
    )
    forced = make_request(0, [20, 30], 30, stop_ids=END_IDS, constraint=constraint)
    plain = [make_request(number, [20 + number, 31], 30, row=number) for number in range(1, 40)]
    answers = []
    for policy, are_taken in (("auto", False), ("always", True)):
        config = {"max_num_seqs": 40, "max_num_batched_tokens": 80, "max_draft_tokens": 1, "draft_policy": policy}
        found, stats = run_here([forced, *plain], **config)
        answers.append(found)
        assert (stats.forced_tokens > 0) == are_taken
    assert_equal(*answers)


def test_runs_that_cannot_take_tokens_back_draft_nothing_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvcli.attention.torch_backend.TorchBackend.needs_exact_lens", True)
    runner = make_runner(demo_path(), "cpu", kv_cache_memory=1 << 20, **DRAFTS)
    assert runner.ready.max_draft_step_tokens == 0
    (note,) = [note for note in runner.ready.notes if "draft" in note]
    assert note.startswith("note: no tokens are drafted (`speculation`): the attention backend torch needs")
    assert make_scheduler(runner).limits.drafting.most_tokens == 1


def test_stages_take_the_same_drafts(
    requests: list[Request], expected: dict[int, RequestOutput], structured: list[Request], structured_answers: Any
) -> None:
    fewer = [*samples_of(requests[:8]), *structured[:4]]
    found, stats = generate(demo_path(), fewer, pipeline_parallel_size=2, **UNEVEN)
    all_expected = expected | structured_answers[0]
    assert_equal(found, {request.request_id: all_expected[request.request_id] for request in fewer})
    assert stats.accepted_tokens > 50
    assert stats.forced_tokens > 5


def few_tokens_requests() -> list[Request]:
    """Rows whose tokens are a few, so that random models give what was there before."""
    rng = random.Random(3)
    few = list(range(30, 34))
    samplings = [
        SamplingParams(temperature=0, allowed_token_ids=few, repetition_penalty=1.2),
        SamplingParams(temperature=0.5, allowed_token_ids=few[:2], logprobs=1),
        SamplingParams(temperature=1, allowed_token_ids=few[:3], top_k=2, min_tokens=8),
    ]
    common = [rng.choice(few) for _ in range(21)]
    made = []
    for number in range(18):
        prompt = common[: rng.choice([0, 12, 21])] + [rng.randrange(2, 97) for _ in range(rng.randrange(1, 12))]
        fields: dict[str, Any] = {"sampling": samplings[number % 3], "n": 1 + (number % 9 == 2)}
        if number % 4 == 1:
            fields["stop_ids"] = [few[0]]
        if number % 5 == 4:
            fields["thought_limit"] = ThoughtLimit(
                budget=rng.randrange(1, 20), start_ids=[], ends=[[50]], forced_ids=[50, 40, 41, 42, 43]
            )
        made.append(make_request(10 * number, prompt, rng.choice([2, 20, 60]), row=number, **fields))
    return made


TWO_LAYERS = {
    "qwen 3.5": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "bamba": {"num_hidden_layers": 2, "attn_layer_indices": [1]},
    "jamba": {"num_hidden_layers": 2},
    "kimi linear": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "minimax text 01": {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "recurrentgemma": {"num_hidden_layers": 2, "block_types": ["recurrent", "attention"]},
}
"""Families with recurrent states."""


@pytest.fixture(scope="module")
def with_states(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[int, RequestOutput]]]:
    """Checkpoints with recurrent states, and their answers without drafts."""

    @cache
    def answered(name: str) -> tuple[Path, dict[int, RequestOutput]]:
        family, shape = SHAPES[name]
        folder = tmp_path_factory.mktemp("models") / "states"
        path = write_tiny_model(folder, family, **{**shape, **TWO_LAYERS[name]})
        return path, generate_here(path, samples_of(few_tokens_requests()), max_num_seqs=64)[0]

    return answered


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("qwen 3.5", {"max_num_seqs": 4, "max_num_batched_tokens": 25}),
        ("qwen 3.5", {"max_num_seqs": 12, "num_kv_tokens": 200, "max_draft_tokens": 2}),
        ("qwen 3.5", {"max_num_seqs": 64, "max_draft_tokens": 15, "enable_prefix_caching": False}),
        ("bamba", {"max_num_seqs": 4, "max_num_batched_tokens": 25}),
        ("jamba", {"max_num_seqs": 4, "max_num_batched_tokens": 25}),
        ("kimi linear", {"max_num_seqs": 4, "max_num_batched_tokens": 25}),
        ("minimax text 01", {"max_num_seqs": 4, "max_num_batched_tokens": 25}),
    ],
    ids=["chunked, prefix hits", "preempted", "wide", "mamba", "mamba 1", "kimi linear", "lightning"],
)
def test_recurrent_states_take_in_only_what_is_right(
    with_states: Callable[[str], tuple[Path, dict[int, RequestOutput]]], name: str, config: dict[str, Any]
) -> None:
    path, expected = with_states(name)
    found, stats = generate_here(path, samples_of(few_tokens_requests()), **{**DRAFTS, **config})
    assert_equal(found, expected)
    assert stats.accepted_tokens > 50
    assert (stats.num_preemptions > 0) == ("num_kv_tokens" in config)
    assert (stats.cached_tokens > 0) == config.get("enable_prefix_caching", True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TWO_LAYERS)
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_recurrent_states_on_a_gpu(
    with_states: Callable[[str], tuple[Path, dict[int, RequestOutput]]], name: str, enforce_eager: bool
) -> None:
    path, expected = with_states(name)
    torch.backends.cuda.matmul.allow_tf32 = False
    settings = {"block_size": 16, "dtype": "float32", "enforce_eager": enforce_eager}
    core = make_core(make_runner(path, **settings, **DRAFTS))
    assert_equal(run_core(core, samples_of(few_tokens_requests())), expected)
    assert core.scheduler.stats.accepted_tokens > 50
