"""`scripts/bench_energy.py` measures on GPUs. Here: the prefixes that its rows share."""

from __future__ import annotations

import sys

import pytest
import torch

import bench_energy
from bench_energy import BLOCK_SIZE, share_prefixes
from nvcli.bench.workload import PrefixLevel


def test_rows_have_the_blocks_of_their_segments_in_common() -> None:
    slots = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    block_tables = torch.arange(12 * 8, dtype=torch.int32).view(12, 8)
    own = block_tables[:, 5:].clone()
    levels = (
        PrefixLevel(num_tokens=2 * BLOCK_SIZE, num_groups=2),
        PrefixLevel(num_tokens=3 * BLOCK_SIZE, num_groups=3),
    )
    tables = share_prefixes(block_tables, slots, levels)
    assert torch.equal(block_tables[:, 5:], own)
    blocks_of: dict[int, list[int]] = {}
    for slot in slots.tolist():
        segment = int(tables.slot_segments[0, slot])
        end = 5 * BLOCK_SIZE
        while segment:
            begin, segment_end, parent = tables.segments[0, segment].tolist()
            assert segment_end == end
            blocks = block_tables[slot, begin // BLOCK_SIZE : end // BLOCK_SIZE].tolist()
            assert blocks_of.setdefault(segment, blocks) == blocks
            segment, end = parent, begin
        assert end == 0
    assert len(blocks_of) == 2 + 6
    assert len({block for blocks in blocks_of.values() for block in blocks}) == 2 * 2 + 6 * 3


def test_prefixes_that_end_within_a_block_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_energy.py", "--shared-prefix", "1024,100:8"])
    with pytest.raises(SystemExit):
        bench_energy.main()
    assert "--shared-prefix 1024,100:8: each level must be a multiple of 64 tokens" in capsys.readouterr().err
