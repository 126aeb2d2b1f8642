"""Prefill chunks are attended to their shared prefixes together: every answer is transformers' own, and the same as
without."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from generation import greedy_answers
from segment_answers import EAGER_COSTS, EAGER_PREFIX_COSTS, answers, prompts_of_a_tree

from checkpoints import write_tiny_model
from expert_shapes import EXPERT_SHAPES
from fake_runners import engine_config
from family_shapes import SHAPES
from kernel_device import HAS_GPU, INTERPRETED_MARKS
from nvcli.attention.triton_backend import TritonBackend
from nvcli.demo import demo_path
from nvcli.engine.client import EngineClient
from one_rank import make_runner

pytestmark = [*INTERPRETED_MARKS, pytest.mark.usefixtures("warm_engines")]


def suffixed_prompts(rng: random.Random, number: int, vocab_size: int) -> list[list[int]]:
    """Make prompts behind a tree of prefixes, with suffixes of 1 to 100 tokens, those of one prefix side by side."""
    root = [rng.randrange(3, vocab_size) for _ in range(24)]
    prefixes = [root, *(root + [rng.randrange(3, vocab_size) for _ in range(rng.randint(8, 40))] for _ in range(3))]
    prompts = []
    for place in range(number):
        length = rng.choice([1, 2, 5, 9, 30, rng.randint(1, 100)])
        prompts.append(
            prefixes[place * len(prefixes) // number] + [rng.randrange(3, vocab_size) for _ in range(length)]
        )
    return prompts


@pytest.mark.parametrize(("name", "num_blocks"), [("qwen 3", 45), ("gemma 2", 80), ("gpt-oss", 70)])
def test_suffixes_of_trees_are_answered_as_by_transformers(name: str, num_blocks: int, tmp_path: Path) -> None:
    """In steps with decode rows, which share segments, and chunks of long suffixes; with preemptions in between;
    windows, soft caps and sinks."""
    family, settings = {"qwen 3": ("Qwen3", {}), **SHAPES, **EXPERT_SHAPES}[name]
    path = write_tiny_model(tmp_path / "model", family, **settings)
    runner = make_runner(
        path,
        "cpu",
        max_num_seqs=12,
        max_model_len=200,
        block_size=4,
        max_num_batched_tokens=70,
        kv_cache_memory=1 << 22,
    )
    prompts = suffixed_prompts(random.Random(4), 45, 97)
    found, num_steps, num_preemptions = answers(
        runner, prompts, 8, num_blocks=num_blocks, costs=EAGER_COSTS, prefix_costs=EAGER_PREFIX_COSTS
    )
    assert num_steps > 5
    assert num_preemptions > 0
    assert found == greedy_answers(path, prompts, found, 8, eos=None)


def test_answers_of_the_built_in_model_do_not_change() -> None:
    runner = make_runner(
        demo_path(), "cpu", max_num_seqs=24, max_model_len=1024, block_size=64, kv_cache_memory=1 << 26
    )
    prompts = prompts_of_a_tree(random.Random(2), 60, 640, lengths=(64, 128, 300))
    prompts.sort()
    expected, _, _ = answers(runner, prompts, 2, num_blocks=runner.ready.num_blocks, costs=None)
    found, num_steps, _ = answers(
        runner, prompts, 2, num_blocks=runner.ready.num_blocks, costs=None, prefix_costs=EAGER_PREFIX_COSTS
    )
    assert found == expected
    assert num_steps > 2


@pytest.mark.skipif(HAS_GPU, reason="it takes Triton's interpreter")
@pytest.mark.parametrize("off", [None, "enable_cascade_attention", "enable_prefix_caching"])
def test_ranks_say_whether_they_gain_by_it(off: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TritonBackend, "unsupported", lambda case: [])
    options: dict[str, Any] = {} if off is None else {off: False}
    runner = make_runner(demo_path(), "cpu", attention_backend="triton", kv_cache_memory=1 << 24, **options)
    assert (runner.ready.prefix_tile_tokens > 0) == (off is None)


@pytest.mark.skipif(HAS_GPU, reason="it takes Triton's interpreter")
@pytest.mark.parametrize(("last_layer", "gains"), [("sliding_attention", False), ("full_attention", True)])
def test_no_stage_shares_prefixes_where_one_has_windows_alone(last_layer: str, gains: bool, tmp_path: Path) -> None:
    """A stage could not plan such a step, and would pad it to another shape than the stage before."""
    layer_types = ["full_attention", "sliding_attention", "sliding_attention", last_layer]
    path = write_tiny_model(
        tmp_path / "model", "Ministral", sliding_window=20, num_hidden_layers=4, layer_types=layer_types
    )
    config = engine_config(model_path=path, attention_backend="triton", pipeline_parallel_size=2)
    client = EngineClient.start(config, runner="interpreted_runner:create")
    try:
        ready = client.wait_ready()
        assert ready is not None
        assert (ready.prefix_tile_tokens > 0) == gains
    finally:
        client.close()
