"""Launches a layer of decode attention with shared segments as on a Hopper GPU, by a driver that launches nothing, and
prints which kernels were launched, which of them may begin before the one before has ended, and what the assembler says
of the kernel for segments.

It runs in a process of its own, without Triton's interpreter, for heads of 128 in bfloat16 and blocks of 64 tokens.
"""

from __future__ import annotations

import json

import torch
from attention_shapes import attention_shape
from hopper_compile import BLOCK_SIZE, KV_HEADS, FakeDriver, assemble
from triton import knobs
from triton.runtime.driver import driver

from nvcli.kernels.triton.attention_launch import LayerInputs
from nvcli.kernels.triton.decode_attention import DecodeAttention
from nvcli.kernels.triton.hopper_segment_kernel import hopper_segment_kernel
from nvcli.kernels.triton.segment_attention import SegmentAttention
from nvcli.kernels.triton.segment_merge import merge_segments

HEADS, HEAD_DIM, ROWS = 32, 128, 40
CPU = torch.device("cpu")


class Driver(FakeDriver):
    """It notes also which launches may begin before the one before has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.early: list[bool] = []

    def launcher_cls(self, src: object, metadata: object) -> object:
        launch = super().launcher_cls(src, metadata)
        assert callable(launch)

        def noted(*args: object) -> None:
            self.early.append(metadata.launch_pdl)  # type: ignore[attr-defined]
            launch(*args)

        return noted


def launch(active: Driver) -> list[str]:
    """Attend two layers, and return the names of the kernels."""
    driver.set_active(active)
    shape = attention_shape(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    shared = SegmentAttention(shape, max_rows=ROWS, on_hopper=True)
    own = DecodeAttention(shape, windows=[None], max_rows=ROWS, is_beside=True)
    shared_list, own_list = shared.work_list(None), own.work_list(None)
    caches = torch.zeros(2, 2, 3, BLOCK_SIZE, KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    q = torch.zeros(ROWS, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    out, log_sums = torch.zeros_like(q), torch.zeros(ROWS, HEADS)
    tables, lens = torch.zeros(ROWS, 8, dtype=torch.int32), torch.zeros(ROWS, dtype=torch.int32)
    names: list[str] = []
    knobs.runtime.launch_enter_hook.add(lambda metadata: names.append(metadata.get()["name"]))
    for layer in caches:
        inputs = LayerInputs(q, *layer, tables, 0.1, soft_cap=30.0)
        results = shared.run(inputs, shared_list, torch.arange(ROWS), lens)
        own.run(inputs, out, own=(own_list, log_sums))
        merge_segments(out, log_sums, results)
    return names


if __name__ == "__main__":
    noting = Driver()
    print(json.dumps({"names": launch(noting), "early": noting.early, "report": assemble(hopper_segment_kernel)}))
