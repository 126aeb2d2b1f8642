"""Vectors of n-grams of ids, which are added to residual streams (`models/ngram_lookup.py`): their rows in a table, and
the gates of each stream. Plain torch is the reference; CUDA tensors take the Triton kernels that are held to it.

A recurrent state keeps the ids of earlier steps' last tokens. Its numbers are of the model's type, whose mantissa may
have 8 bits; so an id plus 1 is kept as its bytes, which each type holds exactly, and zeros stand for no token.

Shapes: T tokens, K kept tokens, B bytes of an id, I hashes of a token, N streams, H hidden.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.norm import norm_parts
from nvcli.kernels.state_rows import StateRows

ID_BYTES = 3
"""B."""
LEAST_GATE = 1e-6
"""Products of a key and a query count as at least so large."""


class NGramHashes(NamedTuple):
    """The numbers by which n-grams are hashed: those of two tokens first, with a number of hashes for each length."""

    factors: Tensor
    """[longest n-gram] int64, by which ids are multiplied, the token's own first."""
    sizes: Tensor
    """[I] int64, the rows of each hash."""
    firsts: Tensor
    """[I] int64, the first of them."""


class LookupNorms(NamedTuple):
    """The weights of norms of each stream, [N × H] each."""

    keys: Tensor
    queries: Tensor
    inputs: Tensor
    """The weights for the inputs of the convolution."""


@with_kernel("recurrent.ngrams")
def ngram_rows(ids: Tensor, kept: Tensor, rows: StateRows, hashes: NGramHashes, separator: int) -> Tensor:
    """Return the rows of the table that tokens have, [T, I] int64.

    ids: [T] int32; kept: [num_blocks, K, B], those of each block's last tokens, the latest last; separator: the id that
    stands for all tokens before it, itself included, and for those before a request.
    """
    num_hashes = len(hashes.sizes) // (len(hashes.factors) - 1)
    mixed, found = ids.long() * hashes.factors[0], []
    has_ended = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    for number, other in enumerate(_earlier_ids(ids, kept, rows, len(hashes.factors) - 1)):
        has_ended = has_ended | (other < 0) | (other == separator)
        mixed = mixed ^ torch.where(has_ended, separator, other) * hashes.factors[number + 1]
        found.append(mixed.unsqueeze(1) % hashes.sizes[number * num_hashes : (number + 1) * num_hashes])
    return torch.cat(found, dim=1) + hashes.firsts


def _earlier_ids(ids: Tensor, kept: Tensor, rows: StateRows, count: int) -> list[Tensor]:
    """Return the ids of the tokens 1, 2, … `count` places before each token, [T] int64 each; -1 where a request has no
    such token."""
    token = torch.arange(len(ids), device=ids.device)
    row = torch.searchsorted(rows.query_start_loc[1:].long(), token, right=True).clamp_(max=len(rows.slots) - 1)
    before, source = token - rows.query_start_loc[row], rows.sources()[row]
    shifts = torch.arange(0, 8 * ID_BYTES, 8, device=ids.device)
    found = []
    for distance in range(1, count + 1):
        place = (before - distance).clamp(max=-1) + kept.shape[1]
        of_state = (kept[source, place.clamp_(min=0)].long() << shifts).sum(dim=1) - 1
        of_state = of_state.masked_fill_(source == 0, -1)
        found.append(torch.where(before >= distance, ids[(token - distance).clamp(min=0)].long(), of_state))
    return found


@with_kernel("recurrent.ngrams")
def gate_lookup(
    projected: Tensor, streams: Tensor, ids: Tensor, norms: LookupNorms, eps: float, num_others: int
) -> tuple[Tensor, Tensor]:
    """Return each token's value times the gate of each stream, [T, N × H], and what a convolution reads: its norms, and
    `num_others` channels behind them, of which the first B keep the ids.

    projected: [T, N × H + H], the keys of all streams and the value; streams: [T, N × H], contiguous; ids: [T] int32. A
    gate is the sigmoid of the square root, with its sign, of the normed key · the normed stream / √H.
    """
    width = streams.shape[1]
    size = projected.shape[1] - width
    sizes = (size,) * (width // size)
    keys, values = torch.split(projected, [width, size], dim=1)
    products = norm_parts(keys.contiguous(), norms.keys, eps, sizes).float()
    products = products * norm_parts(streams, norms.queries, eps, sizes)
    gates = products.view(len(ids), -1, size).sum(dim=2, keepdim=True) / math.sqrt(size)
    gates = gates.abs().clamp(min=LEAST_GATE).sqrt() * gates.sign()
    gated = (gates.sigmoid() * values.unsqueeze(1)).to(streams.dtype).flatten(1)
    inputs = torch.zeros(len(ids), width + num_others, dtype=streams.dtype, device=streams.device)
    inputs[:, :width] = norm_parts(gated, norms.inputs, eps, sizes)
    shifts = torch.arange(0, 8 * ID_BYTES, 8, device=ids.device)
    inputs[:, width : width + ID_BYTES] = ((ids.long().unsqueeze(1) + 1) >> shifts) & 255
    return gated, inputs
