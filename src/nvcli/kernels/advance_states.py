"""Advances the states of rows with drafts by the tokens that count: those of convolutions when the step is over, the
recurrent ones later (`kept_inputs.py`). Plain torch is the reference; CUDA tensors take the Triton kernels, which are
tested against it.

Shapes as in `kept_inputs.py`; K taps of the convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.kept_inputs import KeptInputs, PendingTokens
from nvcli.kernels.recurrent_types import unit_length
from nvcli.kernels.state_rows import StateRows


@with_kernel("recurrent.advance_states")
def end_drafts(kept: KeptInputs, conv_pool: Tensor, rows: StateRows, counts: Tensor) -> None:
    """Advance the states of the convolutions of a step's rows with drafts by the tokens that count, and enter these in
    `rows.pending`.

    kept: all L layers; conv_pool: [L, num_blocks, K - 1, C], written; counts: [R] int32, how many of each row's leading
    tokens count. A row of which none counts keeps its state.
    """
    pending = rows.pending
    assert pending is not None
    starts, sources, seq_lens = rows.query_start_loc.tolist(), rows.sources().tolist(), rows.seq_lens.tolist()
    first = int(pending.turn) * kept.inputs.shape[1]
    for row, count in enumerate(counts[: rows.num_draft_rows].tolist()):
        start, source = starts[row], sources[row]
        before = seq_lens[row] - (starts[row + 1] - start)
        target = int(rows.block_tables[rows.slots[row], (before + count - 1) // rows.block_size]) if count else 0
        pending.starts[row], pending.counts[row] = first + start, count
        pending.sources[row], pending.targets[row] = source, target
        if target == 0:
            continue
        history = conv_pool[:, source] if source else torch.zeros_like(conv_pool[:, 0])
        inputs = torch.cat((history, kept.inputs[:, start : start + count].to(conv_pool.dtype)), dim=1)
        conv_pool[:, target] = inputs[:, count:]


@with_kernel("recurrent.advance_states")
def advance_states(
    kept: KeptInputs, pool: Tensor, pending: PendingTokens, chosen: Tensor, *, has_unit_keys: bool = True
) -> None:
    """Add what is pending to the states of some rows.

    kept: all L layers; pool: [L, num_blocks, Hv, Dk, Dv] float32, written; chosen: [n] int32, rows of the last step.
    `has_unit_keys`: states are written along keys of length 1.
    """
    num_layers, _, num_heads, key_dim, _ = pool.shape
    keys = kept.keys.float().view(*kept.keys.shape[:2], num_heads and kept.keys.shape[2] // key_dim, key_dim)
    keys = unit_length(keys) if has_unit_keys else keys
    keys = keys.repeat_interleave(num_heads // max(1, keys.shape[2]), dim=2)
    for row in chosen.tolist():
        start, count, source, target = (int(field[row]) for field in pending[1:5])
        if target == 0:
            continue
        state = pool[:, source].clone() if source else torch.zeros(num_layers, *pool.shape[2:])
        for token in range(start, start + count):
            decay = kept.decay[:, token]  # [L, Hv, 1], [L, Hv, Dk] or [L, Hv, Dv]
            logarithms = decay.unsqueeze(2) * kept.rates.unsqueeze(1) if kept.rates.numel() else decay.unsqueeze(3)
            state = state * logarithms.exp()
            state = state + keys[:, token].unsqueeze(-1) * kept.written[:, token].unsqueeze(-2)
        pool[:, target] = state
