"""The gated delta rule (Gated Delta Networks, https://arxiv.org/abs/2412.06464): attention whose memory is one matrix
per head instead of the keys and values of all tokens. Plain torch is the reference; CUDA tensors take the Triton
kernels, which are tested against it.

With state S [Dk, Dv], a token decays the state and writes the part of its value that its key does not read from it yet:
S ← exp(g) S, then S ← S + k (β (v - kᵀ S))ᵀ; its result is qᵀ S. Queries and keys have length 1; queries are then
scaled by Dk^-½. One token at a time, that takes matrix-vector products (`delta_step`); many tokens are computed in
chunks, with matrix-matrix products (`delta_chunks`, the paper's section 3.3).

Shapes: T tokens, R rows, N tokens of one row, Hk key heads, Hv value heads, Dk and Dv their sizes. Value head h uses
key head h // (Hv / Hk).
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


@with_kernel("recurrent.delta_net")
def delta_rule(
    qkv: Tensor, gates: DeltaGates, pool: Tensor, rows: StateRows, heads: RecurrentHeads, kept: KeptInputs | None = None
) -> Tensor:
    """Compute the rule for a step's tokens, and store the states after them.

    qkv: [T, heads.num_channels], queries of all heads, then keys, then values; pool: [num_blocks, Hv, Dk, Dv] float32,
    the state of each block, written → [T, Hv, Dv] like qkv. Tokens that belong to no row get zeros. The states of rows
    with drafts take in what is pending, and not the step's tokens; what these would write goes to `kept`, which only
    these rows need.
    """
    q, k, v = split_heads(qkv, heads)
    q, k = (of_value_heads(unit_length(x), heads) for x in (q, k))
    inputs = RecurrentInputs(q * heads.key_dim**-0.5, k, v, gates.decay(), gates.beta.float().sigmoid())
    return compute_rows(qkv, inputs, pool, rows, heads, kept, _step, _chunks)


def delta_step(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one token of each row, from the formula.

    q, k: [R, Hv, Dk]; v: [R, Hv, Dv]; decay (logarithms), beta: [R, Hv]; state: [R, Hv, Dk, Dv]. All float32 → results
    [R, Hv, Dv], states after them.
    """
    out, state, _ = _step(RecurrentInputs(q, k, v, decay, beta), state)
    return out, state


def _step(inputs: RecurrentInputs, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `delta_step`, and also return what each token writes, [R, Hv, Dv]."""
    q, k, v, decay, beta = inputs
    state = state * decay.exp()[..., None, None]
    read = (state * k.unsqueeze(-1)).sum(-2)
    written = (v - read) * beta.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * written.unsqueeze(-2)
    return (state * q.unsqueeze(-1)).sum(-2), state, written


def _chunks(inputs: RecurrentInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    return delta_chunks(*inputs, state)


def delta_chunks(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, *, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Compute the tokens of one row, `chunk` of them at a time.

    In a chunk, token i writes w_i = β_i (v_i - what it reads), and it reads what the state and the tokens before it
    have written: (I + L) w = β (v - decayed k S), where L is below the diagonal. q, k: [N, Hv, Dk]; v: [N, Hv, Dv];
    decay, beta: [N, Hv]; state: [Hv, Dk, Dv]. All float32 → results [N, Hv, Dv], the state after them.
    """
    out = torch.empty_like(v)
    for start in range(0, len(q), chunk):
        part = slice(start, start + chunk)
        queries, keys, values = (x[part].transpose(0, 1) for x in (q, k, v))  # [Hv, chunk, D]
        betas = beta[part].T.unsqueeze(-1)
        total = decay[part].cumsum(0).T  # [Hv, chunk]
        # Masked before exp: above the diagonal the difference may be too large for it.
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril()
        between = between.exp().tril()
        total = total.unsqueeze(-1)
        lower = (betas * (keys @ keys.transpose(1, 2)) * between).tril(-1)
        read = (keys * total.exp()) @ state
        written = torch.linalg.solve_triangular(lower, betas * (values - read), upper=False, unitriangular=True)
        result = (queries * total.exp()) @ state + ((queries @ keys.transpose(1, 2)) * between) @ written
        out[part] = result.transpose(0, 1)
        last = total[:, -1:]
        state = state * last.exp() + (keys * (last - total).exp()).transpose(1, 2) @ written
    return out, state
