"""What a pass comes to, by small cases that can be checked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from nvcli.core.messages import ForwardMode
from nvcli.engine.request import StepRecord
from nvcli.models.mixers.mixer import MixerCosts
from nvcli.sizing.costs import MatrixCosts, ModelCosts
from nvcli.tools.bench.engines import Pass, deal_out
from nvcli.tools.bench.measures import StepTimes, run_of
from nvcli.tools.bench.plot import start_times
from nvcli.tools.bench.roofline import Ceilings, Roofline
from requests_factory import make_request

COSTS = ModelCosts(
    layers=MatrixCosts(num_weights=1000, num_bytes=2000),
    lm_head=MatrixCosts(num_weights=300, num_bytes=600),
    mixers=(MixerCosts(kv_bytes_per_token=16, flops_per_pair=16),),
)
CEILINGS = Ceilings(bytes_per_second=1000, flops_per_second=1e12)
"""Bytes alone count: matrices 2 s and LM head 0.6 s a step, 0.016 s for each token of keys and values."""


def record(mode: ForwardMode, **values: int | float) -> StepRecord:
    counts = dict.fromkeys(
        ("num_decodes", "num_prefill_tokens", "num_sampled", "decode_keys", "prefill_keys", "prefill_pairs"), 0
    )
    return StepRecord(**{"mode": mode, **counts, **values})


# 3 prompt tokens and 1 decode row; both the prompt and the row get a token.
MIXED = record(
    ForwardMode.MIXED,
    num_decodes=1,
    num_prefill_tokens=3,
    num_sampled=2,
    decode_keys=49,
    prefill_keys=22,
    prefill_pairs=60,
    num_used_blocks=8,
    seconds=8.0,
    idle_seconds=0.5,
)
DECODE = record(
    ForwardMode.DECODE, num_decodes=1, num_sampled=1, decode_keys=49, num_used_blocks=2, seconds=4.0, idle_seconds=0.25
)


def make_pass(*replicas: list[StepRecord], **values: Any) -> Pass:
    defaults: dict[str, Any] = {
        "seconds": 16.0,
        "num_requests": 2,
        "prompt_tokens": 30,
        "cached_tokens": 10,
        "computed_prompt_tokens": 30,
        "output_tokens": 50,
        "num_preemptions": 1,
        "speculation": None,
        "num_blocks": 10,
    }
    return Pass(**{**defaults, **values}, records=list(replicas))


def test_a_mixed_steps_time_is_shared_out_as_its_limit_is() -> None:
    prefill = Roofline.of([MIXED], COSTS, CEILINGS, phase="prefill")
    decode = Roofline.of([MIXED], COSTS, CEILINGS, phase="decode")
    # matrices 2 s, three of four tokens; LM head 0.6 s, one of two rows; attention (22 + 3) and (49 + 1) tokens
    assert prefill.limit_by_part == pytest.approx(
        {"layer matrices": 1.5, "LM head": 0.3, "decode attention": 0.0, "prompt attention": 0.4}
    )
    assert decode.limit_by_part == pytest.approx(
        {"layer matrices": 0.5, "LM head": 0.3, "decode attention": 0.8, "prompt attention": 0.0}
    )
    assert prefill.seconds == pytest.approx(8.0 * 2.2 / 3.8)
    assert prefill.seconds + decode.seconds == pytest.approx(8.0)
    whole = Roofline.of([MIXED], COSTS, CEILINGS)
    assert prefill.share == pytest.approx(whole.share)
    assert decode.share == pytest.approx(whole.share)
    assert prefill.bandwidth_share == pytest.approx(whole.bandwidth_share)


def test_time_is_prefill_decode_and_idle() -> None:
    run = run_of(make_pass([MIXED, DECODE]), COSTS, CEILINGS)
    assert run.phases["prefill"].seconds == pytest.approx(8.0 * 2.2 / 3.8)
    assert run.phases["decode"].seconds == pytest.approx(8.0 * 1.6 / 3.8 + 4.0)
    assert run.idle_seconds == pytest.approx(16.0 - 12.0)
    assert run.roofline_share == pytest.approx((3.8 + 3.4) / 16.0)
    assert (run.steps["MIXED"].count, run.steps["DECODE"].idle_median) == (1, 250.0)
    assert run.peak_kv_share == pytest.approx(0.8)
    assert run.mean_kv_share == pytest.approx((8 * 8.0 + 2 * 4.0) / 12.0 / 10)
    assert (run.output_rate, run.total_rate, run.request_rate) == pytest.approx((50 / 16, 80 / 16, 2 / 16))
    assert (run.cached_tokens, run.cached_share, run.num_preemptions) == (10, 0.25, 1)


def test_replicas_are_averaged() -> None:
    one, two = (run_of(make_pass(*[[MIXED, DECODE]] * count), COSTS, CEILINGS) for count in (1, 2))
    assert two.phases["decode"].seconds == pytest.approx(one.phases["decode"].seconds)
    assert two.idle_seconds == pytest.approx(one.idle_seconds)
    assert two.roofline_share == pytest.approx(one.roofline_share)
    assert two.mean_kv_share == pytest.approx(one.mean_kv_share)
    assert two.steps["DECODE"].count == 2


def test_percentiles() -> None:
    times = StepTimes.of([record(ForwardMode.DECODE, seconds=number / 1000) for number in range(100)])
    assert (times.median, times.p90, times.p99) == pytest.approx((50.0, 90.0, 99.0))
    assert times.total == pytest.approx(4950.0)


def test_requests_go_to_the_replica_with_least_to_generate() -> None:
    requests = [make_request(number, [1], length) for number, length in enumerate((10, 4, 4, 4, 1))]
    dealt = [[request.request_id for request in share] for share in deal_out(requests, 2)]
    assert dealt == [[0, 4], [1, 2, 3]]


def test_a_step_begins_when_the_one_before_is_done_and_the_device_was_idle() -> None:
    assert start_times([MIXED, DECODE, MIXED]) == pytest.approx([0.0, 8.25, 12.75])
