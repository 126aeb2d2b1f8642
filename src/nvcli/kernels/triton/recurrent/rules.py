"""The rules of recurrent layers in Triton: decode rows token by token (`steps.py`), all others in chunks
(`delta_chunks.py`, `channel_chunks.py`, `scan_chunks.py`), or by channels token by token, too (`channel_walk.py`)."""

from __future__ import annotations

from torch import Tensor

from nvcli.kernels.kept_inputs import KeptInputs
from nvcli.kernels.recurrent_types import ChannelGates, DeltaGates, RecurrentHeads, ScanGates
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.recurrent import channel_chunks, channel_walk, delta_chunks, scan_chunks
from nvcli.kernels.triton.recurrent.steps import compute_decode_rows


def delta_rule(
    qkv: Tensor, gates: DeltaGates, pool: Tensor, rows: StateRows, heads: RecurrentHeads, kept: KeptInputs | None = None
) -> Tensor:
    """See `nvcli.kernels.delta_net.delta_rule`."""
    out = compute_decode_rows(qkv, gates, pool, rows, heads, kept)
    if len(rows.slots) > rows.num_decode_rows:
        chunks = channel_chunks if heads.decays_by_channel else delta_chunks
        chunks.compute_chunks(qkv, gates, pool, rows, heads, out)
    return out


def selective_scan(
    qkv: Tensor, gates: ScanGates, pool: Tensor, rows: StateRows, heads: RecurrentHeads, kept: KeptInputs | None = None
) -> Tensor:
    """See `nvcli.kernels.selective_scan.selective_scan`."""
    out = compute_decode_rows(qkv, gates, pool, rows, heads, kept)
    if len(rows.slots) > rows.num_decode_rows:
        scan_chunks.compute_chunks(qkv, gates, pool, rows, heads, out)
    return out


def channel_scan(
    x: Tensor, gates: ChannelGates, pool: Tensor, rows: StateRows, heads: RecurrentHeads, kept: KeptInputs | None = None
) -> Tensor:
    """See `nvcli.kernels.channel_scan.channel_scan`."""
    out = compute_decode_rows(x, gates, pool, rows, heads, kept)
    if len(rows.slots) > rows.num_decode_rows:
        channel_walk.compute_chunks(x, gates, pool, rows, heads, out)
    return out
