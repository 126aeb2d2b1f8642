"""The prefill kernel for Hopper, simulated on the CPU, as the assembler sees it, and how it is launched and chosen. On
a GPU it is held to attention written out by `tests/attention/test_gpu_backends.py`."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import weakref
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from attention_shapes import attention_shape
from gluon_simulator import Pointer, Simulator
from torch import Tensor

pytest.importorskip("triton")

from nvcli.kernels.triton import hopper_launch, hopper_prefill_kernel
from nvcli.kernels.triton.attention_launch import LayerInputs
from nvcli.kernels.triton.prefill_attention import PrefillAttention, PrefillKind
from nvcli.kernels.triton.prefill_choice import HOPPER_NOTE, SCRATCH_NOTE, prefill_kernel
from nvcli.kernels.triton.prefill_scratch import ScratchPrefillAttention
from nvcli.kernels.triton.prefill_tiles import TilePart

ROWS = 128


def list_tiles(chunks: list[tuple[int, int]], group: int, padding: int) -> Tensor:
    """What `PrefillTiles` lists for chunks (tokens, keys) in slots 0, 1, …: [tiles, ITEM_FIELDS]."""
    starts = [0, *accumulate(tokens for tokens, _ in chunks)]
    order = sorted(range(len(chunks)), key=lambda slot: -chunks[slot][1])
    of_chunks = [(slot, starts[slot], *chunks[slot]) for slot in order] + [(0, starts[-1], padding, 0)]
    return torch.tensor(
        [
            [slot, first, start, tokens, keys, 0, 0, 0]
            for slot, start, tokens, keys in of_chunks
            for first in reversed(range(0, tokens * group, ROWS))
        ]
    )


def attend(q: Tensor, keys: Tensor, values: Tensor, soft_cap: float, sinks: Tensor | None) -> Tensor:
    """q: [tokens, H, D], the last of [keys, KV, D] → [tokens, H, D]."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("thd,khd->htk", q, keys) / math.sqrt(q.shape[2])
    scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
    last_seen = torch.arange(len(q)) + len(keys) - len(q)
    scores = scores.masked_fill(torch.arange(len(keys)) > last_seen[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], dim=2)
    return torch.einsum("htk,khd->thd", scores.softmax(dim=2)[..., : len(keys)], values)


def simulate(
    q: Tensor,
    caches: Tensor,
    tables: Tensor,
    tiles: Tensor,
    out: Tensor,
    *,
    programs: int,
    soft_cap: float,
    sinks: Tensor | None,
    part: TilePart = TilePart.WHOLE,
    log_sums: Tensor | None = None,
) -> None:
    """Launch the kernel on tiles [tiles, ITEM_FIELDS]; caches: [2, blocks, block size, KV, D]."""
    _, _, block_size, kv_heads, head_dim = caches.shape
    heads = q.shape[1]
    k_matrix, v_matrix = caches.reshape(2, -1, kv_heads * head_dim)
    Simulator(hopper_prefill_kernel).launch(
        "hopper_prefill_kernel",
        programs,
        Pointer(q.flatten()),
        k_matrix,
        v_matrix,
        Pointer(v_matrix.flatten()),
        Pointer(out.view(-1)),
        Pointer(tables.flatten()),
        Pointer(tiles.flatten()),
        Pointer(torch.tensor([len(tiles)])),
        Pointer(q.flatten() if sinks is None else sinks),
        None if log_sums is None else Pointer(log_sums.view(-1)),
        math.log2(math.e) / math.sqrt(head_dim),
        heads * head_dim,
        tables.shape[1],
        NUM_KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        BLOCK_ROWS=block_size,
        SOFT_CAP=soft_cap * math.log2(math.e),
        HAS_SINKS=sinks is not None,
        IS_PREFIX=part is TilePart.PREFIX,
    )


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size", "soft_cap", "has_sinks", "programs", "chunks"),
    [
        (8, 2, 128, 64, 0.0, False, 3, [(1, 1), (33, 33), (200, 650), (70, 1000)]),
        (4, 4, 64, 256, 5.0, True, 5, [(100, 300), (130, 130)]),
        (5, 1, 128, 128, 0.0, False, 40, [(100, 300), (130, 513), (128, 128)]),
    ],
)
def test_attention(
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    soft_cap: float,
    has_sinks: bool,
    programs: int,
    chunks: list[tuple[int, int]],
) -> None:
    """Of chunks (tokens, keys) and 45 tokens of padding. Behind the last keys lies NaN."""
    generator = torch.Generator().manual_seed(0)
    padding = 45
    columns = [-(-keys // block_size) for _, keys in chunks]
    blocks = (torch.randperm(sum(columns), generator=generator) + 1).split(columns)
    tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True).int()
    caches = torch.randn(2, sum(columns) + 1, block_size, kv_heads, head_dim, generator=generator)
    for blocks_of_row, (_, keys) in zip(blocks, chunks, strict=True):
        caches[:, blocks_of_row[-1], (keys - 1) % block_size + 1 :] = torch.nan
    num_tokens = sum(tokens for tokens, _ in chunks)
    q = torch.randn(num_tokens + padding, heads, head_dim, generator=generator)
    sinks = torch.randn(heads, generator=generator) if has_sinks else None
    tiles = list_tiles(chunks, heads // kv_heads, padding)
    out = torch.full_like(q, 7.0)
    simulate(q, caches, tables, tiles, out, programs=programs, soft_cap=soft_cap, sinks=sinks)
    start = 0
    for blocks_of_row, (tokens, num_keys) in zip(blocks, chunks, strict=True):
        keys, values = caches[:, blocks_of_row].flatten(1, 2)[:, :num_keys]
        expected = attend(q[start : start + tokens], keys, values, soft_cap, sinks)
        torch.testing.assert_close(out[start : start + tokens], expected, atol=1e-5, rtol=1e-4)
        start += tokens
    assert not out[start:].any(), "padding attends to nothing"


@pytest.mark.parametrize(
    ("block_size", "prefix", "soft_cap", "has_sinks"), [(64, 320, 0.0, False), (128, 256, 5.0, True)]
)
def test_a_prefix_that_chunks_share(block_size: int, prefix: int, soft_cap: float, has_sinks: bool) -> None:
    """All of 73 tokens see all of the prefix; the log of each sum of weights is kept. Behind the prefix lies NaN."""
    heads, head_dim, num_tokens = 4, 64, 73
    generator = torch.Generator().manual_seed(0)
    num_blocks = prefix // block_size
    blocks = torch.randperm(num_blocks, generator=generator) + 1
    table = torch.cat([blocks, torch.tensor([num_blocks + 1])])[None].int()
    caches = torch.randn(2, num_blocks + 2, block_size, 1, head_dim, generator=generator)
    caches[:, num_blocks + 1] = torch.nan
    q = torch.randn(num_tokens, heads, head_dim, generator=generator)
    sinks = torch.randn(heads, generator=generator) if has_sinks else None
    out, log_sums = torch.full_like(q, 7.0), torch.full((num_tokens, heads), 7.0)
    tiles = list_tiles([(num_tokens, prefix)], heads, 0)
    simulate(
        q, caches, table, tiles, out, programs=2, soft_cap=soft_cap, sinks=sinks, part=TilePart.PREFIX,
        log_sums=log_sums,
    )  # fmt: skip
    keys, values = caches[:, blocks].flatten(1, 2)
    for token in range(num_tokens):
        expected = attend(q[token : token + 1], keys, values, soft_cap, sinks)
        torch.testing.assert_close(out[token : token + 1], expected, atol=1e-5, rtol=1e-4)
    scores = torch.einsum("thd,kd->thk", q, keys[:, 0]) / math.sqrt(head_dim)
    scores = soft_cap * torch.tanh(scores / soft_cap) if soft_cap else scores
    if sinks is not None:
        scores = torch.cat([scores, sinks[None, :, None].expand(num_tokens, -1, 1)], dim=2)
    torch.testing.assert_close(log_sums * math.log(2), scores.logsumexp(2), atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """What launches made of the kernel: of two layers, of the first once more, and of other caches."""
    script = Path(__file__).with_name("hopper_compile.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, script, "128", "4", "30.0"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_products_run_beside_other_work(compiled: dict[str, Any]) -> None:
    """ptxas says so where it waits for each matrix product, which halves the speed; registers that are spilled in the
    loop cost as much."""
    assert "Performance Loss" not in compiled["report"]
    spilled = re.findall(r"(\d+) bytes spill stores", compiled["report"])
    assert len(spilled) == 2, "one kernel for each part of the keys"
    assert max(map(int, spilled)) <= 300, "some are spilled around the loop, and none in it"


def test_launches_by_what_is_kept_are_those_that_triton_would_make(compiled: dict[str, Any]) -> None:
    """Also where a smaller cache lies in the place of another, and where hooks are set, as profilers do."""
    launches = compiled["kept"]
    assert launches == compiled["through_triton"]
    assert compiled["names"] == ["hopper_prefill_kernel"] * 2 * len(launches)
    first, second, third, smaller, elsewhere, of_prefix = launches
    q, k, v, v_cache = range(3, 7)
    assert [k, v, v_cache] == [place for place in range(len(first)) if first[place] != second[place]]
    assert [q] == [place for place in range(len(first)) if first[place] != third[place]]
    for launch, blocks in ((first, 3), (second, 3), (smaller, 2), (elsewhere, 3), (of_prefix, 3)):
        assert launch[v][0] == launch[v_cache]
        for described in (launch[k], launch[v]):
            assert described[1:] == [[blocks * 64, 8 * 128], [8 * 128, 1], [64, 64]]
    layer_bytes = 2 * 3 * 64 * 8 * 128 * 2
    assert [launch[k][0] - first[k][0] for launch in launches] == [0, layer_bytes, 0, 0, 2 * layer_bytes, 0]


class FakeKernel:
    """What is asked of a Triton kernel that only compiles: the arguments of each compilation and each launch."""

    def __init__(self) -> None:
        self.compiled: list[tuple[Any, ...]] = []
        self.launched: list[tuple[Any, ...]] = []

    def warmup(self, *arguments: Any, grid: Any, num_warps: int) -> FakeKernel:
        self.compiled.append(arguments)
        return self

    def __getitem__(self, grid: tuple[int, int, int]) -> Any:
        return lambda *arguments: self.launched.append(arguments)


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FakeKernel:
    fake = FakeKernel()
    monkeypatch.setattr(hopper_launch, "hopper_prefill_kernel", fake)
    return fake


def attend_in(
    cache: Tensor, attention: PrefillAttention, q: Tensor, log_sums: Tensor | None = None, **kind: Any
) -> None:
    part = TilePart.WHOLE if log_sums is None else TilePart.PREFIX
    planned: Any = SimpleNamespace(capacity=10, items=torch.zeros(10, 8), num_items=torch.zeros(1), part=part)
    tables = torch.zeros(4, 8, dtype=torch.int32)
    attention.run(LayerInputs(q, cache, cache, tables, 0.1, **kind), planned, torch.zeros_like(q), log_sums)


@pytest.fixture
def attention() -> PrefillAttention:
    return PrefillAttention(attention_shape(), PrefillKind.HOPPER)


def test_other_kinds_of_arguments_are_compiled_anew(kernel: FakeKernel, attention: PrefillAttention) -> None:
    """Above all addresses that are not aligned: what is compiled for those that are would read them wrongly."""
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


def test_what_is_kept_does_not_hold_the_memory_of_a_cache(kernel: FakeKernel, attention: PrefillAttention) -> None:
    """The warm-up has a cache of its own, whose memory the run's takes."""
    cache = torch.zeros(1, 64, 2, 64, dtype=torch.bfloat16)
    attend_in(cache, attention, torch.zeros(3, 8, 64, dtype=torch.bfloat16))
    kernel.compiled.clear()
    kernel.launched.clear()
    known = weakref.ref(cache)
    del cache
    assert known() is None


FP8 = torch.float8_e4m3fn
COPIES = ScratchPrefillAttention


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({}, PrefillKind.HOPPER),
        (
            {"head_dim": 64, "block_size": 256, "dtype": torch.float16, "kv_dtype": torch.float16},
            PrefillKind.HOPPER,
        ),
        ({"head_dim": 256}, None),
        ({"block_size": 32}, None),
        ({"kv_dtype": FP8}, COPIES),
        ({"kv_dtype": FP8, "head_dim": 64, "block_size": 192}, COPIES),
        ({"kv_dtype": FP8, "block_size": 32}, None),
        ({"kv_dtype": FP8, "dtype": torch.float16}, None),
        ({"kv_dtype": FP8, "has_window": True}, None),
        ({"has_window": True}, None),
        ({"batch_invariant": True}, None),
        ({"has_plain_blocks": False}, None),
    ],
)
def test_choice(change: dict[str, Any], wanted: PrefillKind | type | None) -> None:
    changes = change.copy()
    options = {"has_window": False, "batch_invariant": False, "has_plain_blocks": True}
    options |= {name: changes.pop(name) for name in options if name in changes}
    fallback = PrefillKind.INVARIANT if options["batch_invariant"] else PrefillKind.USUAL
    shape = attention_shape(**{"head_dim": 128, **changes})
    for capability, version, kind in (((9, 0), "3.6.0", wanted), ((9, 0), "4.0.0", None), ((10, 0), "3.6.0", None)):
        with (
            patch.object(torch.cuda, "get_device_capability", return_value=capability),
            patch("triton.__version__", version),
            patch.object(torch.cuda, "get_device_properties"),
        ):
            kernel, notes = prefill_kernel(shape, scratch_tokens=128, **options)
        assert (kernel.kind if isinstance(kernel, PrefillAttention) else type(kernel)) == (kind or fallback)
        if kind is None and wanted is not None and capability == (9, 0):
            (what_is_slower,) = notes
            assert what_is_slower.startswith("Triton 4.0.0: ")
            continue
        assert notes == {None: [], PrefillKind.HOPPER: [HOPPER_NOTE], COPIES: [SCRATCH_NOTE]}[kind]
