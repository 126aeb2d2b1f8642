"""An EAGLE-3 head drafts for the built-in model: answers are those without drafts, and a trained head gives at least
four tokens a step on questions that neither the model nor the head was trained on."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from mixed_requests import assert_equal, mixed_requests, samples_of
from tokenizers import Tokenizer

import demo_tasks
from eagle3_heads import write_head
from nvcli.core.messages import DRAFT_SOURCES
from nvcli.core.sampling_params import SamplingParams
from nvcli.demo import demo_path
from nvcli.engine.request import EngineStats, Request, RequestOutput
from one_rank import make_core, make_runner, make_scheduler, run_core
from requests_factory import make_request

HEAD = DRAFT_SOURCES.index("head")
DEMO_HEAD = Path(__file__).parents[2] / "demo_head"
"""The head that `scripts/train_demo_head.py` has trained."""


def answer(
    requests: list[Request], head: Path | None, num_blocks: int | None = None, **config: Any
) -> tuple[dict[int, RequestOutput], EngineStats]:
    """Answer requests by one rank in this process, without a head or with as many drafts as it gives."""
    own: dict[str, Any] = {"block_size": 16, "kv_cache_memory": 128 << 20, "max_num_seqs": 16, "max_model_len": 1024}
    if head is not None:
        own |= {"draft_head": str(head), "draft_policy": "always", "max_draft_tokens": 4}
    runner = make_runner(demo_path(), "cpu", **{**own, **config})
    core = make_core(runner, make_scheduler(runner, num_blocks))
    return run_core(core, requests), core.stats


def test_answers_are_those_without_drafts(tmp_path: Path) -> None:
    """With a head of its own size and vocabulary, with little room, in chunks and behind shared prefixes."""
    draft_ids = sorted(random.Random(1).sample(range(640), 300))
    write_head(tmp_path, demo_path(), hidden_size=48, head_dim=64, draft_ids=draft_ids, layers=(0, 3, 6), fc_norm=True)
    requests = samples_of(mixed_requests(14))
    settings: dict[str, Any] = {"max_model_len": 160, "block_size": 4, "max_num_batched_tokens": 48, "max_num_seqs": 8}
    expected, _ = answer(requests, None, **settings)
    found, stats = answer(requests, tmp_path, 42, **settings)
    assert_equal(found, expected)
    assert stats.drafted[HEAD] > 0
    assert stats.num_preemptions > 0


def held_out_questions(temperature: float) -> list[Request]:
    """Return questions of every task, whose answers end at either end token."""
    rng = random.Random("held out")
    tokenizer = Tokenizer.from_file(str(demo_path() / "tokenizer.json"))
    prompts = [demo_tasks.raw_prompt(demo_tasks.sample(rng, task, "heldout")) for task in demo_tasks.TASKS * 2]
    sampling = SamplingParams(temperature=temperature)
    return [
        make_request(number, tokenizer.encode(prompt).ids, 420, stop_ids=[0, 2], sampling=sampling)
        for number, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trained_head_gives_four_tokens_a_step(temperature: float) -> None:
    found, stats = answer(held_out_questions(temperature), DEMO_HEAD)
    assert {output.finish_reason for output in found.values()} == {"stop"}
    assert stats.accepted_tokens >= 3 * stats.decode_rows
