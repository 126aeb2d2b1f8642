"""A rank that keeps weights in FP8."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoints import write_tiny_model
from nvcli.errors import ConfigError
from nvcli.runner.device import check_fp8_units
from one_rank import make_runner, run_requests
from quantised_checkpoints import fp8_blocks, write_quantised
from requests_factory import make_request

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}


def test_batches_and_chunks_do_not_change_the_answers(tmp_path: Path) -> None:
    original = write_tiny_model(tmp_path / "original", head_dim=64, **SIZES)
    path, _ = write_quantised(original, tmp_path, fp8_blocks((128, 128)))
    answers = []
    for limits in ({"max_num_batched_tokens": 512}, {"max_num_batched_tokens": 9, "max_num_seqs": 2}):
        runner = make_runner(path, "cpu", quantization="fp8", block_size=16, kv_cache_memory=1 << 22, **limits)
        assert runner.model.weight_bytes()["MLP"] < 2 * 3 * 256 * 512 * 4, "the second layer alone is plain"
        batch = [make_request(number, list(range(2, 12 + 9 * number)), 8) for number in range(5)]
        answers.append(run_requests(runner, batch))
    assert answers[0] == answers[1]
    assert all(len(tokens) == 8 for tokens in answers[0].values())


def test_gpus_without_fp8_units_are_refused() -> None:
    check_fp8_units("NVIDIA L40S", (8, 9))
    check_fp8_units("NVIDIA H200", (9, 0))
    with pytest.raises(ConfigError, match=r"`quantization` is fp8, and NVIDIA A100 .*8\.0.* use quantization: none"):
        check_fp8_units("NVIDIA A100", (8, 0))
