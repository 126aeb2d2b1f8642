"""Every backend on a GPU against attention written out, over all that a run may ask of it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from attention_setup import Bench, History, Step, Work
from torch import Tensor

from nvcli.attention import selection
from nvcli.attention.backend import AttentionBackend, AttentionCase
from nvcli.attention.forward_batch import BatchShape
from nvcli.attention.selection import select_backend
from nvcli.attention.spec import AttentionSpec
from nvcli.kernels.fp8_types import FP8

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
    ("triton", 256, 2, 8, 192, BF16),
    ("triton", 256, 1, 1, 64, F32),
    ("triton", 32, 2, 2, 24, F32),
    ("triton", 512, 4, 8, 64, BF16),
    ("triton", 512, 1, 2, 16, F32),
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
WINDOWS = [(None,), (100, None), (1, 4096, 100), (777,)]
DECODES = BatchShape(decode_rows=24)
FEW_DECODES = BatchShape(decode_rows=3)
CHUNKS = BatchShape(prefill_rows=6, prefill_tokens=700)
CHUNKS_OF_ONE_STEP = BatchShape(prefill_rows=6, prefill_tokens=3000)
MIXED = BatchShape(decode_rows=24, prefill_rows=6, prefill_tokens=700)
DRAFTS = BatchShape(decode_rows=12, tokens_per_row=4, prefill_rows=3, prefill_tokens=300)


def make_bench(
    name: str,
    *shape: Any,
    num_tokens: int,
    max_num_seqs: int = 256,
    windows: tuple[int | None, ...] = (None,),
    **options: Any,
) -> Bench:
    head_dim, num_kv_heads, ratio, block_size, dtype = shape

    def backend(case: AttentionCase) -> AttentionBackend:
        for part in name.split(":"):
            if reasons := selection.why_not(part, case):
                pytest.skip("; ".join(reasons))
        return select_backend(name, case)[0]

    # The packages read some of what they mask, which must be finite; our own backends read none of it.
    return Bench(
        backend,
        num_kv_heads=num_kv_heads,
        ratio=ratio,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        num_tokens=num_tokens,
        windows=windows,
        device="cuda",
        max_num_seqs=max_num_seqs,
        poison=float("nan") if name in ("triton", "torch") else 100.0,
        **options,
    )


@pytest.mark.parametrize(
    ("case", "kv_dtype"),
    [
        (("triton", 256, 1, 3, 64, BF16), None),
        (("triton", 128, 8, 4, 64, F16), None),
        (("triton", 128, 8, 4, 64, F16), FP8),
        (("torch", 64, 12, 1, 16, F32), None),
        (("torch", 64, 12, 1, 16, F32), FP8),
    ],
    ids=str,
)
def test_prompts_that_attend_both_ways(case: tuple[Any, ...], kv_dtype: torch.dtype | None) -> None:
    bench = make_bench(*case, num_tokens=20_000, windows=(None, 257, 65), both_ways=True, kv_dtype=kv_dtype)
    bench.leave_garbage(100.0)
    bench.step(*((History(), count) for count in (1, 15, 128, 700, 2048)), shape=CHUNKS_OF_ONE_STEP)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_shapes_and_step_kinds(case: tuple[Any, ...]) -> None:
    """Prompts, chunks behind a cached prefix, decode rows of 1 to 8k, and all of them at once."""
    bench = make_bench(*case, num_tokens=20_000)
    bench.leave_garbage(100.0)  # what an earlier owner left
    a, b, c, d, e, f = (History() for _ in range(6))
    bench.step((a, 1), (b, 15), (c, 128), (d, 700))
    bench.step((a, 1), (c, 1), (b, 300), (e, 1))
    bench.fill(f, 8000)
    bench.step((f, 1), (d, 1), (b, 1), (e, 250), (a, 17))
    bench.step((f, 333), (e, 64))
    for _ in range(2):
        bench.step((a, 1), (b, 1), (c, 1), (d, 1), (e, 1), (f, 1))
    bench.step((f, 1))


@pytest.mark.parametrize("kv_dtype", [None, FP8], ids=str)
@pytest.mark.parametrize(
    "case",
    [("triton", 128, 2, 8, 64, BF16), ("triton", 128, 4, 4, 16, BF16), ("triton", 64, 2, 4, 24, F32)],
    ids=str,
)
def test_numbers_that_tokens_add_to_scores(case: tuple[Any, ...], kv_dtype: torch.dtype | None) -> None:
    """At distances within a window, and up to some way into full attention."""
    bench = make_bench(*case, num_tokens=8000, windows=(512, None), bias_extent=512, kv_dtype=kv_dtype)
    bench.leave_garbage(100.0)
    a, b, c, d = (History() for _ in range(4))
    bench.step((a, 1), (b, 130), (c, 700))
    bench.fill(d, 2000)
    bench.step((d, 1), (a, 1), (b, 1), (c, 300), shape=BatchShape(decode_rows=5, prefill_rows=2, prefill_tokens=320))
    bench.step((a, 1), (b, 1), (c, 1), (d, 1))
    bench.step((d, 3), (c, 3), shape=BatchShape(decode_rows=2, tokens_per_row=3))


@pytest.mark.parametrize("windows", WINDOWS[1:], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_windows(case: tuple[Any, ...], windows: tuple[int | None, ...]) -> None:
    """Windows shorter and longer than chunks, prompts and tiles, in KV groups with blocks of their own; blocks that a
    window has left behind belong to others."""
    bench = make_bench(*case, num_tokens=20_000, windows=windows)
    bench.leave_garbage(100.0)
    a, b, c, d, e = (History() for _ in range(5))
    bench.step((a, 1), (b, 15), (c, 128), (d, 700))
    bench.step((a, 1), (c, 1), (b, 300), (d, 400))
    bench.fill(e, 8000)
    bench.step((e, 1), (d, 1), (b, 1), (c, 250), (a, 17))
    bench.step((e, 333), (c, 64))
    for _ in range(2):
        bench.step((a, 1), (b, 1), (c, 1), (d, 1), (e, 1))
    bench.step((e, 1))


@pytest.mark.parametrize("case", [case for case in CASES if case[1] in (128, 256)], ids=str)
def test_soft_caps_and_groups_of_other_head_sizes(case: tuple[Any, ...]) -> None:
    """Scores that a cap bends, and blocks that hold keys of several shapes, so that they do not lie side by side."""
    head_dim = case[1]
    bench = make_bench(*case, num_tokens=20_000, windows=(100, None), head_dims=(head_dim // 2, head_dim), soft_cap=0.7)
    bench.leave_garbage(100.0)
    a, b, c, d = (History() for _ in range(4))
    bench.step((a, 1), (b, 15), (c, 128), (d, 700))
    bench.fill(d, 6000)
    bench.step((d, 1), (a, 1), (b, 300), (c, 40))
    bench.step((a, 1), (b, 1), (c, 1), (d, 1))


@pytest.mark.parametrize(
    "case", [*(case for case in CASES if case[1] == 64 and ":" not in case[0]), ("triton", 64, 8, 8, 64, BF16)], ids=str
)
def test_sinks(case: tuple[Any, ...]) -> None:
    """Each head's sink counts once in each softmax, also in rows that are cut."""
    bench = make_bench(*case, num_tokens=20_000, windows=(128, None), has_sinks=True)
    bench.leave_garbage(100.0)
    a, b, c, d = (History() for _ in range(4))
    bench.step((a, 1), (b, 15), (c, 128), (d, 700))
    bench.fill(d, 6000)
    bench.step((d, 1))
    bench.step((d, 1), (a, 1), (b, 300), (c, 40))
    bench.step((a, 1), (b, 1), (c, 1), (d, 1))


@pytest.mark.parametrize("case", [case for case in CASES if case[1] == 128], ids=str)
def test_padding_and_rows_of_several_tokens(case: tuple[Any, ...]) -> None:
    bench = make_bench(*case, num_tokens=20_000, windows=(None, 33))
    a, b, c = (History() for _ in range(3))
    bench.fill(a, 2000)
    bench.step((b, 30), (c, 50), shape=BatchShape(prefill_rows=5, prefill_tokens=300))
    bench.step((a, 1), (b, 1), shape=BatchShape(decode_rows=5))
    bench.step((a, 1), (b, 1), (c, 30), shape=BatchShape(decode_rows=3, prefill_rows=4, prefill_tokens=99))
    bench.step((a, 4), (b, 4), shape=BatchShape(decode_rows=2, tokens_per_row=4))
    bench.step((a, 4), (b, 4), (c, 25), shape=DRAFTS)


SMALLER = {"value_dim": 128, "windows": (None, 129), "has_sinks": True}


@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        (("triton", 576, 1, 16, 64, BF16), {"value_dim": 512, "has_values": False}),
        (("triton", 576, 1, 20, 64, BF16), {"value_dim": 512, "has_values": False}),
        (("triton", 576, 1, 40, 16, F16), {"value_dim": 512, "has_values": False}),
        (
            ("triton", 512, 1, 64, 64, BF16),
            {"value_dim": 512, "has_values": False, "windows": (128, None), "has_sinks": True},
        ),
        (("triton", 192, 4, 16, 64, BF16), SMALLER),
        (("triton", 192, 1, 8, 16, F16), SMALLER),
    ],
    ids=str,
)
def test_values_of_another_size_than_their_keys(case: tuple[Any, ...], sizes: dict[str, Any]) -> None:
    """Prompts, chunks, long rows that are cut into chunks, and rows of several tokens; values are the first numbers of
    their keys, or smaller than these."""
    bench = make_bench(*case, num_tokens=20_000, **sizes)
    bench.leave_garbage(float("nan"))
    a, b, c, d = (History() for _ in range(4))
    bench.step((a, 1), (b, 15), (c, 300), shape=BatchShape(prefill_rows=4, prefill_tokens=400))
    bench.fill(d, 8000)
    bench.step((a, 1), (d, 1), (c, 1), (b, 250), shape=BatchShape(decode_rows=4, prefill_rows=2, prefill_tokens=300))
    bench.step((d, 1))
    bench.step((a, 4), (b, 4), (d, 4), (c, 100), shape=DRAFTS)


@pytest.mark.parametrize("windows", [(None,), (200,)], ids=str)
@pytest.mark.parametrize("name", ["triton", "flash-attn", "flashinfer"])
@pytest.mark.parametrize(("num_rows", "longest"), [(256, 1600), (1030, 300)])
def test_many_decode_rows(name: str, num_rows: int, longest: int, windows: tuple[int | None, ...]) -> None:
    """Each row gets its own answer back, shortest and longest too; a step of 1,030 rows is nothing special."""
    num_tokens = num_rows * (longest + 256)
    bench = make_bench(name, 128, 2, 4, 256, BF16, num_tokens=num_tokens, max_num_seqs=1100, windows=windows)
    rng = random.Random(0)
    histories = [History() for _ in range(num_rows)]
    for history in histories:
        bench.fill(history, rng.randint(1, longest))
    bench.fill(histories[-1], 4 * longest)
    bench.step(*((history, 1) for history in histories))
    rng.shuffle(histories)
    bench.step(*((history, 1) for history in histories))


@pytest.mark.parametrize("windows", [(None,), (5000,)], ids=str)
def test_a_long_prompt_and_a_long_past(windows: tuple[int | None, ...]) -> None:
    bench = make_bench("triton", 128, 2, 4, 64, BF16, num_tokens=140_000, windows=windows)
    prompt, long = History(), History()
    bench.step((prompt, 8192))
    bench.fill(long, 130_000)
    bench.step((long, 1), (prompt, 500))
    bench.step((long, 1), (prompt, 1))


class Captured:
    """A graph of a step of some shape, which any work that fits the shape is copied into before a replay."""

    def __init__(self, bench: Bench, shape: BatchShape, max_blocks: int, *work: Work) -> None:
        """work: what the batch holds while it is captured."""
        self.bench, self.shape = bench, shape
        self.table_shape = (40, max_blocks)
        self.step = bench.batch(*work, shape=shape, table_shape=self.table_shape)
        bench.backend.prepare_capture(self.step.batch)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            bench.backend.plan(self.step.batch)
            self.run_device()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outs = self.run_device()

    def run_device(self) -> list[Tensor]:
        self.bench.backend.plan_on_device(self.step.batch)
        outs = self.step.forward()
        self.step.forward()  # a second layer finds everything as the first did
        return outs

    def replay(self, *work: Work) -> Step:
        """Put the work into the captured batch, run the graph and compare."""
        new, old = self.bench.batch(*work, shape=self.shape, table_shape=self.table_shape), self.step
        for name in ("slots", "block_tables", "seq_lens", "query_start_loc"):
            getattr(old.batch, name).copy_(getattr(new.batch, name))
        old.batch.num_tokens_host[:] = new.batch.num_tokens_host
        old.batch.seq_lens_host[:] = new.batch.seq_lens_host
        for old_inputs, new_inputs in zip(old.inputs, new.inputs, strict=True):
            for old_tensor, new_tensor in zip(old_inputs, new_inputs, strict=True):
                old_tensor.copy_(new_tensor)
        self.bench.backend.plan(old.batch)
        for out in self.outs:
            out.fill_(float("nan"))
        self.graph.replay()
        new.check(self.outs)
        return new


@pytest.mark.parametrize("windows", [(None,), (100, None)], ids=str)
@pytest.mark.parametrize("case", CAPTURED, ids=str)
def test_a_captured_decode_serves_any_lengths(case: tuple[Any, ...], windows: tuple[int | None, ...]) -> None:
    bench = make_bench(*case, num_tokens=60_000, windows=windows)
    assert bench.backend.can_capture(DECODES)
    max_blocks = 10_000 // case[4] + 1
    histories = [History() for _ in range(20)]
    for i, history in enumerate(histories):
        bench.fill(history, 1 + 13 * i)
    large = Captured(bench, DECODES, max_blocks, (histories[0], 1))
    small = Captured(bench, FEW_DECODES, max_blocks, (histories[0], 1))
    large.replay(*((history, 1) for history in histories))
    bench.fill(histories[3], 8500)
    large.replay(*((history, 1) for history in histories[:5]))
    small.replay(*((history, 1) for history in histories[2:4]))
    for history in histories[5:]:
        bench.fill(history, 700)
    bench.step((histories[0], 1), (histories[1], 40))  # an eager step in between
    large.replay(*((history, 1) for history in histories[::-1]))


@pytest.mark.parametrize("windows", [(None,), (100, None)], ids=str)
@pytest.mark.parametrize("case", CAPTURED, ids=str)
@pytest.mark.parametrize("shape", [CHUNKS, MIXED, DRAFTS], ids=["chunks", "mixed", "drafts"])
def test_captured_chunks_serve_any_batch(
    case: tuple[Any, ...], shape: BatchShape, windows: tuple[int | None, ...]
) -> None:
    """A graph of chunks, alone or beside decode rows, serves other rows, lengths and numbers of tokens."""
    bench = make_bench(*case, num_tokens=60_000, windows=windows)
    if not bench.backend.can_capture(shape):
        assert "flashinfer" in case[0]
        pytest.skip("FlashInfer's prefill is planned on the host")
    first, fresh, grown, long = (History() for _ in range(4))
    decodes = [History() for _ in range(10)] if shape.decode_rows else []
    for i, history in enumerate(decodes):
        bench.fill(history, 20 + 131 * i)
    rows = [(history, shape.tokens_per_row) for history in decodes]
    captured = Captured(bench, shape, 10_000 // case[4] + 1, (first, 5))
    captured.replay(*rows, (fresh, 300))
    captured.replay(*rows[:3], (grown, 100), (fresh, 7), (first, 150))
    bench.fill(long, 8000)
    captured.replay(*rows[::-1], (grown, 9), (long, 280), (fresh, 1))
    bench.step((first, 1), (long, 40))  # an eager step in between
    captured.replay((long, 3), (fresh, 40))
    captured.replay(*rows, (first, 1))


@pytest.mark.parametrize("windows", [(None,), (300,)], ids=str)
def test_a_graph_gives_what_the_eager_step_gives_bit_for_bit(windows: tuple[int | None, ...]) -> None:
    bench = make_bench("triton", 128, 8, 2, 64, BF16, num_tokens=40_000, windows=windows)
    histories = [History() for _ in range(16)]
    for i, history in enumerate(histories):
        bench.fill(history, 1 + 211 * i)
    chunk = History()
    captured = Captured(bench, MIXED, 200, (histories[0], 1), (chunk, 30))
    captured.replay(*((history, 1) for history in histories), (chunk, 100))
    eager = captured.run_device()
    for one, other in zip(captured.outs, eager, strict=True):
        assert torch.equal(one, other)


def test_auto_on_a_gpu_takes_nothing_slow() -> None:
    spec = AttentionSpec(num_heads=16, num_kv_heads=8, head_dim=128, scale=0.1)
    case = AttentionCase(device=torch.device("cuda"), dtype=BF16, specs=(spec,), block_size=64)
    backend, notes = select_backend("auto", case)
    assert backend.name.split(":")[-1] == "triton"
    assert f"attention backend: {backend.name}" in notes
