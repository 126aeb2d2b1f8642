"""A rank that keeps weights in FP8."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from checkpoints import write_tiny_model
from nvcli.errors import ConfigError
from nvcli.models.config import load_model_config
from nvcli.worker.runner.device import has_fp8_units, kept_weights_note
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


def test_units_for_fp8_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU computes what such units would."""
    assert has_fp8_units(torch.device("cpu"))
    for capability, has_units in (((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        assert has_fp8_units(torch.device("cuda")) == has_units
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    assert has_fp8_units(torch.device("cuda"), "fast")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(ConfigError, match=r"`fp8_accumulation: fast` needs FP8 tensor cores, which .*NVIDIA A100"):
        has_fp8_units(torch.device("cuda"), "fast")


def test_the_log_says_how_weights_are_kept(tmp_path: Path) -> None:
    original = write_tiny_model(tmp_path / "original", head_dim=64, **SIZES)
    path, _ = write_quantised(original, tmp_path, fp8_blocks((128, 128)))
    plain, stored = load_model_config(original), load_model_config(path)
    note = partial(kept_weights_note, dtype="bfloat16", has_units=True)
    assert note(plain) is None
    assert note(plain.with_quantization("fp8")) == (
        "weights of linear layers are kept in FP8 (quantization: none keeps them in bfloat16)"
    )
    assert "FP8 weights are converted to bfloat16 (quantization: fp8 keeps them)" in str(note(stored))
    assert str(note(stored.with_quantization("fp8"))).startswith(
        "the checkpoint's weights of linear layers stay in FP8 ("
    )
    found = str(kept_weights_note(stored.with_quantization("fp8"), "bfloat16", has_units=False))
    assert "converted to bfloat16 for each product: this GPU has no FP8 tensor cores" in found
    runner = make_runner(path, "cpu", quantization="fp8", kv_cache_memory=1 << 22)
    assert any("stay in FP8" in note for note in runner.ready.notes)
