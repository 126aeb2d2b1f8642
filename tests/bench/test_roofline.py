"""The limit is counted right: small cases that can be checked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvcli.bench.roofline import Ceilings, ModelCosts, Roofline, Work
from nvcli.bench.shapes import write_shape
from nvcli.distributed.stage import Stage
from nvcli.engine.request import StepRecord
from nvcli.messages import ForwardMode
from nvcli.models.config import load_model_config

COSTS = ModelCosts(
    layer_weights=1000, lm_head_weights=300, kv_elements_per_token=8, attention_flops_per_pair=16, bytes_per_element=2
)


def record(**values: int | float) -> StepRecord:
    counts = dict.fromkeys(
        ("num_decodes", "num_extend_tokens", "num_sampled", "decode_keys", "extend_keys", "extend_pairs"), 0
    )
    return StepRecord(**{"mode": ForwardMode.MIXED, **counts, **values})


def test_of_stages_the_last_one_counts(tmp_path: Path) -> None:
    model = load_model_config(write_shape("qwen3-8b", tmp_path))
    whole = ModelCosts.of(model, bytes_per_element=2)
    last = ModelCosts.of(model, bytes_per_element=2, stage=Stage(2, 3))
    assert 3 * last.layer_weights == whole.layer_weights
    assert 3 * last.kv_elements_per_token == whole.kv_elements_per_token
    assert last.lm_head_weights == whole.lm_head_weights


def test_a_decode_step() -> None:
    parts = COSTS.parts(record(num_decodes=3, num_sampled=3, decode_keys=50))
    assert parts == {
        "layer matrices": Work(2000, 6000),
        "LM head": Work(600, 1800),
        "decode attention": Work((50 + 3) * 16, 50 * 16),
        "prompt attention": Work(),
    }


def test_a_prompt_slice_that_samples_nothing_needs_no_lm_head() -> None:
    parts = COSTS.parts(record(num_extend_tokens=4, extend_keys=10, extend_pairs=34))
    assert parts == {
        "layer matrices": Work(2000, 8000),
        "LM head": Work(),
        "decode attention": Work(),
        "prompt attention": Work((10 + 4) * 16, 34 * 16),
    }


def test_each_part_takes_the_longer_of_its_two_times() -> None:
    ceilings = Ceilings(bytes_per_second=1000, flops_per_second=10_000)
    step = record(num_decodes=20, num_sampled=20, decode_keys=100, seconds=10.0)
    roofline = Roofline.of([step], COSTS, ceilings)
    # matrices: max(2000/1000, 40000/10000) = 4; LM head: max(.6, 1.2); attention: max(120·16/1000, 1600/10000)
    assert roofline.limit_by_part == pytest.approx(
        {"layer matrices": 4.0, "LM head": 1.2, "decode attention": 1.92, "prompt attention": 0.0}
    )
    assert roofline.limit_seconds == pytest.approx(7.12)
    assert roofline.share == pytest.approx(0.712)
    assert roofline.bandwidth_share == pytest.approx((2000 + 600 + 1920) / 1000 / 10)
    assert roofline.flops_share == pytest.approx((40_000 + 12_000 + 1600) / 10_000 / 10)


def test_qwen3_8b(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = load_model_config(write_shape("qwen3-8b", tmp_path_factory.mktemp("shape")))
    costs = ModelCosts.of(model, bytes_per_element=2)
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 12288
    assert costs.layer_weights == 36 * layer
    assert costs.lm_head_weights == 151936 * 4096
    assert costs.kv_elements_per_token * costs.bytes_per_element == 36 * 2 * 8 * 128 * 2  # 147,456 bytes a token
    assert costs.attention_flops_per_pair == 36 * 4 * 32 * 128
    half = ModelCosts.of(model, bytes_per_element=2, tensor_parallel_size=2)
    assert half.layer_weights * 2 == costs.layer_weights
    assert half.kv_elements_per_token * 2 == costs.kv_elements_per_token
