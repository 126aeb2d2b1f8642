"""The kernels of a model's first start are found by steps whose launches are left out, whatever these steps make of
memory that nothing has written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
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
from nvcli.kernels.triton.launch.compile_processes import CompileProcesses
from nvcli.worker.runner import compiled_programs
from nvcli.worker.runner.compiled_programs import Program, start_compilers
from nvcli.worker.runner.first_start import compile_kernels
from nvcli.worker.runner.graph_shapes import GraphShapes
from one_rank import make_runner

pytestmark = pytest.mark.skipif(HAS_GPU, reason="it wants kernels that are interpreted")
CUDA: Any = SimpleNamespace(type="cuda")
GPU = "a GPU"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(path))
    return path


@pytest.fixture
def processes() -> Iterator[CompileProcesses]:
    with closing(CompileProcesses()) as processes:
        yield processes


def test_a_program_is_compiled_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model", num_hidden_layers=1)

    def program(path: Path = path, **overrides: Any) -> Program | None:
        return Program.of(engine_config(model_path=path, **{"device": "cuda", **overrides}))

    assert program() is None, "kernels are interpreted here"
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(compiled_programs.os, "sched_getaffinity", lambda pid: {0, 1})
    assert program(device="cpu") is program(tmp_path / "nowhere") is None
    first = program()
    assert first is not None
    assert not first.has_notes()
    assert not first.was_compiled(GPU)
    assert first.takes_notes()
    first.note_compiled(GPU)
    assert first.was_compiled(GPU)
    assert not first.was_compiled("another GPU")
    assert first.has_notes()
    assert program(replica=1, record_steps=True) == first
    others = [
        program(max_num_seqs=7),
        program(tensor_parallel_size=2),
        program(write_tiny_model(tmp_path / "other", num_hidden_layers=2)),
    ]
    assert not any(other is None or other.has_notes() for other in others)


def test_processes_are_started_for_a_first_start_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = engine_config(model_path=write_tiny_model(tmp_path / "model", num_hidden_layers=1), device="cuda")
    assert start_compilers(config) is None, "kernels are interpreted here"
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(compiled_programs.os, "sched_getaffinity", lambda pid: {0, 1})
    started = start_compilers(config)
    assert started is not None
    started.close()
    program = Program.of(config)
    assert program is not None
    program.note_compiled(GPU)
    assert start_compilers(config) is None


def test_a_cache_that_takes_no_note_ends_no_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    program = Program("a program")
    assert not program.takes_notes()
    program.note_compiled(GPU)
    assert not program.was_compiled(GPU)


def test_a_run_that_fails_does_not_end_the_start(processes: CompileProcesses) -> None:
    def run() -> None:
        assert torch.empty(1 << 16).count_nonzero() == torch.empty_like(torch.ones(1 << 16)).count_nonzero() == 0

    assert compile_kernels(processes, CUDA, run) is None

    def fail() -> None:
        raise IndexError("index 7 is out of bounds\nfor dimension 0")

    note = compile_kernels(processes, CUDA, fail)
    assert note is not None
    assert note.endswith("(IndexError: index 7 is out of bounds)")

    def is_too_large() -> None:
        raise LimitsTooHigh("lower max_num_seqs")

    with pytest.raises(LimitsTooHigh):
        compile_kernels(processes, CUDA, is_too_large)


@pytest.mark.parametrize("family", ["Qwen3", "Qwen3Moe"])
def test_steps_without_launches_meet_no_index_out_of_range(
    family: str, processes: CompileProcesses, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
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
    runner._graph_shapes = GraphShapes(
        [BatchShape(decode_rows=4), BatchShape(decode_rows=2, prefill_rows=1, prefill_tokens=8)]
    )
    with torch.inference_mode():
        assert compile_kernels(processes, CUDA, runner._run_steps_to_compile) is None
    assert {"segment_attention_kernel", "find_segments_kernel"} <= set(left_out)
