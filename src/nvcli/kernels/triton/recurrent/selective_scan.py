"""The selective scan of Mamba-2 in Triton: decode rows token by token (`steps.py`), all others in chunks
(`scan_chunks.py`)."""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.kept_inputs import KeptInputs
from nvcli.kernels.recurrent_types import RecurrentHeads, ScanGates
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.recurrent.scan_chunks import compute_chunks
from nvcli.kernels.triton.recurrent.steps import compute_decode_rows


def selective_scan(
    qkv: Tensor, gates: ScanGates, pool: Tensor, rows: StateRows, heads: RecurrentHeads, kept: KeptInputs | None = None
) -> Tensor:
    """See `nvcli.kernels.selective_scan.selective_scan`."""
    shape = (len(qkv), heads.num_value_heads, heads.value_dim)
    out = torch.empty(shape, dtype=qkv.dtype, device=qkv.device)
    compute_decode_rows(qkv, gates, pool, rows, heads, kept, out)
    if len(rows.slots) > rows.num_decode_rows:
        compute_chunks(qkv, gates, pool, rows, heads, out)
    return out
