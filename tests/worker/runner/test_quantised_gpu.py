"""FP8 weights on a real GPU: right answers in graphs and eagerly, the CPU's numbers, memory as planned."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_generation import run_wide_model, share_of_right_answers

from checkpoints import write_tiny_model
from nvcli.demo import demo_path
from one_rank import make_runner, run_requests
from quantised_checkpoints import FORMATS, Format, fp8_blocks, unstack_experts, write_quantised
from requests_factory import make_request

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9), reason="needs FP8 units"
    ),
]
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("chosen", [None, fp8_blocks((128, 128))], ids=["rows", "blocks"])
def test_right_answers(chosen: Format | None, enforce_eager: bool, tmp_path: Path) -> None:
    path = demo_path() if chosen is None else write_quantised(demo_path(), tmp_path, chosen, skip=())[0]
    share, _ = share_of_right_answers(200, model_path=path, quantization="fp8", enforce_eager=enforce_eager)
    assert share >= 0.99


@pytest.mark.parametrize("name", ["awq", "gptq, act-order", "compressed, w4a16, zeros", "fp8, blocks of 128"])
def test_a_gpu_loads_the_numbers_that_a_cpu_loads(name: str, tmp_path: Path) -> None:
    original = write_tiny_model(tmp_path / "original", head_dim=64, **SIZES)
    path, _ = write_quantised(original, tmp_path, FORMATS[name])
    kinds = ("none", "fp8") if name.startswith("fp8") else ("none",)
    for kind in kinds:
        on_gpu, on_cpu = (
            dict(
                make_runner(
                    path, device, dtype="float32", quantization=kind, kv_cache_memory=1 << 24
                ).model.named_parameters()
            )
            for device in ("cuda", "cpu")
        )
        for parameter, expected in on_cpu.items():
            torch.testing.assert_close(on_gpu[parameter].cpu().float(), expected.float(), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("has_experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("quantised", [False, True], ids=["rows", "blocks"])
def test_answers_are_those_of_a_cpu(quantised: bool, has_experts: bool, tmp_path: Path) -> None:
    """In float32, where the first tokens hardly depend on the last digits, but for those of the library's product,
    which it rounds to bfloat16."""
    more = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256} if has_experts else {}
    family = "Qwen3Moe" if has_experts else "Qwen3"
    path = unstack_experts(write_tiny_model(tmp_path / "original", family, head_dim=64, **{**SIZES, **more}))
    if quantised:
        path, _ = write_quantised(path, tmp_path, fp8_blocks((128, 128)), skip=("gate.weight",))
    answers = []
    for device in ("cuda", "cpu"):
        runner = make_runner(path, device, dtype="float32", quantization="fp8", kv_cache_memory=1 << 24)
        answers.append(run_requests(runner, [make_request(n, list(range(2, 9 + 5 * n)), 4) for n in range(8)]))
    num_tokens = 4 if quantised else 1
    same = sum(answers[0][number][:num_tokens] == tokens[:num_tokens] for number, tokens in answers[1].items())
    assert same >= 5, answers


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_right_answers() -> None:
    share, _ = share_of_right_answers(200, tensor_parallel_size=2, quantization="fp8")
    assert share >= 0.99


def test_memory_is_as_planned(tmp_path: Path) -> None:
    run_wide_model(tmp_path, 1, quantization="fp8")
