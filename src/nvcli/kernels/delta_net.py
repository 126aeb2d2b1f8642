"""The gated delta rule (Gated Delta Networks, https://arxiv.org/abs/2412.06464): attention whose memory is one matrix
per head instead of the keys and values of all tokens. Plain torch is the reference; CUDA tensors take the Triton
kernels, which are tested against it.

With state S [Dk, Dv], a token decays the state and writes the part of its value that its key does not read from it yet:
S ← exp(g) S, then S ← S + k (β (v - kᵀ S))ᵀ; its result is qᵀ S. Queries and keys have length 1; queries are then
scaled by Dk^-½. One token at a time, that takes matrix-vector products (`delta_step`); many tokens are computed in
chunks, with matrix-matrix products (`delta_chunks`, the paper's section 3.3).

Shapes: as in `recurrence.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.kept_inputs import KeptInputs
from nvcli.kernels.recurrence import RecurrentInputs, compute_rows, of_value_heads, split_heads
from nvcli.kernels.recurrent_chunks import CHUNK
from nvcli.kernels.recurrent_types import DeltaGates, RecurrentHeads, unit_length
from nvcli.kernels.state_rows import StateRows


@with_kernel("recurrent.rules")
def delta_rule(
    qkv: Tensor, gates: DeltaGates, pool: Tensor, rows: StateRows, heads: RecurrentHeads, kept: KeptInputs | None = None
) -> Tensor:
    """Compute the rule for a step's tokens, and store the states after them; see `compute_rows`."""
    q, k, v = split_heads(qkv, heads)
    q, k = (of_value_heads(unit_length(x), heads) for x in (q, k))
    beta = gates.beta.float().sigmoid() * heads.beta_scale
    inputs = RecurrentInputs(q * heads.key_dim**-0.5, k, v, gates.decay(), beta)
    return compute_rows(qkv, inputs, pool, rows, heads, kept, delta_step, delta_chunks)


def delta_step(inputs: RecurrentInputs, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one token of each row, from the formula; see `StepRule`."""
    q, k, v, decay, beta = inputs
    state = state * decay.exp()[..., None, None]
    read = (state * k.unsqueeze(-1)).sum(-2)
    written = (v - read) * beta.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * written.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2), state, written


def delta_chunks(inputs: RecurrentInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the tokens of one row, CHUNK of them at a time; see `ChunkRule`.

    In a chunk, token i writes w_i = β_i (v_i - what it reads), and it reads what the state and the tokens before it
    have written: (I + L) w = β (v - decayed k S), where L is below the diagonal.
    """
    out = torch.empty_like(inputs.v)
    for start in range(0, len(out), CHUNK):
        part = slice(start, start + CHUNK)
        q, k, v = (x.transpose(0, 1) for x in inputs.part(part)[:3])  # [Hv, CHUNK, D]
        beta = inputs.factor[part].T.unsqueeze(-1)
        total = inputs.decay[part].cumsum(0).T  # [Hv, CHUNK]
        # Masked before exp: above the diagonal the difference may be too large for it.
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp().tril()
        total = total.unsqueeze(-1)
        lower = (beta * (k @ k.transpose(1, 2)) * between).tril(-1)
        read = (k * total.exp()) @ state
        written = torch.linalg.solve_triangular(lower, beta * (v - read), upper=False, unitriangular=True)
        result = (q * total.exp()) @ state + ((q @ k.transpose(1, 2)) * between) @ written
        out[part] = result.transpose(0, 1)
        last = total[:, -1:]
        state = state * last.exp() + (k * (last - total).exp()).transpose(1, 2) @ written
    return out, state
