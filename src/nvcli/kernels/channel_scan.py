"""The selective scan of Mamba-1 (Gu and Dao, 2023, https://arxiv.org/abs/2312.00752), in the terms of Mamba-2's
(`selective_scan.py`): one head, whose value has a number for each channel, and whose keys and queries all channels
share. Plain torch is the reference; CUDA tensors take the Triton kernels, which are tested against it.

With state S [Dk, Dv], step sizes Δ [Dv] and rates A [Dk, Dv], a token decays each number of the state by its own factor
and writes its value times its step sizes: S ← exp(A Δ) S + k (Δ v)ᵀ; its result is qᵀ S + D v. As decays differ by
number, chunks of tokens are no matrix products: they are computed token by token.

Shapes: as in `recurrence.py`, with Hv = 1.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.kept_inputs import KeptInputs
from nvcli.kernels.recurrence import RecurrentInputs, StepRule, compute_rows
from nvcli.kernels.recurrent_types import ChannelGates, RecurrentHeads
from nvcli.kernels.state_rows import StateRows


@with_kernel("recurrent.rules")
def channel_scan(
    x: Tensor, gates: ChannelGates, pool: Tensor, rows: StateRows, heads: RecurrentHeads, kept: KeptInputs | None = None
) -> Tensor:
    """Compute the scan for a step's tokens, and store the states after them; see `compute_rows`. x: [T, Dv], the
    values."""
    assert heads.rule == "channel scan"
    rates, skip, steps = gates.rates(), gates.skip.float(), gates.step_sizes().unsqueeze(1)
    if rows.num_draft_rows:
        assert kept is not None
        kept.rates.copy_(rates)
    q, k, v = (tensor.float().unsqueeze(1) for tensor in (gates.queries, gates.keys, x))
    step = partial(channel_step, rates=rates, skip=skip)
    qkv = torch.cat((gates.queries, gates.keys, x), dim=1)
    return compute_rows(
        qkv, RecurrentInputs(q, k, v, steps, steps), pool, rows, heads, kept, step, partial(channel_steps, step=step)
    )


def channel_step(
    inputs: RecurrentInputs, state: Tensor, *, rates: Tensor, skip: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one token of each row, from the formula; see `StepRule`. rates: [Dk, Dv]; skip: [Dv]."""
    q, k, v, steps, _ = inputs
    written = v * steps
    state = state * (rates * steps.unsqueeze(2)).exp() + k.unsqueeze(3) * written.unsqueeze(2)
    return (state * q.unsqueeze(3)).sum(2) + skip * v, state, written


def channel_steps(inputs: RecurrentInputs, state: Tensor, *, step: StepRule) -> tuple[Tensor, Tensor]:
    """Compute the tokens of one row, one after another; see `ChunkRule`."""
    out = torch.empty_like(inputs.v)
    states = state.unsqueeze(0)
    for token in range(len(out)):
        one = slice(token, token + 1)
        out[one], states, _ = step(inputs.part(one), states)
    return out, states[0]
