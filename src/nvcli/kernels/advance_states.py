"""Advances the states of rows with drafts by the tokens that count. Plain torch is the reference; CUDA tensors take the
Triton kernels, which are tested against it.

Shapes as in `kept_inputs.py`; R rows, K taps of the convolution.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.kept_inputs import KeptInputs
from nvcli.kernels.recurrent_types import unit_length
from nvcli.kernels.state_rows import StateRows


@with_kernel("recurrent.advance_states")
def advance_states(
    kept: KeptInputs, conv_pool: Tensor, pool: Tensor, rows: StateRows, counts: Tensor, *, has_unit_keys: bool = True
) -> None:
    """Advance the states of a step's rows with drafts by the tokens that count.

    kept: all L layers; conv_pool: [L, num_blocks, K - 1, C]; pool: [L, num_blocks, Hv, Dk, Dv] float32, both written;
    counts: [R] int32, how many of each row's leading tokens count. A row of which none counts keeps its state.
    `has_unit_keys`: states are written along keys of length 1.
    """
    starts, sources, seq_lens = rows.query_start_loc.tolist(), rows.sources().tolist(), rows.seq_lens.tolist()
    num_layers, _, num_heads, key_dim, _ = pool.shape
    keys = kept.keys.float().view(*kept.keys.shape[:2], num_heads and kept.keys.shape[2] // key_dim, key_dim)
    keys = unit_length(keys) if has_unit_keys else keys
    keys = keys.repeat_interleave(num_heads // max(1, keys.shape[2]), dim=2)
    for row, count in enumerate(counts[: rows.num_draft_rows].tolist()):
        start, source = starts[row], sources[row]
        before = seq_lens[row] - (starts[row + 1] - start)
        target = int(rows.block_tables[rows.slots[row], (before + count - 1) // rows.block_size]) if count else 0
        if target == 0:
            continue
        state = pool[:, source].clone() if source else torch.zeros(num_layers, *pool.shape[2:])
        for token in range(start, start + count):
            state = state * kept.decay[:, token].exp()[..., None, None]
            state = state + keys[:, token].unsqueeze(-1) * kept.written[:, token].unsqueeze(-2)
        history = conv_pool[:, source] if source else torch.zeros_like(conv_pool[:, 0])
        inputs = torch.cat((history, kept.inputs[:, start : start + count].to(conv_pool.dtype)), dim=1)
        pool[:, target] = state
        conv_pool[:, target] = inputs[:, count:]
