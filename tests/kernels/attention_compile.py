"""Launches layers of attention by a driver that launches nothing (`hopper_compile.py`), and prints as JSON, for each
kind, what was launched and what the assembler says of the kernels: those for bfloat16, 8 KV heads of 128 for
four query heads each, and blocks of 64 tokens."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any
from unittest.mock import patch

import torch
from attention_shapes import attention_shape
from hopper_compile import FakeDriver, assemble
from triton import knobs
from triton.runtime.driver import driver

from nvcli.kernels.triton.attention import attention_launch, decode_attention, prefill_attention
from nvcli.kernels.triton.attention.attention_launch import LayerInputs
from nvcli.kernels.triton.attention.decode_attention import DecodeAttention
from nvcli.kernels.triton.attention.fp8_decode_attention import fp8_decode_attention_kernel
from nvcli.kernels.triton.attention.hopper_prefill_kernel import hopper_prefill_kernel
from nvcli.kernels.triton.attention.hopper_segment_kernel import hopper_segment_kernel
from nvcli.kernels.triton.attention.prefill_attention import PrefillAttention, PrefillKind
from nvcli.kernels.triton.attention.prefill_tiles import TileList, TilePart
from nvcli.kernels.triton.attention.segment_attention import SegmentAttention
from nvcli.kernels.triton.attention.segment_merge import merge_segments
from nvcli.kernels.triton.launch.kept_kernel import KeptKernel

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, ROWS = 32, 8, 128, 64, 40
FP8 = torch.float8_e4m3fn
ACTIVE = FakeDriver()
SHAPE = attention_shape(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
QUERIES = torch.zeros(2, ROWS, HEADS, HEAD_DIM, dtype=torch.bfloat16)
OUT, SINKS, LOG_SUMS = torch.zeros_like(QUERIES[0]), torch.zeros(HEADS), torch.zeros(ROWS * HEADS)
TABLES, LENS = torch.zeros(ROWS, 8, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)


def pool(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Keys and values of three layers: [layers, 2, blocks, ...]."""
    return torch.zeros(3, 2, 3, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype)


POOL, POOL_FP8 = pool(), pool(FP8)
WHOLE, PREFIX = (
    TileList(torch.zeros(10, 8, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), capacity=10, part=part)
    for part in (TilePart.WHOLE, TilePart.PREFIX)
)


class Checked(KeptKernel):
    """A kernel that is launched through Triton once more, which looks for what it compiled: that must be the same."""

    def launch(self, grid: int | tuple[int, ...], *arguments: object) -> None:
        super().launch(grid, *arguments)
        kept = ACTIVE.forget_launch()
        self._kernel[grid](*arguments, *self._constants, **self._options)
        assert ACTIVE.launches[-1] == kept, "what is kept is not what Triton would launch"


def chunks(kind: PrefillKind = PrefillKind.HOPPER) -> None:
    """Attend two layers, the first once more with other queries, a smaller cache in the place of the first, one
    elsewhere, and a prefix that chunks share."""
    with patch.object(prefill_attention, "num_multiprocessors", lambda device: 132):
        attention = PrefillAttention(SHAPE, kind)
        for layer, number, blocks in ((0, 0, 3), (1, 0, 3), (0, 1, 3), (0, 0, 2), (2, 0, 3)):
            k_cache, v_cache = POOL[layer, :, :blocks]
            inputs = LayerInputs(QUERIES[number], k_cache, v_cache, TABLES, 0.1, None, 30.0, SINKS)
            attention.run(inputs, WHOLE, OUT)
        attention.run(inputs._replace(q=QUERIES[0], k_cache=POOL[0, 0], v_cache=POOL[0, 1]), PREFIX, OUT, LOG_SUMS)


def usual_chunks() -> None:
    chunks(PrefillKind.USUAL)


def decode_rows() -> None:
    """Attend two layers with windows."""
    attention = DecodeAttention(SHAPE, windows=[100], max_rows=ROWS)
    for layer in POOL[:2]:
        attention.run(LayerInputs(QUERIES[0], *layer, TABLES, 0.1, 100), OUT)


def segments() -> None:
    """Attend two layers with segments, and the rows' own keys beside them."""
    shared = SegmentAttention(SHAPE, max_rows=ROWS, on_hopper=True)
    own = DecodeAttention(SHAPE, windows=[None], max_rows=ROWS, is_beside=True)
    shared_list, own_list = shared.work_list(None), own.work_list(None)
    for layer in POOL[:2]:
        inputs = LayerInputs(QUERIES[0], *layer, TABLES, 0.1, soft_cap=30.0)
        results = shared.run(inputs, shared_list, torch.arange(ROWS), LENS)
        own.run(inputs, OUT, own=(own_list, LOG_SUMS))
        merge_segments(OUT, LOG_SUMS, results)


def fp8_rows() -> None:
    """Attend some rows and many, each first without what shared segments ask for, then with it."""
    shape = attention_shape(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, kv_dtype=FP8)
    for rows in (40, 512):
        with patch.object(decode_attention, "_load_direct_kernel", lambda *args: fp8_decode_attention_kernel):
            attention = DecodeAttention(shape, windows=[None], max_rows=rows)
        q, tables = torch.zeros(rows, HEADS, HEAD_DIM, dtype=torch.bfloat16), torch.zeros(rows, 8, dtype=torch.int32)
        for own in (None, (attention.work_list(None), torch.zeros(rows, HEADS))):
            attention.run(LayerInputs(q, *POOL_FP8[0], tables, 0.1), torch.zeros_like(q), own)


def main() -> dict[str, Any]:
    driver.set_active(ACTIVE)
    names: list[str] = []
    knobs.runtime.launch_enter_hook.add(lambda metadata: names.append(metadata.get()["name"]))
    found: dict[str, Any] = {}
    kernels = {
        chunks: hopper_prefill_kernel,
        segments: hopper_segment_kernel,
        fp8_rows: fp8_decode_attention_kernel,
    }
    for launch in (chunks, usual_chunks, decode_rows, segments, fp8_rows):
        ACTIVE.launches.clear()
        ACTIVE.early.clear()
        names.clear()
        with patch.object(attention_launch, "KeptKernel", Checked):
            launch()
        report = assemble(kernels[launch]) if launch in kernels else ""
        of_launch = {"launches": ACTIVE.launches, "early": ACTIVE.early, "names": names, "report": report}
        found[launch.__name__] = deepcopy(of_launch)
    return found


if __name__ == "__main__":
    print(json.dumps(main()))
