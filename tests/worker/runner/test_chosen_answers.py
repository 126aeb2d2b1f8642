"""Models whose tokens attend to a choice of keys (DSA): answers are transformers' however steps are made, also where
chunks that see few keys are attended to projected latents; and runs in which no row has more keys than are chosen have
no indexers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from generation import assert_greedy as assert_all_greedy
from generation import config_of, requests, tokens_of

from checkpoints import greedy_answer, reference_logits_of, write_tiny_model
from combinations import full
from expert_shapes import EXPERT_SHAPES
from nvcli.attention import selection
from nvcli.core.config import RunConfig
from nvcli.engine.client import EngineClient
from nvcli.errors import ConfigError
from nvcli.job.run.engine_settings import load_checkpoint, resolve_engine_config
from nvcli.models.config import load_model_config
from nvcli.models.kv_groups import block_bytes, kv_groups
from one_rank import make_runner, make_scheduler, run_requests
from projecting_runner import WrittenOut
from requests_factory import answers_of, make_request

PROMPTS = [[(7 * i * i + 3 * i + length) % 95 + 2 for i in range(length)] for length in (40, 39, 38, 9, 75)]
PROMPTS += [[*PROMPTS[-1][:50], 5, 6], PROMPTS[0]]


@pytest.fixture(scope="module", params=["deepseek v3.2", "glm 5, shared choices"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = EXPERT_SHAPES[request.param]
    return write_tiny_model(tmp_path_factory.mktemp("dsa") / "model", family, **overrides)


def assert_greedy(path: Path, prompt: list[int], answer: list[int], max_tokens: int) -> None:
    logits = reference_logits_of(path, [[*prompt, *answer]])[0]
    assert answer == greedy_answer(logits, len(prompt), max_tokens, None)


def test_answers_in_chunks_with_prefix_hits(checkpoint: Path) -> None:
    runner = make_runner(checkpoint, "cpu", max_model_len=96, max_num_batched_tokens=32, block_size=4)
    scheduler = make_scheduler(runner, 26 * len(runner.ready.kv_groups))
    requests = [make_request(i, prompt, 12, stop_ids=[]) for i, prompt in enumerate(PROMPTS)]
    answers = run_requests(runner, requests, scheduler)
    assert scheduler.stats.cached_tokens > 0
    for i, prompt in enumerate(PROMPTS):
        assert_greedy(checkpoint, prompt, answers[i], 12)


@pytest.fixture(scope="module", params=["hunyuan v4", "glm 5, shared choices"])
def longer_choice(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that chooses as many keys as some prompts have."""
    family, overrides = EXPERT_SHAPES[request.param]
    return write_tiny_model(tmp_path_factory.mktemp("dsa") / "model", family, **overrides | {"index_topk": 40})


def test_chunks_with_few_keys_attend_to_projected_latents(longer_choice: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In some steps, beside decode rows with more keys; all answers are those without them."""
    monkeypatch.setitem(selection.BACKENDS, "projecting", "projecting_runner:ProjectingBackend")
    answers = []
    for backend in ("torch", "projecting"):
        runner = make_runner(
            longer_choice, "cpu", max_model_len=96, max_num_batched_tokens=32, block_size=4, attention_backend=backend
        )
        scheduler = make_scheduler(runner, 30 * len(runner.ready.kv_groups))
        requests = [make_request(i, prompt, 12, stop_ids=[]) for i, prompt in enumerate(PROMPTS)]
        answers.append(run_requests(runner, requests, scheduler))
        assert scheduler.stats.cached_tokens > 0
    projected = runner.backend.projected
    assert isinstance(projected, WrittenOut)
    assert {True, False} == set(projected.took[-8:])
    assert answers[0] == answers[1]
    for i, prompt in enumerate(PROMPTS):
        assert_greedy(longer_choice, prompt, answers[1][i], 12)


@pytest.mark.parametrize("settings", [{"pipeline_parallel_size": 2}, full({"enable_attention_dp": True})])
@pytest.mark.usefixtures("warm_engines")
def test_ranks_and_stages_project_in_the_same_steps(longer_choice: Path, settings: dict[str, Any]) -> None:
    batch = [request for request in requests() if request.sampling.temperature == 0]
    config = config_of(
        longer_choice, tensor_parallel_size=2, max_num_batched_tokens=48, attention_backend="projecting", **settings
    )
    client = EngineClient.start(config, runner="projecting_runner:create")
    try:
        client.wait_ready()
        assert_all_greedy(longer_choice, tokens_of(answers_of(client, batch)))
    finally:
        client.close()


def test_short_runs_have_no_indexers(checkpoint: Path) -> None:
    runner = make_runner(checkpoint, "cpu", max_model_len=8, max_num_batched_tokens=32, block_size=4)
    assert any("indexers are neither loaded nor used" in note for note in runner.ready.notes)
    assert not any("indexer" in name for name, _ in runner.model.named_parameters())
    answer = run_requests(runner, [make_request(0, PROMPTS[3][:5], 3, stop_ids=[])])[0]
    assert_greedy(checkpoint, PROMPTS[3][:5], answer, 3)
    model = load_model_config(checkpoint)
    sizes = [len(kv_groups(one)) * block_bytes(one, "bfloat16", block_size=4) for one in (model.for_length(8), model)]
    assert sizes[0] == 3 * 4 * (32 + 16) * 2 < sizes[1]


def test_short_runs_choose_no_blocks(tmp_path: Path) -> None:
    family, overrides = EXPERT_SHAPES["minimax m3 with vision"]
    path = write_tiny_model(tmp_path / "model", family, **overrides)
    runner = make_runner(path, "cpu", max_model_len=20, max_num_batched_tokens=32, block_size=4)
    assert any("indexers are neither loaded nor used" in note for note in runner.ready.notes)
    assert not any("index" in name for name, _ in runner.model.named_parameters())
    answer = run_requests(runner, [make_request(0, PROMPTS[3], 3, stop_ids=[])])[0]
    assert_greedy(path, PROMPTS[3], answer, 3)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kv_cache_dtype": "fp8"}, "`kv_cache_dtype` is fp8, .* chooses keys .* `max_model_len` to at most 8"),
        ({"batch_invariant": True}, "a choice of keys, which runs make unless `max_model_len` is at most 8"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], problem: str, checkpoint: Path) -> None:
    run = RunConfig(model=str(checkpoint), device="cpu", dtype="float32", **settings)
    with pytest.raises(ConfigError, match=problem):
        resolve_engine_config(run, checkpoint, load_checkpoint(run, checkpoint))
    short = msgspec.structs.replace(run, max_model_len=8, max_num_batched_tokens=64)
    resolve_engine_config(short, checkpoint, load_checkpoint(short, checkpoint))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kv_cache_dtype": "fp8"}, "`kv_cache_dtype` is fp8, .* makes keys of what it keeps of tokens"),
        ({"block_size": 6}, "`block_size` is 6, .* a multiple of 4 is needed"),
        ({"batch_invariant": True}, "keys that stand for several tokens"),
    ],
)
def test_what_keys_of_several_tokens_refuse(settings: dict[str, Any], problem: str, tmp_path: Path) -> None:
    family, overrides = EXPERT_SHAPES["deepseek v4"]
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
    path = write_tiny_model(tmp_path / "model", family, **overrides | {"compress_rates": rates})
    run = RunConfig(model=str(path), device="cpu", dtype="float32", **settings)
    with pytest.raises(ConfigError, match=problem):
        resolve_engine_config(run, path, load_checkpoint(run, path))


def test_a_stage_needs_a_choice_of_its_own(tmp_path: Path) -> None:
    family, overrides = EXPERT_SHAPES["glm 5, shared choices"]
    model = load_model_config(write_tiny_model(tmp_path, family, **overrides))
    model.check_pipeline_parallel(2)
    with pytest.raises(ConfigError, match="that an earlier stage has chosen"):
        model.check_pipeline_parallel(3)
