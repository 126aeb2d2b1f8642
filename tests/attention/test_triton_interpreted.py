"""The triton backend's kernels on the CPU, in Triton's interpreter: float32, small, and exact in what they cover."""

from __future__ import annotations

import os
import random
from functools import partial

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("test_gpu_backends runs the compiled kernels here", allow_module_level=True)
pytest.importorskip("triton")
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined; without a GPU nothing else uses Triton

from attention_setup import LAYER, History
from attention_setup import Bench as AnyBench

from nvcli.attention.triton_backend import TritonBackend
from nvcli.kernels.triton.decode_attention import plan_decode_kernel

Bench = partial(AnyBench, TritonBackend)
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning")  # the interpreter


@pytest.mark.parametrize(
    ("head_dim", "num_kv_heads", "ratio", "block_size"),
    [(64, 2, 1, 64), (64, 1, 8, 1), (128, 2, 2, 16), (256, 1, 4, 32), (16, 1, 16, 4), (32, 3, 3, 24), (64, 1, 2, 256)],
)
def test_shapes_and_step_kinds(head_dim: int, num_kv_heads: int, ratio: int, block_size: int) -> None:
    """Prompts, chunks behind a cached prefix, decode rows of all lengths, and all of them at once."""
    bench = Bench(num_kv_heads=num_kv_heads, ratio=ratio, head_dim=head_dim, block_size=block_size)
    bench.kv_cache.data.fill_(float("nan"))  # what an earlier owner left must not be read
    a, b, c, d = (History() for _ in range(4))
    bench.step((a, 1), (b, 15), (c, 33), (d, 65))
    bench.step((a, 1), (c, 1), (b, 20), (d, 31))
    bench.fill(d, 150)
    bench.step((d, 1), (c, 1), (a, 1), (b, 2))
    bench.step((a, 1), (b, 1), (c, 1), (d, 1))


def test_a_row_of_many_chunks() -> None:
    """A lone sequence is cut as far as the list allows, and its parts are put together again, layer after layer."""
    bench = Bench(ratio=2, block_size=32, num_tokens=3000)
    history = History()
    bench.fill(history, 2500)
    for _ in range(2):
        batch, q, k, v = bench.batch((history, 1))
        for _ in range(2):
            bench.check(bench.backend.forward(bench.spec, LAYER, q, k, v, batch), q, history)


@pytest.mark.parametrize("block_size", [16, 64])
def test_slices_behind_a_long_prefix(block_size: int) -> None:
    """Long enough that the keys which all of a tile's rows see are attended without masks."""
    bench = Bench(num_kv_heads=2, ratio=2, block_size=block_size, num_tokens=3000)
    bench.kv_cache.data.fill_(float("nan"))
    a, b = History(), History()
    bench.fill(a, 700)
    bench.fill(b, 1001)
    bench.step((a, 40), (b, 3))


def test_padding_rows_are_harmless() -> None:
    bench = Bench(num_kv_heads=2, ratio=2)
    history = History()
    bench.fill(history, 300)
    batch, q, k, v = bench.batch((history, 1))
    batch.seq_lens = torch.tensor([0, 301, 1, 0], dtype=torch.int32)
    batch.seq_lens_host = np.array([0, 301, 1, 0])
    batch.block_tables = torch.zeros(4, batch.block_tables.shape[1], dtype=torch.int32)
    batch.block_tables[1, : len(history.state.table)] = torch.tensor(history.state.table)
    batch.num_decodes = 4
    bench.backend.plan(batch)
    bench.backend.plan_on_device(batch)
    four = [torch.cat([x] * 4) for x in (q, k, v)]
    out = bench.backend.forward(bench.spec, LAYER, *four, batch)
    bench.check(out[1:2], q, history)
    assert out.isfinite().all()


@pytest.mark.parametrize(("num_rows", "longest"), [(1, 5000), (7, 0), (40, 300), (270, 3000)])
def test_the_work_list_covers_every_key_once_longest_first(num_rows: int, longest: int) -> None:
    rng = random.Random(num_rows)
    lens = [rng.choice([0, 1, rng.randint(0, longest)]) for _ in range(num_rows)]
    num_kv_heads, target, tile = 2, 24, 32
    most_cut = target // num_kv_heads
    items = torch.full((most_cut + num_rows, 8), -1, dtype=torch.int32)
    num_items = torch.zeros(1, dtype=torch.int32)
    plan_decode_kernel[(-(-num_rows // 16),)](
        torch.tensor(lens, dtype=torch.int32), items, num_items, num_rows, target,
        NUM_KV_HEADS=num_kv_heads, TILE=tile, MIN_CHUNK=128, ROWS=16, COLUMNS=64, ITEM_FIELDS=8,
    )  # fmt: skip
    listed = items[: int(num_items)].tolist()
    assert (items[int(num_items) :] == -1).all()
    assert sorted({row for row, *_ in listed}) == list(range(num_rows))
    partials = []
    for row, length in enumerate(lens):
        chunks = [item for item in listed if item[0] == row]
        assert [index for *_, index, _, _ in chunks] == list(range(len(chunks)))
        assert all(item[3] == len(chunks) for item in chunks)
        ends = [begin for _, begin, *_ in chunks] + [length]
        assert ends[0] == 0
        assert [item[2] for item in chunks] == ends[1:]
        assert all(begin % tile == 0 for begin in ends[:-1])
        if len(chunks) > 1:
            partials += [item[4] + item[5] for item in chunks]
    assert sorted(partials) == list(range(len(partials)))
    assert len(partials) <= 2 * most_cut
    first_of_row = [end - begin for _, begin, end, _, _, index, *_ in listed if index == 0]
    rounded = [-(-max(size, 1) // tile) for size in first_of_row]
    assert rounded == sorted(rounded, reverse=True)
