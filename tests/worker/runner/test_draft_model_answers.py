"""Answers with drafts by a small model are those without, and often right if it was trained for its target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import generate
from held_out import answer, held_out_questions
from mixed_requests import assert_equal, mixed_requests, samples_of

from checkpoints import write_tiny_model
from combinations import full
from nvcli.core.messages import DRAFT_SOURCES
from nvcli.demo import demo_path
from nvcli.engine.request import EngineStats, RequestOutput
from one_rank import make_core, make_runner, make_scheduler, run_core

HEAD = DRAFT_SOURCES.index("head")
DRAFTS: dict[str, Any] = {"draft_policy": "always", "max_draft_tokens": 4}
REQUESTS = samples_of(mixed_requests(16))
DEMO_DRAFT = Path(__file__).parents[2] / "demo_draft"
"""The model that `scripts/train_demo_draft.py` has trained."""


def run_here(
    num_blocks: int | None = None, device: str = "cpu", **config: Any
) -> tuple[dict[int, RequestOutput], EngineStats]:
    """Answer the requests by the built-in model, as one rank in this process."""
    own = {"max_model_len": 160, "block_size": 4, "kv_cache_memory": 64 << 20, "max_num_batched_tokens": 64}
    runner = make_runner(demo_path(), device, dtype="float32", **{**own, **config})
    core = make_core(runner, make_scheduler(runner, num_blocks))
    return run_core(core, REQUESTS), core.scheduler.stats


@pytest.fixture(scope="module")
def expected() -> dict[int, RequestOutput]:
    return run_here()[0]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same tokens, whose keys have another shape."""
    vocab_size = json.loads((demo_path() / "config.json").read_text())["vocab_size"]
    return write_tiny_model(tmp_path_factory.mktemp("draft") / "model", "Llama", vocab_size=vocab_size, head_dim=8)


def test_a_model_that_drafts_for_itself_is_always_right(expected: dict[int, RequestOutput]) -> None:
    """Sampled drafts too: they take the noise that the model will take."""
    found, stats = run_here(**DRAFTS, draft_head=str(demo_path()))
    assert_equal(found, expected)
    assert stats.accepted[HEAD] > 0.5 * stats.drafted[HEAD], "those behind an answer's end are in vain"
    num_tokens = sum(len(output.token_ids) // 4 for output in found.values())
    assert stats.decode_rows < 0.6 * num_tokens


def test_answers_are_those_without_drafts(expected: dict[int, RequestOutput], other: Path) -> None:
    found, stats = run_here(230, **DRAFTS, draft_head=str(other), max_num_seqs=12)
    assert_equal(found, expected)
    assert stats.drafted[HEAD] > 100
    assert stats.num_preemptions > 0


@pytest.mark.parametrize("temperature", [full(0.0), 1.0])
def test_a_trained_model_gives_three_tokens_a_step(temperature: float) -> None:
    """On questions that neither model was trained on."""
    found, stats = answer(held_out_questions(temperature), DEMO_DRAFT)
    assert {output.finish_reason for output in found.values()} == {"stop"}
    assert stats.accepted_tokens >= 2 * stats.decode_rows


@pytest.mark.gpu
@pytest.mark.usefixtures("memory_is_given_back")
def test_answers_on_a_gpu(other: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    settings: dict[str, Any] = {"device": "cuda", "block_size": 16, "max_num_batched_tokens": 256}
    expected, _ = run_here(**settings)
    for path in (other, demo_path()):
        found, stats = run_here(**settings, **DRAFTS, draft_head=str(path))
        assert_equal(found, expected)
        assert stats.drafted[HEAD] > 100
    assert stats.accepted[HEAD] > 0.5 * stats.drafted[HEAD]


def test_two_ranks_draft_alike(expected: dict[int, RequestOutput]) -> None:
    settings = {"tensor_parallel_size": 2, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    found, stats = generate(demo_path(), REQUESTS[:6], **DRAFTS, **settings, draft_head=str(demo_path()))
    assert_equal(found, {number: expected[number] for number in found})
    assert stats.accepted[HEAD] > 0
