"""What a decode step reads, by the Triton kernel and by its reference."""

from __future__ import annotations

import torch

from kernel_device import DEVICE, MARKS
from nvcli.kernels import decode_inputs as reference
from nvcli.kernels.triton.decode_inputs import decode_inputs

pytestmark = MARKS


def test_decode_inputs() -> None:
    """Real requests advance; the padding slot, named twice, stays where it is."""
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(0, 1000, (6, 50), generator=generator, dtype=torch.int32)
    block_table = torch.randint(1, 90, (6, 13), generator=generator, dtype=torch.int32)
    num_computed = torch.tensor([0, 3, 4, 47, 48, 0], dtype=torch.int32)
    slots = torch.tensor([3, 0, 5, 2, 5, 4])

    def call(function, device):  # type: ignore[no-untyped-def]
        ints = torch.full((4, 8), -1, dtype=torch.int64, device=device)
        out = reference.DecodeInputs(
            input_ids=ints[0].int(),
            positions=ints[1].int(),
            slot_mapping=ints[2],
            seq_lens=ints[3].int(),
            block_tables=torch.full((8, 12), -1, dtype=torch.int32, device=device),
        )
        computed = num_computed.to(device, copy=True)
        tables = (token_ids.to(device), block_table.to(device))
        function(slots.to(device), computed, *tables, out, block_size=4, padding_slot=5)
        return [
            x.cpu() for x in (computed, out.input_ids, out.positions, out.slot_mapping, out.seq_lens, out.block_tables)
        ]

    actual, expected = call(decode_inputs, DEVICE), call(reference.decode_inputs, "cpu")
    for a, e in zip(actual, expected, strict=True):
        assert torch.equal(a, e)
    assert expected[0].tolist() == [1, 3, 5, 48, 49, 0]
    assert expected[4].tolist() == [48, 1, 1, 5, 1, 49, -1, -1]
    assert expected[3][0] == block_table[3, 11] * 4 + 3
