"""The kernels of a model's first start are found by steps whose launches are left out, whatever these steps make of
memory that nothing has written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from checkpoints import write_tiny_model
from fake_runners import engine_config
from kernel_device import HAS_GPU
from nvcli.attention.forward_batch import BatchShape
from nvcli.attention.triton_backend import TritonBackend
from nvcli.errors import LimitsTooHigh
from nvcli.kernels.triton import compile_ahead
from nvcli.runner import first_start
from one_rank import make_runner

pytestmark = pytest.mark.skipif(HAS_GPU, reason="it wants kernels that are interpreted")
CUDA: Any = SimpleNamespace(type="cuda")


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(compile_ahead, "can_compile_ahead", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")


def program(path: Path, **overrides: Any) -> str | None:
    config = engine_config(model_path=path, device="cuda", **overrides)
    return first_start.program_to_compile(config, CUDA)


def test_a_program_is_compiled_once(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model", num_hidden_layers=1)
    assert first_start.program_to_compile(engine_config(model_path=path), torch.device("cpu")) is None
    assert program(path, tensor_parallel_size=2) is None
    first = program(path)
    assert first is not None

    def run() -> None:
        assert torch.empty(1 << 16).count_nonzero() == torch.empty_like(torch.ones(1 << 16)).count_nonzero() == 0

    assert first_start.compile_kernels(first, CUDA, run) is None
    assert program(path) is program(path, replica=1, record_steps=True) is None
    assert program(path, max_num_seqs=7) is not None
    assert program(write_tiny_model(tmp_path / "other", num_hidden_layers=2)) is not None


def test_a_cache_that_takes_no_note_ends_no_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model", num_hidden_layers=1)
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert program(path) is None, "nothing is compiled ahead"
    assert first_start.compile_kernels("a program", CUDA, lambda: None) is None


def test_a_run_that_fails_is_noted_and_does_not_end_the_start(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model", num_hidden_layers=1)
    first = program(path)
    assert first is not None

    def fail() -> None:
        raise IndexError("index 7 is out of bounds\nfor dimension 0")

    note = first_start.compile_kernels(first, CUDA, fail)
    assert note is not None
    assert note.endswith("(IndexError: index 7 is out of bounds)")
    assert program(path) is None, "it would fail again"

    def is_too_large() -> None:
        raise LimitsTooHigh("lower max_num_seqs")

    with pytest.raises(LimitsTooHigh):
        first_start.compile_kernels(first, CUDA, is_too_large)


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_steps_without_launches_meet_no_index_out_of_range(
    family: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(TritonBackend, "unsupported", lambda case: [])
    path = write_tiny_model(tmp_path / "model", family, num_hidden_layers=1)
    runner = make_runner(
        path, "cpu", attention_backend="triton", max_num_seqs=4, max_model_len=64, block_size=16,
        max_num_batched_tokens=32, kv_cache_memory=1 << 22,
    )  # fmt: skip
    from triton.runtime.interpreter import InterpretedFunction

    left_out: list[str] = []
    monkeypatch.setattr(InterpretedFunction, "run", lambda kernel, *args, **kwargs: left_out.append(kernel.__name__))
    runner.device = CUDA
    runner._graph_shapes = [BatchShape(decode_rows=4), BatchShape(decode_rows=2, prefill_rows=1, prefill_tokens=8)]
    first = program(path)
    assert first is not None
    with torch.inference_mode():
        assert first_start.compile_kernels(first, CUDA, runner._run_steps_to_compile) is None
    assert {"segment_attention_kernel", "find_segments_kernel"} <= set(left_out)
