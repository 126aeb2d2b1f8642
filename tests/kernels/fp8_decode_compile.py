"""Launches decode attention over FP8 that goes straight to registers where there is no GPU, by a driver that launches
nothing: for some rows and for many, each first without what shared segments ask for, then with it. Prints what the
assembler says of the kernels.

It runs in a process of its own, without Triton's interpreter, for heads of 128 and blocks of 64 tokens.
"""

from __future__ import annotations

import json
from unittest.mock import patch

import torch
from attention_shapes import attention_shape
from hopper_compile import BLOCK_SIZE, KV_HEADS, FakeDriver, assemble
from triton.runtime.driver import driver

from nvcli.kernels.triton import decode_attention
from nvcli.kernels.triton.attention_launch import LayerInputs
from nvcli.kernels.triton.decode_attention import DecodeAttention
from nvcli.kernels.triton.fp8_decode_attention import fp8_decode_attention_kernel

HEADS, HEAD_DIM = 32, 128


def launch(rows: int) -> None:
    with patch.object(decode_attention, "_load_direct_kernel", lambda *args, **kwargs: fp8_decode_attention_kernel):
        shape = attention_shape(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, kv_dtype=torch.float8_e4m3fn)
        attention = DecodeAttention(shape, windows=[None], max_rows=rows)
    cache = torch.zeros(2, 3, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.float8_e4m3fn)
    q = torch.zeros(rows, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    tables = torch.zeros(rows, 8, dtype=torch.int32)
    for own in (None, (attention.work_list(None), torch.zeros(rows, HEADS))):
        attention.run(LayerInputs(q, *cache, tables, 0.1), torch.zeros_like(q), own)


if __name__ == "__main__":
    noting = FakeDriver()
    driver.set_active(noting)
    for rows in (40, 512):
        launch(rows)
    print(json.dumps({"launches": len(noting.launches), "report": assemble(fp8_decode_attention_kernel)}))
