"""The selective scan of Mamba-2 (Dao and Gu, 2024, https://arxiv.org/abs/2405.21060), in the terms of the delta rule
(`delta_net.py`): its input x is the value, B the key and C the query, and a group of heads shares keys and queries.
Plain torch is the reference; CUDA tensors take the Triton kernels, which are tested against it.

With state S [Dk, Dv], a token decays the state and writes its value times its step size: S ← exp(g) S + k (Δ v)ᵀ; its
result is qᵀ S + D v. Keys and queries are taken as they are. One token at a time, that takes matrix-vector products
(`scan_step`); many tokens are computed in chunks, with matrix-matrix products (`scan_chunks`, the paper's section 6).

Shapes: as in `recurrence.py`.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.kept_inputs import KeptInputs
from nvcli.kernels.recurrence import RecurrentInputs, compute_rows, of_value_heads, split_heads
from nvcli.kernels.recurrent_chunks import CHUNK
from nvcli.kernels.recurrent_types import RecurrentHeads, ScanGates
from nvcli.kernels.state_rows import StateRows


@with_kernel("recurrent.rules")
def selective_scan(
    qkv: Tensor, gates: ScanGates, pool: Tensor, rows: StateRows, heads: RecurrentHeads, kept: KeptInputs | None = None
) -> Tensor:
    """Compute the scan for a step's tokens, and store the states after them; see `compute_rows`."""
    assert heads.rule == "scan"
    q, k, v = split_heads(qkv, heads)
    q, k = (of_value_heads(x, heads) for x in (q, k))
    inputs = RecurrentInputs(q, k, v, gates.decay(), gates.step_sizes())
    skip = gates.skip.float().unsqueeze(-1)
    return compute_rows(
        qkv, inputs, pool, rows, heads, kept, partial(scan_step, skip=skip), partial(scan_chunks, skip=skip)
    )


def scan_step(inputs: RecurrentInputs, state: Tensor, *, skip: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one token of each row, from the formula; see `StepRule`. skip: [Hv, 1]."""
    q, k, v, decay, step = inputs
    written = v * step.unsqueeze(-1)
    state = state * decay.exp()[..., None, None] + k.unsqueeze(-1) * written.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2) + skip * v, state, written


def scan_chunks(inputs: RecurrentInputs, state: Tensor, *, skip: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the tokens of one row, CHUNK of them at a time; see `ChunkRule`.

    In a chunk, a token reads what the state and the tokens up to itself have written, each decayed by all steps since.
    """
    out = torch.empty_like(inputs.v)
    for start in range(0, len(out), CHUNK):
        part = slice(start, start + CHUNK)
        q, k, v = (x.transpose(0, 1) for x in inputs.part(part)[:3])  # [Hv, CHUNK, D]
        written = v * inputs.factor[part].T.unsqueeze(-1)
        total = inputs.decay[part].cumsum(0).T  # [Hv, CHUNK]
        # Masked before exp: above the diagonal the difference may be too large for it.
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
        total = total.unsqueeze(-1)
        result = (q * total.exp()) @ state + ((q @ k.transpose(1, 2)) * between) @ written
        out[part] = result.transpose(0, 1) + skip * inputs.v[part]
        last = total[:, -1:]
        state = state * last.exp() + (k * (last - total).exp()).transpose(1, 2) @ written
    return out, state
