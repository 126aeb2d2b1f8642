"""What a decode step reads, taken from the tables of requests on the device. Plain torch is the reference; CUDA tensors
take the Triton kernel that is held to it: one launch at the head of a CUDA graph instead of ten.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeInputs:
    """Buffers for N rows or more, as the fields of the same name in `ForwardBatch`."""

    input_ids: Tensor
    """[N] int32."""
    positions: Tensor
    """[N] int32."""
    slot_mapping: Tensor
    """[N] int64."""
    seq_lens: Tensor
    """[N] int32."""
    block_tables: Tensor
    """[N, W] int32; the first W columns of the table are copied."""


def decode_inputs(
    slots: Tensor,
    num_computed: Tensor,
    token_ids: Tensor,
    block_table: Tensor,
    out: DecodeInputs,
    *,
    block_size: int,
    padding_slot: int,
) -> None:
    """Fill the first N rows of `out` with the next token of the requests in `slots`, and count it as computed.

    slots: [N] int64; tables with a row for each slot: num_computed [S] int32 (advanced by one, but for the padding
    slot, which several rows may name), token_ids [S, L] int32, block_table [S, columns] int32.
    """
    if slots.is_cuda:
        from nvcli.kernels.triton import decode_inputs as kernels

        kernels.decode_inputs(
            slots, num_computed, token_ids, block_table, out, block_size=block_size, padding_slot=padding_slot
        )
        return
    n = len(slots)
    positions = num_computed[slots].long()
    blocks = block_table[slots, positions // block_size].long()
    out.input_ids[:n] = token_ids[slots, positions]
    out.positions[:n] = positions
    out.slot_mapping[:n] = blocks * block_size + positions % block_size
    out.seq_lens[:n] = positions + 1
    out.block_tables[:n] = block_table[slots, : out.block_tables.shape[1]]
    real = slots != padding_slot
    num_computed[slots[real]] += 1
