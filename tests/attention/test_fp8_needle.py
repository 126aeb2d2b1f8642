"""Attention over 32,768 keys in FP8: one key that matters is found among all others, and many that matter alike are
averaged as they are."""

from __future__ import annotations

import pytest
import torch
from attention_setup import Bench, History, written_out
from torch import Tensor

from nvcli.attention.torch_backend import TorchBackend
from nvcli.kernels.fp8_kv import store_heads
from nvcli.kernels.fp8_types import FP8

NUM_KEYS, HEAD_DIM, NUM_HEADS = 32_768, 128, 8


class ExactHistory(Bench):
    """A bench whose histories hold keys and values as they were before the cache rounded them."""

    def store(self, group: int, places: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        layer, block_size = self.layers[group], self.case.block_size
        scales = self.kv_cache.scales(layer)
        for part, rows in enumerate((k, v)):
            cache = self.kv_cache.layer(layer)[part]
            if scales is not None:
                store_heads(cache, scales[part], places, rows)
            else:
                cache[places // block_size, places % block_size] = rows.to(cache.dtype)
        return k, v


def attend(kv_dtype: torch.dtype, sharpness: float, num_keys: int = NUM_KEYS) -> tuple[Tensor, Tensor, Tensor]:
    """Attend with a query for each of the heads, which is `sharpness` times one of the keys, at depths from the first
    key to the last but one. → the result in a cache of that type, the exact one, and the needles' values [heads, D]."""
    bench = ExactHistory(
        TorchBackend,
        num_kv_heads=1,
        ratio=NUM_HEADS,
        head_dim=HEAD_DIM,
        block_size=64,
        num_tokens=num_keys,
        kv_dtype=kv_dtype,
    )
    history = History()
    bench.fill(history, num_keys - 1)
    step = bench.batch((history, 1))
    keys, values = torch.cat(history.keys[0]), torch.cat(history.values[0])
    depths = torch.linspace(0, num_keys - 2, NUM_HEADS).long()
    q = (keys[depths, 0] * sharpness).unsqueeze(0)
    step.inputs[0] = (q, *step.inputs[0][1:])
    (found,) = step.forward()
    return found[0].double(), written_out(q, keys, values, bench.specs[0])[0], values[depths, 0].double()


def error(found: Tensor, exact: Tensor) -> float:
    """The largest error of a head's result, as a part of its norm."""
    return float(((found - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


def test_a_needle_is_found() -> None:
    """A key that gets nearly all of the weight still does, and its value comes out with the rounding of one value."""
    found, exact, needles = attend(FP8, 1.5)
    assert error(exact, needles) < 0.01
    assert error(found, exact) < 0.04
    in_bfloat16, _, _ = attend(torch.bfloat16, 1.5)
    assert error(found, exact) < 20 * error(in_bfloat16, exact)  # three bits behind the leading one against seven


@pytest.mark.parametrize(("sharpness", "bound"), [(0.0, 0.04), (0.5, 0.08)])
def test_weights_that_are_spread_keep_the_bound(sharpness: float, bound: float) -> None:
    """The mean of all values, and a sum with weights that differ by factors of 100, are as exact as those of a few
    keys: errors do not add up."""
    found, exact, _ = attend(FP8, sharpness)
    assert error(found, exact) < bound
    few, exact_few, _ = attend(FP8, sharpness, num_keys=1024)
    assert error(found, exact) < 1.5 * error(few, exact_few)
