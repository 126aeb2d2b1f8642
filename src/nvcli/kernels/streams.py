"""Residual streams that run side by side (hyper-connections, https://arxiv.org/abs/2409.19606, and their constrained
form, https://arxiv.org/abs/2512.24880). A block reads a sum of all streams, and its result is added to each; shares,
which are computed for each token from its streams, say how much. Plain torch is the reference; CUDA tensors take the
Triton kernels that are held to it.

Shapes: T tokens, N streams, H hidden, S shares of a token.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.norm import norm_parts, rms_norm
from nvcli.kernels.stream_settings import StreamSettings


class ShareWeights(NamedTuple):
    """The weights of shares, all in float32. S is N for a sum after which there is no block, and otherwise
    `StreamSettings.num_shares`."""

    weight: Tensor
    """[S, N × H]"""
    base: Tensor
    """[S]"""
    scale: Tensor
    """[kinds of shares]"""


@with_kernel("elementwise.streams")
def add_to_streams(streams: Tensor, result: Tensor, kept: Tensor, count: int) -> None:
    """Add a block's result to the streams in place: stream j becomes Σ share(i, j) × stream i + share(j) × result.

    streams: [T, N × H], contiguous; result: [T, H], or parts [P, T, H], which are added up first; kept: float32,
    contiguous: the shares of the result, [T, N], where each stream goes on by itself, or [T, N + N × N] with those from
    each stream to each behind them; count: N.
    """
    whole = result.float().sum(dim=0) if result.dim() == 3 else result.float()
    old = streams.float().view(len(streams), count, -1)
    of_result, of_streams = kept.tensor_split((count,), dim=1)
    if of_streams.shape[1]:
        old = of_streams.reshape(len(old), count, -1).transpose(1, 2) @ old
    streams.copy_((old + of_result.unsqueeze(2) * whole.unsqueeze(1)).flatten(1))


@with_kernel("elementwise.streams")
def read_streams(
    streams: Tensor,
    result: Tensor | None,
    kept: Tensor | None,
    weights: ShareWeights,
    settings: StreamSettings,
    norm_weight: Tensor,
    norm_eps: float,
) -> tuple[Tensor, Tensor]:
    """Add the result of the block before to the streams in place, unless it is None (see `add_to_streams`), and return
    the norm of their sum, which the next block reads, [T, H], and the shares that are needed after that, [T,
    `settings.num_kept`] float32, or [T, 0] if there is no block."""
    if result is not None:
        assert kept is not None
        add_to_streams(streams, result, kept, settings.count)
    flat, count = streams.float(), settings.count
    logits = F.linear(flat, weights.weight) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + settings.norm_eps)
    sizes = count, count, count * count
    scale = torch.cat([one.expand(size) for one, size in zip(weights.scale, sizes, strict=False)])
    logits = logits * scale + weights.base
    of_input, of_result, of_streams = logits.tensor_split((count, 2 * count), dim=1)
    shares = of_input.sigmoid() + settings.eps
    x = (shares.unsqueeze(2) * flat.view(len(flat), count, -1)).sum(dim=1).to(streams.dtype)
    of_result = settings.factor * of_result.sigmoid() + settings.result_eps
    if of_streams.shape[1]:
        of_streams = _balance(of_streams.reshape(-1, count, count).softmax(dim=2), settings).flatten(1)
    return rms_norm(x, norm_weight, norm_eps), torch.cat((of_result, of_streams), dim=1)


@with_kernel("elementwise.streams")
def norm_streams(
    streams: Tensor, result: Tensor | None, kept: Tensor | None, settings: StreamSettings, weight: Tensor, eps: float
) -> Tensor:
    """Add the result of the block before to the streams in place, unless it is None (see `add_to_streams`), and return
    the norm of each stream, [T, N × H]. weight: [N × H]. Streams go on by themselves."""
    if result is not None:
        assert kept is not None
        add_to_streams(streams, result, kept, settings.count)
    return norm_parts(streams, weight, eps, (streams.shape[1] // settings.count,) * settings.count)


@with_kernel("elementwise.streams")
def gate_streams(normed: Tensor, gates: Tensor, logits: Tensor, settings: StreamSettings) -> tuple[Tensor, Tensor]:
    """Return the mean of the normed streams, each number times the sigmoid of its gate, [T, H], and the shares of a
    block's result, [T, N] float32, or [T, 0] if there is no block.

    normed, gates: [T, N × H], contiguous; logits: [T, N], or [T, 0], rows may be strided.
    """
    count = settings.count
    x = (normed.float() * gates.float().sigmoid()).unflatten(1, (count, -1)).mean(dim=1)  # type: ignore[no-untyped-call]
    return x.to(normed.dtype), settings.factor * logits.float().sigmoid() + settings.result_eps


def _balance(shares: Tensor, settings: StreamSettings) -> Tensor:
    """Divide the columns and rows of matrices [T, N, N], whose rows add up to 1, by their sums, in turns."""
    eps = settings.eps
    shares = shares + eps
    shares = shares / (shares.sum(dim=1, keepdim=True) + eps)
    for _ in range(settings.iterations - 1):
        shares = shares / (shares.sum(dim=2, keepdim=True) + eps)
        shares = shares / (shares.sum(dim=1, keepdim=True) + eps)
    return shares
