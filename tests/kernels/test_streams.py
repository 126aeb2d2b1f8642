"""Residual streams that run side by side: the Triton kernels compute what plain torch does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from kernel_device import DEVICE, DTYPES, MARKS, TOLERANCE
from nvcli.kernels import altup
from nvcli.kernels import streams as reference
from nvcli.kernels.stream_settings import StreamSettings
from nvcli.kernels.streams import ShareWeights
from nvcli.kernels.triton.elementwise import altup as altup_kernels
from nvcli.kernels.triton.elementwise import streams as kernels

pytestmark = MARKS
SETTINGS = (
    StreamSettings(count=4, norm_eps=1e-5, eps=0.01, factor=2.5, result_eps=0.02),
    StreamSettings(count=3, norm_eps=1e-5, eps=1e-3, factor=2.0, iterations=3),
)


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weights(num_shares: int, num_kinds: int, width: int) -> ShareWeights:
    scale = random(num_kinds, seed=2).abs() + 1
    return ShareWeights(random(num_shares, width) / width**0.5, random(num_shares, seed=1), scale)


def results_of(module: Any, device: torch.device, settings: StreamSettings, size: int, dtype: torch.dtype) -> list[Any]:
    """Two blocks, of which the second adds up parts of the first one's result, a sum behind the last, and the streams
    in between."""
    num_tokens, width = 37, settings.count * size
    streams, norm_weight = random(num_tokens, width, dtype=dtype).to(device), random(size, dtype=dtype).to(device)
    of_block, of_end = (
        ShareWeights(*(one.to(device) for one in weights(num_shares, num_kinds, width)))
        for num_shares, num_kinds in ((settings.num_shares, settings.num_scales), (settings.count, 1))
    )
    rest = settings, norm_weight, 1e-6
    first, kept = module.read_streams(streams, None, None, of_block, *rest)
    parts = random(3, num_tokens, size, seed=3).to(device)
    second, next_kept = module.read_streams(streams, parts, kept, of_block, *rest)
    before = streams.clone()
    result = random(num_tokens, size + 5, dtype=dtype, seed=4).to(device)[:, :size]
    last, nothing = module.read_streams(streams, result, next_kept, of_end, *rest)
    module.add_to_streams(streams, result, next_kept, settings.count)
    return [first, kept, second, next_kept, before, last, nothing, streams]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("settings", "size"),
    [(SETTINGS[0], 70), (SETTINGS[1], 70), (SETTINGS[1], 300)],
    ids=["apart", "mixed", "many parts"],
)
def test_streams(settings: StreamSettings, size: int, dtype: torch.dtype) -> None:
    expected = results_of(reference, torch.device("cpu"), settings, size, dtype)
    found = results_of(kernels, DEVICE, settings, size, dtype)
    for actual, wanted in zip(found, expected, strict=True):
        assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
        tolerance = 4 * TOLERANCE[dtype]
        torch.testing.assert_close(actual.cpu(), wanted, atol=tolerance, rtol=tolerance)
    assert expected[6].shape == (37, 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_end", [False, True])
def test_streams_through_gates(is_end: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_GATED", 32)
    settings = StreamSettings(count=3, norm_eps=1e-6, eps=0.0, factor=2.0, gate_rank=8)
    streams, gates = (random(37, 3 * 70, dtype=dtype, seed=seed) for seed in range(2))
    logits, weight = random(37, 11, dtype=dtype, seed=2)[:, 11 if is_end else 8 :], random(3 * 70, seed=3)
    parts, kept = random(2, 37, 70, seed=4), random(37, 3, seed=5)
    results = []
    for module, device in ((reference, torch.device("cpu")), (kernels, DEVICE)):
        own = streams.to(device, copy=True)
        of_block = (None, None) if is_end else (parts.to(device), kept.to(device))
        normed = module.norm_streams(own, *of_block, settings, weight.to(device), 1e-6)
        results.append([own, normed, *module.gate_streams(normed, gates.to(device), logits.to(device), settings)])
    for actual, wanted in zip(*reversed(results), strict=True):
        assert (actual.dtype, actual.shape) == (wanted.dtype, wanted.shape)
        torch.testing.assert_close(actual.cpu(), wanted, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [3, 4])
def test_shares_by_what_a_router_says(count: int, dtype: torch.dtype) -> None:
    x, router = random(37, 2 * 70, dtype=dtype)[:, :70], 30 * random(count, 70, dtype=dtype, seed=1)
    norm_weight = random(70, dtype=dtype, seed=2)
    of_guesses, of_corrections = random(count * count, count, seed=3), random(count, count, seed=4)
    results = []
    for module, device in ((altup, torch.device("cpu")), (altup_kernels, DEVICE)):
        own = altup.StreamRouter(router.to(device), norm_weight.to(device), 1e-6)
        guessed = module.guessed_shares(x.to(device), own, of_guesses.to(device))
        results.append([guessed, module.corrected_shares(x.to(device), own, of_corrections.to(device))])
    for wanted, actual in zip(*results, strict=True):
        assert (actual.dtype, actual.shape) == (torch.float32, (37, count + count * count))
        torch.testing.assert_close(actual.cpu(), wanted, atol=1e-5, rtol=1e-5)
        assert wanted.std() > 0.5


def test_shares_of_streams_in_each_other_add_up_to_1() -> None:
    settings = StreamSettings(count=4, norm_eps=1e-5, eps=1e-6, factor=2.0, iterations=20)
    shares = weights(settings.num_shares, 3, 4 * 16)
    _, kept = reference.read_streams(random(5, 4 * 16), None, None, shares, settings, torch.ones(16), 1e-6)
    mixed = kept[:, 4:].view(5, 4, 4)
    for dim in (1, 2):
        torch.testing.assert_close(mixed.sum(dim=dim), torch.ones(5, 4), atol=1e-3, rtol=0)
    assert mixed.std() > 0.1
