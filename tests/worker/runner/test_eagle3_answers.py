"""An EAGLE-3 head drafts for the built-in model: answers are those without drafts, and a trained head gives at least
four tokens a step on questions that neither the model nor the head was trained on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from held_out import answer, held_out_questions
from mixed_requests import assert_equal, mixed_requests, samples_of

from combinations import full
from eagle3_heads import write_head
from nvcli.core.messages import DRAFT_SOURCES
from nvcli.demo import demo_path
from nvcli.engine.draft_costs import Form
from nvcli.engine.draft_policy import DraftPolicy

HEAD = DRAFT_SOURCES.index("head")
DEMO_HEAD = Path(__file__).parents[2] / "demo_head"
"""The head that `scripts/train_demo_head.py` has trained."""


def test_answers_are_those_without_drafts(tmp_path: Path) -> None:
    """With a head of its own size and vocabulary, with little room, in chunks and behind shared prefixes."""
    draft_ids = sorted(random.Random(1).sample(range(640), 300))
    write_head(tmp_path, demo_path(), hidden_size=48, head_dim=64, draft_ids=draft_ids, layers=(0, 3, 6), fc_norm=True)
    requests = samples_of(mixed_requests(14))
    settings: dict[str, Any] = {"max_model_len": 160, "block_size": 4, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    expected, _ = answer(requests, None, **settings)
    found, stats = answer(requests, tmp_path, 26, **settings)
    assert_equal(found, expected)
    assert stats.drafted[HEAD] > 0
    assert stats.num_preemptions > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"enforce_eager": True},
        {"draft_policy": "auto", "max_draft_tokens": 7},
        {"max_num_seqs": 32, "max_num_batched_tokens": 96, "max_draft_tokens": 5},
    ],
)
@pytest.mark.usefixtures("memory_is_given_back")
def test_answers_on_a_gpu(config: dict[str, Any]) -> None:
    """In graphs and without, by a head that is often right."""
    torch.backends.cuda.matmul.allow_tf32 = False
    requests = [*samples_of(mixed_requests(14)), *held_out_questions(1.0, first_id=1000)]
    requests += held_out_questions(2.0, first_id=2000)
    settings: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_num_batched_tokens": 256}
    expected, _ = answer(requests, None, **settings)
    found, stats = answer(requests, DEMO_HEAD, **{**settings, **config})
    assert_equal(found, expected)
    assert stats.accepted[HEAD] > 100


def test_the_surest_drafts_are_right_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among as many, in steps of so many rows that they are not all verified."""
    requests = held_out_questions(2.5)
    monkeypatch.setattr("nvcli.engine.engine_process.UNEVEN_ROWS", 2)
    shares = {}
    for form in (Form(3), Form(3, False)):

        def choose(_: DraftPolicy, size: int, forms: list[Form], levels: object, form: Form = form) -> Form:
            return form if form in forms else Form(3)

        monkeypatch.setattr(DraftPolicy, "_choose", choose)
        config = {"max_num_seqs": 32, "max_draft_tokens": 5, "draft_policy": "auto"}
        found, stats = answer(requests, DEMO_HEAD, **config)
        shares[form] = found, stats.accepted[HEAD] / stats.drafted[HEAD]
    (expected, even), (found, surest) = shares.values()
    assert_equal(found, expected)
    assert surest > 1.15 * even


@pytest.mark.parametrize("temperature", [full(0.0), 1.0])
def test_a_trained_head_gives_four_tokens_a_step(temperature: float) -> None:
    found, stats = answer(held_out_questions(temperature), DEMO_HEAD)
    assert {output.finish_reason for output in found.values()} == {"stop"}
    assert stats.accepted_tokens >= 3 * stats.decode_rows
