"""Shares of residual streams by what a router says of one of them, in one kernel for a token each. Shapes: T tokens, N
streams, H hidden."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nvcli.kernels.altup import StreamRouter
from nvcli.kernels.triton.launch.dependent_launch import await_kernel_before, dependent
from nvcli.kernels.whole_numbers import next_power_of_2, warps_of_row


@triton.jit
def _shares_kernel(
    x_ptr,  # [T, SIZE], rows x_stride apart
    router_ptr,  # [COUNT, SIZE]
    norm_weight_ptr,  # [SIZE]
    weight_ptr,  # with GUESSES [COUNT, COUNT, COUNT] float32: to, from, number; else [COUNT, COUNT]: to, number
    shares_ptr,  # [T, COUNT + COUNT × COUNT] float32, written: to; from, to
    eps,
    x_stride,
    COUNT: tl.constexpr,
    SIZE: tl.constexpr,
    STREAMS: tl.constexpr,  # COUNT, rounded up to a power of two
    BLOCK: tl.constexpr,  # SIZE, rounded up to a power of two
    GUESSES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (token)."""
    token = tl.program_id(0).to(tl.int64)
    column, number = tl.arange(0, BLOCK), tl.arange(0, STREAMS)
    inside, is_number = column < SIZE, number < COUNT
    norm_weight = tl.load(norm_weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    await_kernel_before(DEPENDENT)
    x = tl.load(x_ptr + token * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + eps) / SIZE
    x *= norm_weight
    routed = tl.zeros([STREAMS], tl.float32)
    for index in tl.static_range(COUNT):
        row = tl.load(router_ptr + index * SIZE + column, mask=inside, other=0.0).to(tl.float32)
        product = tl.sum(x * row, axis=0) * factor
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * product) + 1.0)
        routed = tl.where(number == index, tanh, routed)
    source, target = number[:, None], number[None, :]
    is_pair = is_number[:, None] & is_number[None, :]
    of_streams = tl.where(source == target, 1.0, 0.0)
    if GUESSES:
        places = (target * COUNT + source)[:, :, None] * COUNT + number[None, None, :]
        weight = tl.load(weight_ptr + places, mask=is_pair[:, :, None] & is_number[None, None, :], other=0.0)
        of_streams += tl.sum(weight * routed[None, None, :], axis=2)
        of_result = tl.sum(tl.where((source > 0) & is_pair, of_streams, 0.0), axis=0)
    else:
        weight = tl.load(weight_ptr + number[:, None] * COUNT + number[None, :], mask=is_pair, other=0.0)
        of_result = 1.0 + tl.sum(weight * routed[None, :], axis=1)
        of_streams -= tl.where(source == 0, of_result[None, :], 0.0)
    shares_ptr += token * (COUNT + COUNT * COUNT)
    tl.store(shares_ptr + number, of_result, mask=is_number)
    tl.store(shares_ptr + COUNT + source * COUNT + target, of_streams, mask=is_pair)


def guessed_shares(x: Tensor, router: StreamRouter, weight: Tensor) -> Tensor:
    """See `nvcli.kernels.altup.guessed_shares`."""
    return _shares(x, router, weight, guesses=True)


def corrected_shares(x: Tensor, router: StreamRouter, weight: Tensor) -> Tensor:
    """See `nvcli.kernels.altup.corrected_shares`."""
    return _shares(x, router, weight, guesses=False)


def _shares(x: Tensor, router: StreamRouter, weight: Tensor, *, guesses: bool) -> Tensor:
    assert x.stride(1) == 1
    assert router.weight.is_contiguous()
    assert weight.is_contiguous()
    count, size = router.weight.shape
    shares = torch.empty(len(x), count * (1 + count), dtype=torch.float32, device=x.device)
    block = next_power_of_2(size)
    _shares_kernel[(len(x),)](
        x,
        router.weight,
        router.norm_weight,
        weight,
        shares,
        router.norm_eps,
        x.stride(0),
        COUNT=count,
        SIZE=size,
        STREAMS=next_power_of_2(count),
        BLOCK=block,
        GUESSES=guesses,
        num_warps=warps_of_row(block),
        **dependent(x.device),
    )
    return shares
