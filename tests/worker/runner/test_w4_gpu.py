"""Weights kept in 4 bits on a real GPU: right answers in graphs and eagerly, and memory as planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_generation import run_wide_model, share_of_right_answers

from nvcli.demo import demo_path
from quantised_checkpoints import Format, awq, gptq, packed, write_quantised

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("enforce_eager", [False, True], ids=["graphs", "eager"])
@pytest.mark.parametrize(
    "stored",
    [awq(128), gptq(32, act_order=True, order_seed=1), packed(64, sym=False)],
    ids=["awq", "gptq, act-order", "w4a16, zeros"],
)
def test_right_answers(stored: Format, enforce_eager: bool, tmp_path: Path) -> None:
    path = write_quantised(demo_path(), tmp_path, stored, skip=())[0]
    share, _ = share_of_right_answers(200, model_path=path, quantization="w4a16", enforce_eager=enforce_eager)
    assert share >= 0.99


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_right_answers(tmp_path: Path) -> None:
    path = write_quantised(demo_path(), tmp_path, awq(64), skip=())[0]
    share, _ = share_of_right_answers(200, model_path=path, tensor_parallel_size=2, quantization="w4a16")
    assert share >= 0.99


def test_memory_is_as_planned(tmp_path: Path) -> None:
    run_wide_model(tmp_path, 1, quantization="w4a16")
