"""What requests share is read once for all: every answer is transformers' own, and the same as without."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from generation import greedy_answers
from segment_answers import EAGER_COSTS, answers, prompts_of_a_tree

from checkpoints import write_tiny_model
from expert_shapes import EXPERT_SHAPES
from family_shapes import SHAPES
from nvcli.demo import demo_path
from nvcli.worker.runner.rank_attention import RankAttention
from one_rank import make_runner


@pytest.mark.parametrize(("name", "num_blocks"), [("qwen 3", 70), ("gemma 2", 75), ("gpt-oss", 75)])
def test_trees_of_prompts_are_answered_as_by_transformers(name: str, num_blocks: int, tmp_path: Path) -> None:
    """Trees of several levels, with chunks of prompts and preemptions in between; windows, soft caps and sinks."""
    family, settings = {"qwen 3": ("Qwen3", {}), **SHAPES, **EXPERT_SHAPES}[name]
    path = write_tiny_model(tmp_path / "model", family, **settings)
    runner = make_runner(
        path,
        "cpu",
        max_num_seqs=10,
        max_model_len=200,
        block_size=4,
        max_num_batched_tokens=24,
        kv_cache_memory=1 << 22,
    )
    prompts = prompts_of_a_tree(random.Random(5), 24, 97, lengths=(4, 9, 30))
    found, num_steps, num_preemptions = answers(runner, prompts, 12, num_blocks=num_blocks, costs=EAGER_COSTS)
    assert num_steps > 20
    assert num_preemptions > 0
    assert found == greedy_answers(path, prompts, found, 12, eos=None)


def test_answers_of_the_built_in_model_do_not_change() -> None:
    runner = make_runner(
        demo_path(), "cpu", max_num_seqs=24, max_model_len=1024, block_size=64, kv_cache_memory=1 << 26
    )
    prompts = prompts_of_a_tree(random.Random(2), 40, 640, lengths=(64, 128, 300))
    expected, _, _ = answers(runner, prompts, 10, num_blocks=runner.ready.num_blocks, costs=None)
    found, num_steps, _ = answers(runner, prompts, 10, num_blocks=runner.ready.num_blocks, costs=EAGER_COSTS)
    assert found == expected
    assert num_steps > 5


def test_stages_run_the_same_steps() -> None:
    """None reads segments that another cannot read, and all warm up as the one that projects latents and chooses."""
    runner = make_runner(demo_path(), "cpu", kv_cache_memory=1 << 24)
    assert runner.ready.reads_segments
    other = SimpleNamespace(min=lambda value: 0)
    found = RankAttention.of(runner.config, runner.model, runner.device, runner.dtype, other)  # type: ignore[arg-type]
    assert found.max_shared_rows == 0
    assert found.projects_latents
    assert found.chooses_keys


@pytest.mark.parametrize("key", ["enable_cascade_attention", "enable_prefix_caching"])
def test_a_run_without_it_reads_nothing_once(key: str) -> None:
    runner = make_runner(demo_path(), "cpu", kv_cache_memory=1 << 24, **{key: False})
    assert not runner.ready.reads_segments
