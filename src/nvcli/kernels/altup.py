"""Shares of several residual streams by what a router says of one of them (AltUp,
https://arxiv.org/abs/2301.13310), as `streams.add_to_streams` takes them. Plain torch is the reference; CUDA tensors
take the Triton kernel that is held to it. Shapes: T tokens, N streams, H hidden.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.norm import rms_norm


class StreamRouter(NamedTuple):
    """The weights that make N numbers from -1 to 1 of a stream: tanh(weight × norm(x) / H)."""

    weight: Tensor
    """[N, H]"""
    norm_weight: Tensor
    """[H]"""
    norm_eps: float


@with_kernel("elementwise.altup")
def guessed_shares(x: Tensor, router: StreamRouter, weight: Tensor) -> Tensor:
    """Return the shares by which streams are mixed before a layer, with something that is added to all but the first of
    them before: [T, N + N × N] float32.

    x: the first stream [T, H], rows may lie apart; weight: [N × N, N] float32: what is added to stream j of stream i is
    row j × N + i times the router's numbers.
    """
    count = weight.shape[1]
    mixed = _products(_route(x, router), weight).view(-1, count, count).transpose(1, 2)
    of_streams = mixed + torch.eye(count, device=x.device)
    return torch.cat((of_streams[:, 1:].sum(dim=1), of_streams.flatten(1)), dim=1)


@with_kernel("elementwise.altup")
def corrected_shares(x: Tensor, router: StreamRouter, weight: Tensor) -> Tensor:
    """Return the shares by which all streams get the change of the first one, which becomes `x` where its share is 1:
    [T, N + N × N] float32.

    x: [T, H], rows may lie apart; weight: [N, N] float32, whose products with the router's numbers are added to shares
    of 1.
    """
    count = len(weight)
    shares = _products(_route(x, router), weight) + 1.0
    of_streams = torch.eye(count, device=x.device).repeat(len(x), 1, 1)
    of_streams[:, 0] -= shares
    return torch.cat((shares, of_streams.flatten(1)), dim=1)


def _route(x: Tensor, router: StreamRouter) -> Tensor:
    """Return the router's numbers in float32: [T, H] → [T, N]."""
    normed = rms_norm(x.float(), router.norm_weight, router.norm_eps) / x.shape[1]
    return torch.tanh(_products(normed, router.weight.float()))


def _products(x: Tensor, weight: Tensor) -> Tensor:
    """x Wᵀ, row by row, so that no row's bits depend on how many there are: [T, in] and [out, in] → [T, out]."""
    return torch.stack([(x * row).sum(dim=1) for row in weight], dim=1)
