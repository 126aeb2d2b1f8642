"""What counts as too little memory, and what a rank plans that follows one which ran out of it."""

from __future__ import annotations

import pytest
import torch

from fake_runners import engine_config
from nvcli.attention.kv_cache import KVCacheSpec
from nvcli.errors import CapacityError
from nvcli.sizing.memory_plan import NeededMemory
from nvcli.worker.runner.memory import (
    check_positions_fit,
    host_bytes_for_adapters,
    out_of_memory_line,
    plan_memory,
    reserve_contiguous,
)


@pytest.mark.parametrize(
    ("message", "line"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation.", "CUDA out of memory. Tried to"),
        ("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`", "CUDA error: out of memory"),
        ("Triton Error [CUDA]: out of memory", "Triton Error"),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "CUDA error: CUBLAS_STATUS"),
        ("NCCL error: unhandled cuda error\nLast error:\nCuda failure 'out of memory'", "Cuda failure"),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes", "[enforce fail]"),
    ],
)
def test_what_is_too_little_memory(message: str, line: str) -> None:
    found = out_of_memory_line(RuntimeError(message))
    assert found is not None
    assert found.startswith(line)


def test_what_came_of_too_little_memory() -> None:
    def capture() -> None:
        try:
            raise RuntimeError("CUDA out of memory.")
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    with pytest.raises(RuntimeError, match="capture") as caught:
        capture()
    assert out_of_memory_line(caught.value) == "CUDA out of memory."


@pytest.mark.parametrize("message", ["", "CUDA error: device-side assert triggered", "mat1 and mat2 shapes"])
def test_what_is_not(message: str) -> None:
    assert out_of_memory_line(RuntimeError(message)) is None


def test_ranks_that_start_anew_take_no_more_blocks_than_before() -> None:
    spec = KVCacheSpec(group_layers=((0, 1),), group_heads=((2, 64),), block_size=16, dtype=torch.float32)
    for before, expected in ((None, 101), (30, 31), (1000, 101)):
        config = engine_config(kv_cache_memory=101 * spec.block_bytes, max_num_seqs=64, kv_blocks_before=before)
        plan = plan_memory(config, spec, torch.device("cpu"), NeededMemory(), max_blocks=1000)
        assert plan.num_blocks == expected


def test_ranks_that_start_anew_beside_others_leave_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many blocks as before where nothing else has come; where something has, not all that is free."""
    spec = KVCacheSpec(group_layers=((0, 1),), group_heads=((2, 64),), block_size=16, dtype=torch.float32)
    total, held = 1000 * spec.block_bytes, 100 * spec.block_bytes
    needed = NeededMemory(weights=held, activations=10 * spec.block_bytes)

    def num_blocks(before: int | None, taken: int = 0) -> int:
        free = total - held - taken * spec.block_bytes
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held)
        config = engine_config(max_num_seqs=64, kv_blocks_before=before)
        return plan_memory(config, spec, torch.device("cuda"), needed, max_blocks=1000).num_blocks

    assert (before := num_blocks(None)) == 900 - 100 - 10
    assert num_blocks(before - 1) == before
    assert num_blocks(before - 1, taken=500) == 0.9 * 400 - 10


def test_ranks_of_all_replicas_share_the_host_memory_for_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nvcli.worker.runner.memory.available_ram", lambda: 80 << 30)
    config = engine_config(tensor_parallel_size=2, num_replicas=4)
    assert host_bytes_for_adapters(config) == 5 << 30


def test_a_start_does_not_fail_for_a_piece_that_only_large_steps_need(monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(num_bytes: int, **_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes.")

    monkeypatch.setattr(torch, "empty", empty)
    reserve_contiguous(1 << 30, torch.device("cuda"))


def test_more_positions_than_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """config.json may claim any number of positions, and every one has a row in a table."""
    monkeypatch.setattr("nvcli.worker.runner.memory.available_ram", lambda: 2 * 1000 * 64 * 4)
    check_positions_fit(engine_config(max_model_len=1000), 64, torch.device("cpu"))
    with pytest.raises(CapacityError, match=r"for 1,001 tokens take .* lower max_model_len, .*config\.json"):
        check_positions_fit(engine_config(max_model_len=1001), 64, torch.device("cpu"))
