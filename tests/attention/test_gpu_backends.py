"""Every backend on a GPU against attention written out, over all that a run may ask of it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from attention_setup import LAYER, Bench, History
from torch import Tensor

from nvcli.attention import selection
from nvcli.attention.backend import AttentionBackend, AttentionCase
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.selection import select_backend
from nvcli.messages import ForwardMode

pytestmark = pytest.mark.gpu

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
CASES = [
    # backend, head size, KV heads, heads for each, block size, dtype
    ("triton", 64, 2, 1, 16, BF16),
    ("triton", 64, 2, 4, 64, F16),
    ("triton", 64, 1, 2, 128, F32),
    ("triton", 128, 8, 2, 64, BF16),
    ("triton", 128, 8, 4, 16, BF16),
    ("triton", 128, 4, 8, 256, F16),
    ("triton", 128, 3, 3, 32, BF16),
    ("triton", 128, 2, 4, 32, F32),
    ("triton", 128, 1, 16, 1, BF16),
    ("triton", 256, 2, 2, 64, BF16),
    ("triton", 256, 1, 8, 16, F16),
    ("triton", 256, 1, 1, 64, F32),
    ("triton", 32, 2, 2, 24, F32),
    ("torch", 64, 2, 4, 16, F32),
    ("torch", 128, 8, 2, 64, BF16),
    ("torch", 256, 1, 8, 64, F16),
    ("flash-attn", 64, 2, 4, 256, F16),
    ("flash-attn", 128, 8, 2, 256, BF16),
    ("flash-attn", 128, 2, 8, 512, BF16),
    ("flash-attn", 256, 2, 1, 256, BF16),
    ("flash-attn:triton", 128, 2, 4, 256, BF16),
    ("flashinfer:triton", 128, 8, 2, 64, BF16),
    ("flashinfer", 64, 2, 4, 16, F16),
    ("flashinfer", 128, 8, 2, 64, BF16),
    ("flashinfer", 128, 1, 8, 1, BF16),
    ("flashinfer", 128, 2, 4, 256, F16),
    ("flashinfer", 256, 2, 1, 64, BF16),
]
CAPTURED = [case for case in CASES if case[0] != "torch" and case[1] == 128]


def make_bench(name: str, *shape: Any, num_tokens: int, max_num_seqs: int = 256) -> Bench:
    head_dim, num_kv_heads, ratio, block_size, dtype = shape

    def backend(case: AttentionCase) -> AttentionBackend:
        for part in name.split(":"):
            if reasons := selection._load(part).unsupported(case):
                pytest.skip("; ".join(reasons))
        return select_backend(name, case)[0]

    return Bench(
        backend,  # type: ignore[arg-type]
        num_kv_heads=num_kv_heads,
        ratio=ratio,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        num_tokens=num_tokens,
        device="cuda",
        max_num_seqs=max_num_seqs,
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes_and_step_kinds(case: tuple[Any, ...]) -> None:
    """Prompts, chunks behind a cached prefix, decode rows of 1 to 8k, and all of them at once."""
    bench = make_bench(*case, num_tokens=20_000)
    bench.kv_cache.data.fill_(100.0)  # what an earlier owner left
    a, b, c, d, e, f = (History() for _ in range(6))
    bench.step((a, 1), (b, 15), (c, 128), (d, 700))
    bench.step((a, 1), (c, 1), (b, 300), (e, 1))
    bench.fill(f, 8000)
    bench.step((f, 1), (d, 1), (b, 1), (e, 250), (a, 17))
    bench.step((f, 333), (e, 64))
    for _ in range(2):
        bench.step((a, 1), (b, 1), (c, 1), (d, 1), (e, 1), (f, 1))
    bench.step((f, 1))


@pytest.mark.parametrize("name", ["triton", "flash-attn", "flashinfer"])
@pytest.mark.parametrize(("num_rows", "longest"), [(256, 1600), (1030, 300)])
def test_many_decode_rows(name: str, num_rows: int, longest: int) -> None:
    """Each row gets its own answer back, shortest and longest too; a step of 1,030 rows is nothing special."""
    bench = make_bench(name, 128, 2, 4, 256, BF16, num_tokens=num_rows * (longest + 256), max_num_seqs=1100)
    rng = random.Random(0)
    histories = [History() for _ in range(num_rows)]
    for history in histories:
        bench.fill(history, rng.randint(1, longest))
    bench.fill(histories[-1], 4 * longest)
    bench.step(*((history, 1) for history in histories))
    rng.shuffle(histories)
    bench.step(*((history, 1) for history in histories))


def test_a_long_prompt_and_a_long_past() -> None:
    bench = make_bench("triton", 128, 2, 4, 64, BF16, num_tokens=140_000)
    prompt, long = History(), History()
    bench.step((prompt, 8192))
    bench.fill(long, 130_000)
    bench.step((long, 1), (prompt, 500))
    bench.step((long, 1), (prompt, 1))


class StaticDecode:
    """A decode batch in tensors that stay where they are, as a graph's batch does; some rows are padding."""

    def __init__(self, bench: Bench, num_rows: int, max_blocks: int) -> None:
        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=bench.device)

        spec = bench.spec
        self.bench, self.num_rows = bench, num_rows
        self.q = bench.random(num_rows, spec.num_heads, spec.head_dim)
        self.kv = bench.random(num_rows, spec.num_kv_heads, spec.head_dim)
        self.batch = ForwardBatch(
            mode=ForwardMode.DECODE,
            input_ids=ints(num_rows),
            positions=ints(num_rows),
            slot_mapping=ints(num_rows, dtype=torch.int64),
            block_tables=ints(num_rows, max_blocks),
            seq_lens=ints(num_rows),
            seq_lens_host=np.zeros(num_rows, dtype=np.int64),
            query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32, device=bench.device),
            logits_rows=torch.arange(num_rows, device=bench.device),
            num_decodes=num_rows,
            extend_lens=[],
            kv_cache=bench.kv_cache,
            backend=bench.backend,
        )
        bench.backend.prepare_capture(self.batch)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.run_host()
            self.run_device()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outs = self.run_device()

    def run_host(self) -> None:
        self.bench.backend.plan(self.batch)

    def run_device(self) -> list[Tensor]:
        backend = self.bench.backend
        backend.plan_on_device(self.batch)
        return [backend.forward(self.bench.spec, LAYER, self.q, self.kv, self.kv, self.batch) for _ in range(2)]

    def replay(self, histories: list[History]) -> None:
        batch = self.batch
        batch.seq_lens.zero_()
        batch.seq_lens_host[:] = 0
        batch.block_tables.zero_()
        self.q.copy_(self.bench.random(*self.q.shape))
        for row, history in enumerate(histories):
            table = torch.tensor(history.state.table, dtype=torch.int32)
            batch.seq_lens[row] = batch.seq_lens_host[row] = history.state.length
            batch.block_tables[row, : len(table)] = table
        self.run_host()
        self.graph.replay()
        for out in self.outs:
            assert out.isfinite().all(), "padding rows included"
            for row, history in enumerate(histories):
                self.bench.check(out[row : row + 1], self.q[row : row + 1], history)


@pytest.mark.parametrize("case", CAPTURED, ids=str)
def test_a_captured_decode_serves_any_lengths(case: tuple[Any, ...]) -> None:
    bench = make_bench(*case, num_tokens=40_000)
    assert bench.backend.captures_decode
    large, small = StaticDecode(bench, 24, 9000 // case[4] + 1), StaticDecode(bench, 3, 9000 // case[4] + 1)
    histories = [History() for _ in range(20)]
    for i, history in enumerate(histories):
        bench.fill(history, 1 + 13 * i)
    large.replay(histories)
    bench.fill(histories[3], 8500)
    large.replay(histories[:5])
    small.replay(histories[2:4])
    for history in histories[5:]:
        bench.fill(history, 700)
    bench.step((histories[0], 1), (histories[1], 40))  # an eager step in between
    large.replay(histories[::-1])


def test_a_graph_gives_what_the_eager_step_gives_bit_for_bit() -> None:
    bench = make_bench("triton", 128, 8, 2, 64, BF16, num_tokens=40_000)
    static = StaticDecode(bench, 16, 200)
    histories = [History() for _ in range(16)]
    for i, history in enumerate(histories):
        bench.fill(history, 1 + 211 * i)
    static.replay(histories)
    eager = static.run_device()
    for one, other in zip(static.outs, eager, strict=True):
        assert torch.equal(one, other)


def test_auto_on_a_gpu_takes_nothing_slow() -> None:
    case = AttentionCase(
        device=torch.device("cuda"), dtype=BF16, num_heads=16, num_kv_heads=8, head_dim=128, block_size=64
    )
    backend, notes = select_backend("auto", case)
    assert backend.name.split(":")[-1] == "triton"
    assert f"attention backend: {backend.name}" in notes
