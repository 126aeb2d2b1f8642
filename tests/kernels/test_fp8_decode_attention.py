"""Decode attention over FP8 that goes straight to registers, simulated on the CPU. On a GPU it is held to attention
written out by tests/attention."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from gluon_registers import Pointer, block, run
from torch import Tensor

pytest.importorskip("triton")

from nvcli.kernels.triton import fp8_decode_attention
from nvcli.kernels.triton.attention_fold import ITEM_FIELDS, AttentionKind, Tile


def numbers(words: Tensor) -> tuple[Tensor, ...]:
    codes = words.contiguous().as_subclass(Tensor).view(torch.uint8).view(torch.float8_e4m3fn)
    return tuple(block(x) for x in codes.half().unflatten(-1, (-1, 4)).unbind(-1))


def attend(q: Tensor, keys: Tensor, values: Tensor, cap: float, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """q: [H, D]; keys, values: [keys, KV, D] → [H, D], and the log-sum-exp of the scores, [H]."""
    group = q.shape[0] // keys.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (keys, values))
    scores = torch.einsum("hd,khd->hk", q, keys) / math.sqrt(q.shape[1])
    scores = cap * torch.tanh(scores / cap) if cap else scores
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None]], dim=1)
    return torch.einsum("hk,khd->hd", scores.softmax(dim=1)[:, : len(keys)], values), scores.logsumexp(1)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size", "window", "soft_cap", "has_sinks", "tile", "spread"),
    [
        (2, 4, 128, 64, None, 0.0, False, 32, 1.0),
        (1, 4, 128, 64, None, 0.0, True, 16, 20.0),
        (1, 8, 64, 32, 50, 5.0, True, 32, 1.0),
        (3, 1, 128, 96, 33, 0.0, True, 32, 20.0),
        (1, 2, 64, 64, None, 0.0, False, 16, 1.0),
    ],
)
def test_attention(
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    soft_cap: float,
    has_sinks: bool,
    tile: int,
    spread: float,
) -> None:
    """Rows of one chunk and of several, and padding; what belongs to no key is NaN. With scores far apart, some tiles
    have one that is far above all before. One row's values are all zero, and some of another's."""
    generator = torch.Generator().manual_seed(0)
    lens = [1, 64, 201, 333, 0]
    columns = [-(-num_keys // block_size) for num_keys in lens]
    num_blocks = sum(columns) + 1
    blocks = (torch.randperm(sum(columns), generator=generator) + 1).split(columns)
    tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True).int()
    block_stride = block_size * kv_heads * (head_dim + 2)
    caches, exact = [], []
    for part in range(2):
        heads = torch.randn(num_blocks, block_size, kv_heads, head_dim, generator=generator).to(torch.float8_e4m3fn)
        scales = (torch.rand(num_blocks, block_size, kv_heads, generator=generator) * 10**part + 0.1).bfloat16()
        if part == 1:
            # As values that are all zero are stored.
            for places in ((blocks[2],), (blocks[3], slice(None, None, 7))):
                heads[places], scales[places] = torch.zeros((), dtype=heads.dtype), 1e-30 / 448
        exact.append(heads.float() * scales.float()[..., None])
        for blocks_of_row, num_keys in zip(blocks, lens, strict=True):
            for index in range(len(blocks_of_row) * block_size):
                if index >= num_keys or (window is not None and index < num_keys - window):
                    heads[blocks_of_row[index // block_size], index % block_size] = torch.nan
                    scales[blocks_of_row[index // block_size], index % block_size] = torch.nan
        codes = heads.view(torch.uint8).flatten(1)
        behind = scales.transpose(1, 2).contiguous().view(torch.uint8).flatten(1)
        caches.append(torch.cat([codes, behind], dim=1).flatten())
    items, partials = [], 0
    for row, num_keys in enumerate(lens):
        first_seen = max(0, num_keys - window) if window is not None else 0
        begins = list(range(first_seen // 64 * 64, max(num_keys, 1), 128)) or [0]
        for chunk, begin in enumerate(begins):
            end = min(begin + 128, num_keys)
            items.append([row, begin, end, len(begins), partials, chunk, row, first_seen])
        partials += len(begins) if len(begins) > 1 else 0
    num_heads = kv_heads * group
    q = torch.randn(len(lens), num_heads, head_dim, generator=generator) * spread
    sinks = torch.randn(num_heads, generator=generator) if has_sinks else None
    out, log_sums = torch.full_like(q, 7.0), torch.full(q.shape[:2], 7.0)
    arrivals = torch.zeros(len(lens) * kv_heads, dtype=torch.int32)
    fields = torch.tensor(items, dtype=torch.int32)
    run(
        fp8_decode_attention,
        "fp8_decode_attention_kernel",
        (kv_heads, len(items) + 1),
        {
            "_numbers_of_keys": numbers,
            "_numbers_of_values": numbers,
            "ITEM_FIELDS": ITEM_FIELDS.value,
            "_log2": torch.log2,
            "_transposed": lambda x: block(x.unflatten(0, (-1, 8)).transpose(1, 2).flatten(0, 1)),
        },
        Pointer(q.flatten()),
        Pointer(caches[0]),
        Pointer(caches[1]),
        Pointer(tables.flatten()),
        Pointer(q.flatten() if sinks is None else sinks),
        Pointer(out.view(-1)),
        Pointer(fields.flatten()),
        Pointer(torch.tensor([len(items)])),
        Pointer(log_sums.view(-1)),
        Pointer(torch.full((max(partials, 1) * num_heads * head_dim,), torch.nan)),
        Pointer(torch.full((max(partials, 1) * num_heads,), torch.nan)),
        Pointer(arrivals),
        window or 0,
        math.log2(math.e) / math.sqrt(head_dim),
        num_heads * head_dim,
        tables.shape[1],
        KIND=AttentionKind(
            num_kv_heads=kv_heads,
            group=group,
            head_dim=head_dim,
            block_size=block_size,
            block_stride=block_stride,
            has_window=window is not None,
            soft_cap=soft_cap * math.log2(math.e),
            has_sinks=has_sinks,
            is_invariant=False,
            loads_ahead=True,
            on_gpu=True,
        ),
        TILE=Tile(rows=8, keys=tile, num_warps=1, num_stages=1),
    )
    for row, num_keys in enumerate(lens[:-1]):
        first = max(0, num_keys - window) if window is not None else 0
        keys, values = (part[blocks[row]].flatten(0, 1)[first:num_keys] for part in exact)
        expected, log_sum = attend(q[row], keys, values, soft_cap, sinks)
        torch.testing.assert_close(out[row], expected, atol=2e-3 * float(expected.norm(dim=-1).max()), rtol=0)
        torch.testing.assert_close(log_sums[row] * math.log(2), log_sum, atol=2e-3, rtol=1e-3)
    assert not out[-1].any(), "padding attends to nothing"
    assert not arrivals.any()


def test_what_is_compiled() -> None:
    """The kernel alone, and the one whose result is merged with that of shared segments, which the simulation takes for
    one: Triton wants a name to keep its type and shape. A multiprocessor has room for 12 warps, and 16
    where there are many rows."""
    script = Path(__file__).with_name("fp8_decode_compile.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["launches"] == 4
    assert found["report"].count("Compiling entry function") == 4
    assert found["report"].count(" 0 bytes spill stores, 0 bytes spill loads") == 4
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", found["report"])]
    assert max(registers[:2]) <= 168
    assert max(registers[2:]) <= 128
