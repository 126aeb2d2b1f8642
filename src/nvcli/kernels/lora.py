"""Low-rank products of LoRA adapters, many in one batch: out += scale × (x Aᵀ) Bᵀ with each row's own A and B.

Plain torch is the reference; CUDA tensors take the Triton kernels, which are tested against it. Rows without an adapter
cost nothing. Shapes are those of `lora_types.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.core.lora_config import PAGE_RANKS
from nvcli.kernels.activation import ACTIVATE_AND_MUL, Activation
from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.lora_types import AdaptedLayer, AdapterBank, AdapterRows


@with_kernel("products.lora_rows")
def spread_adapters(adapters_of_slots: Tensor, slots: Tensor, query_start_loc: Tensor, out: Tensor) -> None:
    """Write each row's adapter into `out` [T] int32 for all of its tokens.

    adapters_of_slots: [slots] int32; slots: [R] int32; query_start_loc: [R + 1] int32, the first token of each row.
    """
    spread = torch.repeat_interleave(adapters_of_slots[slots.long()], query_start_loc.diff().long())
    out[: len(spread)] = spread


@with_kernel("products.lora_rows")
def group_rows(adapters: Tensor, bank: AdapterBank, *, batch_invariant: bool = False) -> AdapterRows:
    """Sort rows by adapter and split them into tiles. adapters: [T] int32, contiguous. `batch_invariant`: see
    `AdapterRows`."""
    return AdapterRows(adapters, None, 0, batch_invariant)


@with_kernel("products.lora")
def add_low_rank(out: Tensor, x: Tensor, rows: AdapterRows, bank: AdapterBank, layer: AdaptedLayer) -> None:
    """Add a layer's low-rank products to its result. x: [T, in]; out: [T, out], contiguous, written."""
    for place in range(bank.num_places):
        chosen = (rows.adapters == place + 1).nonzero().squeeze(1)
        if len(chosen) == 0:
            continue
        pages = bank.pages[bank.page_table[place].long()]
        for first, count, projection, _ in layer.blocks.tolist():
            number = layer.first_projection + projection
            rank = int(bank.ranks[place, number])
            if rank == 0:
                continue
            down = pages[:, layer.down_offset :][:, : layer.num_projections * PAGE_RANKS * layer.in_features]
            down = down.reshape(len(pages), layer.num_projections, PAGE_RANKS, -1)[:, projection].flatten(0, 1)[:rank]
            up = pages[:, layer.up_offset :][:, : PAGE_RANKS * layer.out_features]
            up = up.reshape(len(pages) * PAGE_RANKS, -1)[:rank, first : first + count]
            low = (x[chosen].float() @ down.float().t()) * bank.scales[place, number]
            added = low.to(x.dtype).float() @ up.float()
            out[chosen, first : first + count] = (out[chosen, first : first + count].float() + added).to(out.dtype)


@with_kernel("products.lora")
def activate_with_low_rank(
    gate_up: Tensor, x: Tensor, rows: AdapterRows, bank: AdapterBank, layer: AdaptedLayer, activation: Activation
) -> Tensor:
    """Compute activation(gate) × up of a gated MLP, with the low-rank products added to both gate and up.

    x: [T, in]; gate_up: [T, 2 I], contiguous, may be overwritten → [T, I].
    """
    add_low_rank(gate_up, x, rows, bank, layer)
    return ACTIVATE_AND_MUL[activation](gate_up)
