"""The gated delta rule (Gated Delta Networks, https://arxiv.org/abs/2412.06464): attention whose memory is one matrix
per head instead of the keys and values of all tokens. Plain torch is the reference; CUDA tensors take the Triton
kernels, which are tested against it.

With state S [Dk, Dv], a token decays the state and writes the part of its value that its key does not read from it yet:
S ← exp(g) S, then S ← S + k (β (v - kᵀ S))ᵀ; its result is qᵀ S. Queries and keys have length 1; queries are then
scaled by Dk^-½. g is one number, or one for each row of S (Kimi Delta Attention, https://arxiv.org/abs/2510.26692). One
token at a time, that takes matrix-vector products (`delta_step`); many tokens are computed in chunks, with
matrix-matrix products (`delta_chunks`, section 3.3 of the first paper).

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
    """Compute the rule for a step's tokens, and store the states after them; see `compute_rows`. `qkv` may be
    overwritten."""
    q, k, v = split_heads(qkv, heads)
    q, k = (of_value_heads(unit_length(x), heads) for x in (q, k))
    beta = gates.beta.float().sigmoid() * heads.beta_scale
    inputs = RecurrentInputs(q * heads.key_dim**-0.5, k, v, gates.decay(heads.lowest_decay), beta)
    return compute_rows(qkv, inputs, pool, rows, heads, kept, delta_step, delta_chunks)


def delta_step(inputs: RecurrentInputs, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute one token of each row, from the formula; see `StepRule`."""
    q, k, v, decay, beta = inputs
    state = state * decay.exp().view(*decay.shape[:2], -1, 1)
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
        total = inputs.decay[part].view(k.shape[1], len(k), -1).cumsum(0).transpose(0, 1)  # [Hv, CHUNK, 1 or Dk]
        lower = (beta * _decayed_products(k, k, total)).tril(-1)
        read = (k * total.exp()) @ state
        written = torch.linalg.solve_triangular(lower, beta * (v - read), upper=False, unitriangular=True)
        result = (q * total.exp()) @ state + _decayed_products(q, k, total) @ written
        out[part] = result.transpose(0, 1)
        last = total[:, -1:]
        state = state * last.exp().transpose(1, 2) + (k * (last - total).exp()).transpose(1, 2) @ written
    return out, state


def _decayed_products(x: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """Multiply each token's vector with the keys up to its own, as they are decayed since. x, k: [Hv, N, Dk]; total:
    [Hv, N, 1 or Dk], the sums of the logarithms up to each token → [Hv, N, N], zeros above the diagonal."""
    # Masked before exp: above the diagonal the difference may be too large for it.
    is_later = torch.ones(k.shape[1], k.shape[1], dtype=torch.bool, device=k.device).triu(1)
    between = (total.unsqueeze(2) - total.unsqueeze(1)).masked_fill(is_later.unsqueeze(-1), -torch.inf).exp()
    if total.shape[2] == 1:
        return (x @ k.transpose(1, 2)) * between.squeeze(-1)
    return (x.unsqueeze(2) * k.unsqueeze(1) * between).sum(-1)
