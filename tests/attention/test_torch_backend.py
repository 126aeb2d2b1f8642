"""The torch backend against attention written out: it defines the semantics, so it must be beyond doubt."""

from __future__ import annotations

import random
from functools import partial

import pytest
import torch
from attention_setup import Bench as AnyBench
from attention_setup import History

from nvcli.attention.forward_batch import BatchShape
from nvcli.attention.torch_backend import TorchBackend

Bench = partial(AnyBench, TorchBackend)


@pytest.mark.pairwise
@pytest.mark.parametrize("block_size", [1, 16, 64])
@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_shapes_and_step_kinds(head_dim: int, ratio: int, block_size: int) -> None:
    """Prompts, chunks behind a cached prefix, decode rows, and all of them at once."""
    bench = Bench(num_kv_heads=2, ratio=ratio, head_dim=head_dim, block_size=block_size)
    a, b, c, d, e = (History() for _ in range(5))
    bench.step((a, 1), (b, 15), (c, 16), (d, 65))
    bench.step((a, 1), (c, 1), (b, 40), (e, 129))
    bench.step((e, 1), (d, 1), (b, 1), (c, 2), (a, 17))
    for _ in range(3):
        bench.step((a, 1), (b, 1), (c, 1), (d, 1), (e, 1))


@pytest.mark.each
@pytest.mark.parametrize("bias_extent", [None, 23])
@pytest.mark.parametrize("block_size", [1, 16, 24])
@pytest.mark.parametrize("windows", [(1,), (7, None), (40, 16, 40), (300, 33)], ids=str)
def test_windows(windows: tuple[int | None, ...], block_size: int, bias_extent: int | None) -> None:
    """Windows of one token, shorter and longer than chunks and prompts, in KV groups with blocks of their own; what a
    window has left behind may be anything. Tokens may add numbers to the scores of near keys."""
    bench = Bench(
        num_kv_heads=2, ratio=2, block_size=block_size, windows=windows, num_tokens=3000, bias_extent=bias_extent
    )
    a, b, c, d = (History() for _ in range(4))
    bench.step((a, 1), (b, 15), (c, 16), (d, 600))
    bench.step((a, 1), (c, 1), (b, 40), (d, 300))
    bench.step((d, 1), (b, 1), (c, 2), (a, 17))
    for _ in range(20):
        bench.step((a, 1), (b, 1), (c, 1), (d, 1))


@pytest.mark.parametrize("kv_dtype", [None, torch.bfloat16], ids=["own keys", "keys of the cache"])
def test_prompts_that_attend_both_ways(kv_dtype: torch.dtype | None) -> None:
    """Prompts shorter and longer than windows and than what is attended at once."""
    bench = Bench(num_kv_heads=2, ratio=2, windows=(None, 40, 300), both_ways=True, num_tokens=3000, kv_dtype=kv_dtype)
    bench.step(*((History(), count) for count in (1, 15, 41, 299, 700)))


def test_long_prompt_in_chunks() -> None:
    bench = Bench(ratio=2, num_tokens=2200, block_size=64)
    history, other = History(), History()
    bench.step((history, 700))
    bench.step((history, 1), (other, 3))
    bench.step((other, 1), (history, 1200))
    bench.step((history, 100), (other, 5))
    bench.step((history, 1), (other, 1))


@pytest.mark.each
@pytest.mark.parametrize("windows", [(None,), (200,)], ids=str)
@pytest.mark.parametrize("block_size", [1, 16])
def test_many_decode_rows_of_mixed_lengths(block_size: int, windows: tuple[int | None, ...]) -> None:
    """Rows are attended in groups of similar length; each must get its own answer back, shortest and longest too."""
    bench = Bench(num_kv_heads=2, ratio=2, num_tokens=64_000, block_size=block_size, windows=windows)
    rng = random.Random(0)
    histories = [History() for _ in range(150)]
    for history, length in zip(histories, [1, 2000, *(rng.randint(1, 500) for _ in histories[2:])], strict=True):
        bench.fill(history, length)
    for _ in range(2):
        rng.shuffle(histories)
        bench.step(*((history, 1) for history in histories))


def test_bfloat16() -> None:
    bench = Bench(num_kv_heads=2, ratio=4, head_dim=128, dtype=torch.bfloat16, windows=(None, 32))
    a, b = History(), History()
    bench.step((a, 20), (b, 70))
    bench.step((a, 1), (b, 40))
    bench.step((a, 1), (b, 1))


def test_an_idle_step_has_nothing_to_attend() -> None:
    bench = Bench()
    bench.step()


def test_writes_nothing_into_the_cache() -> None:
    bench = Bench(block_size=4, poison=0.0)
    a, b = History(), History()
    bench.step((a, 6), (b, 3))
    step = bench.batch((a, 1), (b, 5))
    before = bench.kv_cache.data.clone()
    step.forward()
    assert torch.equal(bench.kv_cache.data, before)


@pytest.mark.parametrize("num_cached", [0, 4, 14, 15, 40])
def test_nan_is_not_lost(num_cached: int) -> None:
    """A row whose numbers are NaN must not get an answer."""
    bench = Bench(num_kv_heads=2, ratio=2)
    for count in (1, 3, 60):
        history = History()
        bench.fill(history, num_cached)
        step = bench.batch((history, count))
        step.inputs[0][0].fill_(torch.nan)
        assert step.forward()[0].isnan().all()


def test_garbage_behind_a_request_is_not_read() -> None:
    """A block's slots behind the request's end hold what an earlier owner left there; so does the null block."""
    bench = Bench(block_size=16)
    a, b = History(), History()
    bench.leave_garbage(1e4)
    bench.kv_cache.data[:, :, 0] = 1e4
    bench.step((a, 3), (b, 30))
    bench.step((a, 1), (b, 1))
    bench.step((a, 2), (b, 2))


@pytest.mark.parametrize("windows", [(None,), (9, None)], ids=str)
def test_padding_is_harmless(windows: tuple[int | None, ...]) -> None:
    """Rows and tokens of padding get some finite answer and disturb no other row."""
    bench = Bench(num_kv_heads=2, ratio=2, windows=windows)
    a, b, c = History(), History(), History()
    bench.step((a, 20), (b, 30), shape=BatchShape(prefill_rows=4, prefill_tokens=64))
    bench.step((a, 1), (b, 1), shape=BatchShape(decode_rows=5))
    bench.step((a, 1), (b, 1), (c, 3), shape=BatchShape(decode_rows=3, prefill_rows=2, prefill_tokens=10))
    bench.step((a, 1), (b, 40), shape=BatchShape(decode_rows=4, prefill_rows=3, prefill_tokens=41))


@pytest.mark.parametrize("windows", [(None,), (5, None)], ids=str)
def test_decode_rows_of_several_tokens(windows: tuple[int | None, ...]) -> None:
    bench = Bench(num_kv_heads=2, ratio=2, windows=windows)
    a, b, c = History(), History(), History()
    bench.step((a, 20), (b, 50))
    bench.step((a, 4), (b, 4), shape=BatchShape(decode_rows=2, tokens_per_row=4))
    shape = BatchShape(decode_rows=4, tokens_per_row=4, prefill_rows=2, prefill_tokens=30)
    bench.step((a, 4), (b, 4), (c, 25), shape=shape)


@pytest.mark.parametrize("soft_cap", [None, 0.7])
def test_sinks(soft_cap: float | None) -> None:
    """Sinks of heads: in prompts longer than what is attended at once, in chunks
    behind a prefix, and in decode rows."""
    bench = Bench(num_kv_heads=2, ratio=3, windows=(40, None), has_sinks=True, soft_cap=soft_cap, num_tokens=2000)
    a, b, c = (History() for _ in range(3))
    bench.step((a, 1), (b, 15), (c, 600))
    bench.step((a, 1), (c, 1), (b, 20))
    bench.step((a, 1), (b, 1), (c, 70))


def test_soft_caps_and_groups_of_other_head_sizes() -> None:
    """Scores that a cap bends, and blocks that hold keys of several shapes, so that they do not lie side by side."""
    bench = Bench(num_kv_heads=2, ratio=2, windows=(40, None), head_dims=(32, 64), soft_cap=0.7, num_tokens=2000)
    assert not bench.kv_cache.spec.is_uniform
    a, b, c = (History() for _ in range(3))
    bench.step((a, 1), (b, 15), (c, 300))
    bench.fill(c, 1000)
    bench.step((a, 1), (c, 1), (b, 20))
    bench.step((a, 1), (b, 1), (c, 70))
