"""SlotTable: what a rank remembers of the requests it serves, on the device (SGLang's request-to-token pool).

A slot is one request's row, from admission to release. The last row is the padding slot: it belongs to no request and
its blocks are all the null block.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.kv_cache import NULL_BLOCK
from nvcli.config import EngineConfig
from nvcli.kernels.decode_inputs import DecodeInputs, decode_inputs
from nvcli.messages import NewSlot, StepInput
from nvcli.runner.uploader import Uploader


def unpack_ids(data: bytes) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Packed int32 of a message as an array, without a copy."""
    return np.frombuffer(data, dtype=np.int32)


class SlotTable:
    """Tensors with a row for each slot."""

    def __init__(self, config: EngineConfig, device: torch.device) -> None:
        num_slots = config.max_num_seqs
        self.device = device
        self.block_size = config.block_size
        self.padding_slot = num_slots

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(num_slots + 1, *shape, dtype=dtype, device=device)

        self.token_ids = ints(config.max_model_len)
        """Each request's tokens by position; where a cached prefix was not computed here, unknown."""
        self.num_computed = ints()
        """Tokens whose K/V are in the cache: the position of the next token to compute."""
        self.block_table = torch.full(
            (num_slots + 1, config.max_blocks_per_seq), NULL_BLOCK, dtype=torch.int32, device=device
        )
        self.num_computed_host = np.zeros(num_slots + 1, dtype=np.int64)
        """Upper bound of `num_computed` that needs no look at the device."""

    def apply(self, step: StepInput, upload: Uploader) -> None:
        """Take in what the step changes beside its prompts: new slots, blocks, and tokens to go on from."""
        if step.new_slots:
            self._fill(step.new_slots, upload)
        if step.block_ids:
            slots, columns, blocks = upload(
                unpack_ids(step.block_slots), unpack_ids(step.block_columns), unpack_ids(step.block_ids)
            )
            self.block_table[slots.long(), columns.long()] = blocks
        if step.decode_ids:
            slots, ids = upload(unpack_ids(step.decode_slots), unpack_ids(step.decode_ids))
            self.keep(slots.long(), self.num_computed[slots.long()], ids)

    def advance(self, slots: Tensor, inputs: DecodeInputs) -> None:
        """Look up what each slot computes next, and count it as computed. slots: [B] int64; `inputs` is filled."""
        decode_inputs(
            slots,
            self.num_computed,
            self.token_ids,
            self.block_table,
            inputs,
            block_size=self.block_size,
            padding_slot=self.padding_slot,
        )

    def keep(self, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
        """Put sampled ids where the next step looks for its input. All [N]; slots int64."""
        self.token_ids[slots, positions.long()] = ids

    def _fill(self, new_slots: list[NewSlot], upload: Uploader) -> None:
        slots, cached = upload(
            np.array([new.slot for new in new_slots]), np.array([new.num_cached_tokens for new in new_slots])
        )
        index = slots.long()
        self.num_computed[index] = cached
        self.block_table[index] = NULL_BLOCK
        for new in new_slots:
            self.num_computed_host[new.slot] = new.num_cached_tokens
            if new.prefix_ids:
                (prefix,) = upload(unpack_ids(new.prefix_ids))
                self.token_ids[new.slot, : len(prefix)] = prefix
