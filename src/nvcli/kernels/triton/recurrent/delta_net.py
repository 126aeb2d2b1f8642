"""The gated delta rule in Triton: decode rows token by token (`steps.py`), all others in chunks (`delta_chunks.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.kept_inputs import KeptInputs
from nvcli.kernels.recurrent_types import DeltaGates, RecurrentHeads
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.recurrent.delta_chunks import compute_chunks
from nvcli.kernels.triton.recurrent.steps import compute_decode_rows


def delta_rule(
    qkv: Tensor, gates: DeltaGates, pool: Tensor, rows: StateRows, heads: RecurrentHeads, kept: KeptInputs | None = None
) -> Tensor:
    """See `nvcli.kernels.delta_net.delta_rule`."""
    shape = (len(qkv), heads.num_value_heads, heads.value_dim)
    out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
    compute_decode_rows(qkv, gates, pool, rows, heads, kept, out)
    if len(rows.slots) > rows.num_decode_rows:
        compute_chunks(qkv, gates, pool, rows, heads, out)
    return out
