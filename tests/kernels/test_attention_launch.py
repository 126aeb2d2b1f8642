"""How attention is launched, what the assembler says of its kernels for Hopper GPUs, and when these are chosen. What
they compute is held to attention written out by `tests/attention`."""

from __future__ import annotations

import json
import re
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attention_shapes import attention_shape

pytest.importorskip("triton")

from compiling_process import run_compiling
from nvcli.kernels.triton.attention import hopper_prefill_kernel
from nvcli.kernels.triton.attention.attention_launch import LayerInputs
from nvcli.kernels.triton.attention.prefill_attention import PrefillAttention, PrefillKind
from nvcli.kernels.triton.attention.prefill_choice import HOPPER_NOTE, SCRATCH_NOTE, attends_segments, prefill_kernel
from nvcli.kernels.triton.attention.prefill_scratch import ScratchPrefillAttention
from nvcli.kernels.triton.attention.prefill_tiles import TileList, TilePart


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """What is launched and compiled for each kind of attention, all of it as Triton itself would."""
    done = run_compiling(Path(__file__).with_name("attention_compile.py"))
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(("kind", "most_spilled"), [("chunks", [300] * 2), ("segments", [300]), ("fp8_rows", [0] * 4)])
def test_products_run_beside_other_work(compiled: dict[str, Any], kind: str, most_spilled: list[int]) -> None:
    """ptxas says so where it waits for each matrix product, which halves the speed; registers that are spilled in the
    loop cost as much, and some are around it."""
    report = compiled[kind]["report"]
    assert "Performance Loss" not in report
    spilled = map(int, re.findall(r"(\d+) bytes spill stores", report))
    assert all(count <= most for count, most in zip(spilled, most_spilled, strict=True))


def test_multiprocessors_have_room_for_many_programs_of_decode_rows(compiled: dict[str, Any]) -> None:
    """There is room for 12 programs, and for 16 where there are many rows."""
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", compiled["fp8_rows"]["report"])]
    assert max(registers[:2]) <= 168
    assert max(registers[2:]) <= 128


def test_what_is_kept_serves_other_layers_and_caches(compiled: dict[str, Any]) -> None:
    """It also serves a smaller cache in the place of another, and hooks that are set, as profilers do."""
    found = compiled["chunks"]
    assert found["names"] == ["hopper_prefill_kernel"] * 2 * len(found["launches"])
    first, second, third, smaller, elsewhere, of_prefix = found["launches"]
    q, k, v = range(3, 6)
    v_cache = 8
    assert [k, v, v_cache] == [place for place in range(len(first)) if first[place] != second[place]]
    assert [q] == [place for place in range(len(first)) if first[place] != third[place]]
    for launch, blocks in ((first, 3), (second, 3), (smaller, 2), (elsewhere, 3), (of_prefix, 3)):
        assert launch[v][0] == launch[v_cache]
        for described in (launch[k], launch[v]):
            assert described[1:] == [[blocks * 64, 8 * 128], [8 * 128, 1], [64, 64]]
    layer_bytes = 2 * 3 * 64 * 8 * 128 * 2
    assert [launch[k][0] - first[k][0] for launch in found["launches"]] == [0, layer_bytes, 0, 0, 2 * layer_bytes, 0]


def test_own_keys_begin_before_segments_have_ended(compiled: dict[str, Any]) -> None:
    """The merge of both waits for their end."""
    assert compiled["segments"]["early"] == [False, True, False] * 2
    assert compiled["segments"]["names"][2:5] == ["decode_attention_kernel"] * 2 + ["merge_segments_kernel"]


class FakeKernel:
    """A Triton kernel that notes the arguments of each compilation and each launch."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def warmup(self, *arguments: Any, **options: Any) -> FakeKernel:
        self.compiled.append(arguments)
        return self

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.launched.append(arguments)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    fake = FakeKernel()
    monkeypatch.setattr(hopper_prefill_kernel, "hopper_prefill_kernel", fake)
    return fake


def attend_in(cache: torch.Tensor, attention: PrefillAttention, q: torch.Tensor, **kind: Any) -> None:
    log_sums = kind.pop("log_sums", None)
    part = TilePart.WHOLE if log_sums is None else TilePart.PREFIX
    tiles = TileList(torch.zeros(10, 8), torch.zeros(1), capacity=10, part=part)
    tables = torch.zeros(4, 8, dtype=torch.int32)
    attention.run(LayerInputs(q, cache, cache, tables, 0.1, **kind), tiles, torch.zeros_like(q), log_sums)


def test_other_kinds_of_arguments_are_compiled_anew(kernel: FakeKernel) -> None:
    """Above all addresses that are not aligned: what is compiled for those that are would read them wrongly."""
    attention = PrefillAttention(attention_shape(), PrefillKind.HOPPER)
    numbers, sinks = torch.zeros(8 * 512 + 8, dtype=torch.bfloat16), torch.zeros(12)
    kinds: list[tuple[int, dict[str, Any]]] = [
        (0, {}), (1, {}), (0, {"soft_cap": 20.0}), (0, {"soft_cap": 30.0}), (0, {"sinks": sinks[:8]}),
        (0, {"sinks": sinks[1:9]}), (0, {"log_sums": torch.zeros(64)}), (0, {"log_sums": torch.zeros(65)[1:]}),
    ]  # fmt: skip
    for count, (first, kind) in enumerate(kinds, start=1):
        for tokens in (8, 5):
            q = numbers[first : first + tokens * 512].view(tokens, 8, 64)
            attend_in(torch.zeros(3, 64, 2, 64, dtype=torch.bfloat16), attention, q, **kind)
        assert len(kernel.compiled) == count
    assert len(kernel.launched) == 2 * len(kinds)


def test_what_is_kept_does_not_hold_the_memory_of_a_cache(kernel: FakeKernel) -> None:
    """The warm-up has a cache of its own, whose memory the run's takes."""
    attention = PrefillAttention(attention_shape(), PrefillKind.HOPPER)
    cache = torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16)
    attend_in(cache, attention, torch.zeros(3, 8, 64, dtype=torch.bfloat16))
    kernel.compiled.clear()
    kernel.launched.clear()
    known = weakref.ref(cache)
    del cache
    assert known() is None


FP8 = torch.float8_e4m3fn
HOPPER, COPIES = PrefillKind.HOPPER, ScratchPrefillAttention


@pytest.mark.parametrize(
    ("change", "wanted", "reads_segments"),
    [
        ({}, HOPPER, True),
        ({"head_dim": 64, "block_size": 256, "dtype": torch.float16, "kv_dtype": torch.float16}, HOPPER, True),
        ({"num_heads": 258}, HOPPER, False),  # a tile of 128 has no room for one row's heads
        ({"head_dim": 256}, HOPPER, False),
        ({"head_dim": 256, "kv_dtype": FP8}, None, False),
        ({"head_dim": 512}, None, False),
        ({"block_size": 32}, None, False),
        ({"kv_dtype": FP8}, COPIES, False),
        ({"kv_dtype": FP8, "head_dim": 64, "block_size": 192}, COPIES, False),
        ({"kv_dtype": FP8, "block_size": 32}, None, False),
        ({"kv_dtype": FP8, "dtype": torch.float16}, None, False),
        ({"kv_dtype": FP8, "has_window": True}, None, False),
        ({"has_window": True}, None, False),
        ({"both_ways": True}, None, False),
        ({"batch_invariant": True}, None, False),
        ({"has_plain_blocks": False}, HOPPER, True),
        ({"has_plain_blocks": False, "kv_dtype": FP8}, None, False),
        ({"has_whole_rows": False}, None, False),
    ],
)
def test_choice(change: dict[str, Any], wanted: PrefillKind | type | None, reads_segments: bool) -> None:
    changes = change.copy()
    false = dict.fromkeys(("has_window", "both_ways", "batch_invariant"), False)
    options = {**false, "has_plain_blocks": True, "has_whole_rows": True}
    options |= {name: changes.pop(name) for name in options if name in changes}
    fallback = PrefillKind.INVARIANT if options["batch_invariant"] else PrefillKind.USUAL
    shape = attention_shape(**{"head_dim": 128, **changes})
    for capability, version, kind in (((9, 0), "3.6.0", wanted), ((9, 0), "4.0.0", None), ((10, 0), "3.6.0", None)):
        with (
            patch.object(torch.cuda, "get_device_capability", return_value=capability),
            patch("triton.__version__", version),
        ):
            kernel, notes = prefill_kernel(shape, scratch_tokens=128, **options)
        assert (kernel.kind if isinstance(kernel, PrefillAttention) else type(kernel)) == (kind or fallback)
        assert attends_segments(kernel) == (reads_segments and kind is HOPPER)
        if kind is None and wanted is not None and capability == (9, 0):
            (what_is_slower,) = notes
            assert what_is_slower.startswith("Triton 4.0.0: ")
            continue
        assert notes == {None: [], HOPPER: [HOPPER_NOTE], COPIES: [SCRATCH_NOTE]}[kind]
