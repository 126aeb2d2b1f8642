"""The limit is counted right: small cases that can be checked by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nvcli.core.messages import ForwardMode
from nvcli.engine.request import StepRecord
from nvcli.models.config import load_model_config
from nvcli.models.mixers.mixer import MixerCosts
from nvcli.sizing.costs import MatrixCosts, ModelCosts, model_costs
from nvcli.tools.bench.roofline import Ceilings, Roofline, Work, work_of
from nvcli.tools.bench.shapes import write_shape
from nvcli.worker.distributed.stage import Stage

COSTS = ModelCosts(
    layers=MatrixCosts(num_weights=1000, num_bytes=2000),
    lm_head=MatrixCosts(num_weights=300, num_bytes=600),
    mixers=(MixerCosts(kv_bytes_per_token=16, flops_per_pair=16),),
)


def record(**values: int | float) -> StepRecord:
    counts = dict.fromkeys(
        ("num_decodes", "num_prefill_tokens", "num_sampled", "decode_keys", "prefill_keys", "prefill_pairs"), 0
    )
    return StepRecord(**{"mode": ForwardMode.MIXED, **counts, **values})


def test_of_stages_the_last_one_counts(tmp_path: Path) -> None:
    model = load_model_config(write_shape("qwen3-8b", tmp_path))
    whole = model_costs(model, "bfloat16")
    last = model_costs(model, "bfloat16", stage=Stage(2, 3))
    assert 3 * last.layers.num_weights == whole.layers.num_weights
    assert 3 * last.mixers[0].kv_bytes_per_token == whole.mixers[0].kv_bytes_per_token
    assert last.lm_head == whole.lm_head
    assert model_costs(model, "bfloat16", stage=Stage(0, 3)).lm_head == MatrixCosts(num_weights=0, num_bytes=0)


def test_a_decode_step() -> None:
    parts = work_of(record(num_decodes=3, num_sampled=3, decode_keys=50), COSTS)
    assert parts == {
        "layer matrices": Work(2000, 6000),
        "LM head": Work(600, 1800),
        "decode attention": Work((50 + 3) * 16, 50 * 16),
        "prompt attention": Work(),
    }


def test_keys_that_several_rows_share_are_read_once() -> None:
    """Each row still multiplies with all of its keys."""
    step = record(num_decodes=3, num_sampled=3, decode_keys=50, repeated_decode_keys=24)
    assert work_of(step, COSTS)["decode attention"] == Work((26 + 3) * 16, 50 * 16)
    step = record(num_prefill_tokens=4, prefill_keys=40, prefill_pairs=90, repeated_prefill_keys=16)
    assert work_of(step, COSTS)["prompt attention"] == Work((24 + 4) * 16, 90 * 16)
    windowed = replace(COSTS, mixers=(replace(COSTS.mixers[0], window=6),))
    step = record(num_decodes=3, num_sampled=3, decode_keys=50, repeated_decode_keys=24)
    assert work_of(step, windowed)["decode attention"] == Work((18 + 3) * 16, 18 * 16)


def test_a_prompt_slice_that_samples_nothing_needs_no_lm_head() -> None:
    parts = work_of(record(num_prefill_tokens=4, prefill_keys=10, prefill_pairs=34), COSTS)
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


def test_a_step_reads_the_experts_that_its_tokens_have() -> None:
    experts = MatrixCosts(num_experts=4, experts_per_token=2, num_weights=400, num_bytes=800)
    costs = replace(COSTS, experts=experts)
    one = work_of(record(num_decodes=1, num_sampled=1, decode_keys=9), costs)["experts"]
    assert one == Work(400, 2 * 200), "two of four"
    three = work_of(record(num_decodes=1, num_prefill_tokens=2, num_sampled=1), costs)["experts"]
    assert three == Work(800 * 7 // 8, 3 * 2 * 200), "each is passed over by all three once in eight times"
    assert costs.weights_per_token == 1000 + 200
    assert costs.matrix_read_bytes(1e6) == 2000 + 800


def test_a_row_reads_and_writes_its_states() -> None:
    """However long its request is; a chunk does so once for all of its tokens."""
    costs = replace(COSTS, mixers=(*COSTS.mixers, MixerCosts(state_bytes=100, flops_per_token=7)))
    parts = work_of(record(num_decodes=3, num_prefill_tokens=10, num_chunks=2, decode_keys=50), costs)
    assert parts["decode states"] == Work(3 * 200, 3 * 7)
    assert parts["prompt states"] == Work(2 * 200, 10 * 7)
    ceilings = Ceilings(bytes_per_second=1000, flops_per_second=1e9)
    step = record(num_decodes=3, num_prefill_tokens=10, num_chunks=2, decode_keys=50, seconds=1.0)
    decode, prefill = (Roofline.of([step], costs, ceilings, phase=phase) for phase in ("decode", "prefill"))
    assert (decode.limit_by_part["decode states"], decode.limit_by_part["prompt states"]) == (0.6, 0.0)
    assert (prefill.limit_by_part["decode states"], prefill.limit_by_part["prompt states"]) == (0.0, 0.4)


def test_latent_attention_of_prompts_counts_as_it_could_be_computed(tmp_path: Path) -> None:
    """Decode steps read 576 numbers of a key once for all heads; heads of prompts could have keys of 192 numbers and
    values of 128."""
    costs = model_costs(load_model_config(write_shape("deepseek-v2-lite", tmp_path)), "bfloat16")
    parts = work_of(
        record(num_decodes=3, num_prefill_tokens=4, decode_keys=50, prefill_keys=4, prefill_pairs=10), costs
    )
    assert parts["decode attention"] == Work(27 * 53 * 576 * 2, 27 * 50 * 16 * 2 * (576 + 512))
    assert parts["prompt attention"] == Work(27 * 8 * 576 * 2, 27 * 10 * 16 * 2 * (192 + 128))


def test_qwen3_5_35b_a3b(tmp_path: Path) -> None:
    """30 of 40 layers have a state: 32 heads of 128 × 128 in float32, and the last 3 inputs of 8,192 channels."""
    model = load_model_config(write_shape("qwen3.5-35b-a3b", tmp_path))
    costs = model_costs(model, "bfloat16")
    state = 32 * 128 * 128
    delta_nets, full = costs.mixers
    assert delta_nets.state_bytes == 30 * (4 * state + 2 * 3 * 8192)
    assert delta_nets.flops_per_token == 30 * 6 * state
    assert full.kv_bytes_per_token == 10 * 2 * 2 * 256 * 2
    delta_net = 2048 * (8192 + 4096 + 2 * 32) + 4096 * 2048
    attention = 2048 * (2 * 4096 + 2 * 512) + 4096 * 2048
    each_mlp = 2048 * (256 + 1) + 3 * 512 * 2048
    assert costs.layers.num_weights == 30 * delta_net + 10 * attention + 40 * each_mlp
    active = costs.weights_per_token + costs.lm_head.num_weights
    assert active / 1e9 == pytest.approx(2.95, abs=0.01), "A3B"
    half, last = (
        model_costs(model, "bfloat16", tensor_parallel_size=2),
        model_costs(model, "bfloat16", stage=Stage(1, 2)),
    )
    for share in (half, last):
        assert 2 * share.state_bytes_per_row == costs.state_bytes_per_row


def test_qwen3_30b_a3b(tmp_path: Path) -> None:
    model = load_model_config(write_shape("qwen3-30b-a3b", tmp_path))
    costs = model_costs(model, "bfloat16")
    expert = 3 * 768 * 2048
    assert costs.experts == MatrixCosts(
        num_experts=128, experts_per_token=8, num_weights=48 * 128 * expert, num_bytes=2 * 48 * 128 * expert
    )
    router = 128 * 2048
    assert costs.layers.num_weights == 48 * (2 * 2048 * 4096 + 2 * 2048 * 512 + router)
    active = costs.weights_per_token + costs.lm_head.num_weights + 151936 * 2048
    assert active / 1e9 == pytest.approx(3.35, abs=0.01), "A3B"
    half = model_costs(model, "bfloat16", tensor_parallel_size=2)
    assert 2 * half.experts.num_bytes == costs.experts.num_bytes
    assert half.layers.num_weights - 48 * router == (costs.layers.num_weights - 48 * router) // 2


def test_gpt_oss_20b(tmp_path: Path) -> None:
    model = load_model_config(write_shape("gpt-oss-20b", tmp_path))
    costs = model_costs(model, "bfloat16")
    assert costs.experts.num_weights == 24 * 32 * 3 * 2880 * 2880
    active = costs.weights_per_token + costs.lm_head.num_weights + 201088 * 2880
    assert active / 1e9 == pytest.approx(3.61 + 0.58, abs=0.01), "the published number leaves the embedding out"
    # Half of the layers read no more than their window.
    windowed, full = sorted(costs.mixers, key=lambda one: one.window is None)
    assert (windowed.window, full.window) == (128, None)
    assert windowed.kv_bytes_per_token == full.kv_bytes_per_token == 12 * 2 * 8 * 64 * 2
    for size in (2, 4, 8):
        model.check_tensor_parallel(size)


def test_qwen3_8b(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = load_model_config(write_shape("qwen3-8b", tmp_path_factory.mktemp("shape")))
    costs = model_costs(model, "bfloat16")
    layer = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 12288
    assert costs.layers == MatrixCosts(num_weights=36 * layer, num_bytes=2 * 36 * layer)
    assert costs.lm_head.num_weights == 151936 * 4096
    (attention,) = costs.mixers
    assert attention.kv_bytes_per_token == 36 * 2 * 8 * 128 * 2  # 147,456 bytes a token
    assert attention.flops_per_pair == 36 * 4 * 32 * 128
    half = model_costs(model, "bfloat16", tensor_parallel_size=2)
    assert half.layers.num_weights * 2 == costs.layers.num_weights
    assert half.mixers[0].kv_bytes_per_token * 2 == attention.kv_bytes_per_token
