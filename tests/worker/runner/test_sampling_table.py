"""A slot's sampling parameters arrive on the device as they were sent, and the host knows what they ask for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fake_runners import engine_config
from nvcli.core.messages import FORBIDDEN, MAX_STOP_IDS, NewSlot
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from nvcli.worker.runner.sampler import Sampler
from nvcli.worker.runner.sampling_table import SamplingFlag, SamplingTable
from nvcli.worker.runner.slot_table import SlotTable
from nvcli.worker.runner.uploader import Uploader
from slot_sampling import slot_sampling

CPU = torch.device("cpu")
FLAGS: list[tuple[dict[str, Any], SamplingFlag]] = [
    ({}, SamplingFlag(0)),
    ({"top_k": 1}, SamplingFlag.SMALL_TOP_K),
    ({"top_k": 64, "top_p": 0.5, "min_p": 0.1}, SamplingFlag.SMALL_TOP_K),
    ({"top_k": 65}, SamplingFlag.OTHER_LIMITS),
    ({"top_p": 0.99}, SamplingFlag.OTHER_LIMITS),
    ({"min_p": 0.01}, SamplingFlag.OTHER_LIMITS),
    ({"temperature": 0.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, SamplingFlag(0)),
    ({"presence_penalty": -0.1}, SamplingFlag.PENALTIES),
    (
        {"temperature": 0.0, "repetition_penalty": 1.1, "num_logprobs": 0},
        SamplingFlag.PENALTIES | SamplingFlag.LOGPROBS,
    ),
    ({"stop_ids": [4], "min_tokens": 1}, SamplingFlag(0)),
    ({"bias_ids": [4], "bias_values": [FORBIDDEN], "top_k": 3}, SamplingFlag.SMALL_TOP_K),
    ({"stop_ids": [4], "min_tokens": 1, "num_logprobs": 0}, SamplingFlag.ADJUSTED | SamplingFlag.LOGPROBS),
    ({"bias_ids": [4, 5], "bias_values": [FORBIDDEN, 0.5]}, SamplingFlag.ADJUSTED),
    ({"bias_ids": [4], "bias_values": [0.5], "top_k": 3}, SamplingFlag.ADJUSTED | SamplingFlag.SMALL_TOP_K),
]


def new_slot(slot: int, **overrides: Any) -> NewSlot:
    return NewSlot(slot=slot, num_cached_tokens=0, sampling=slot_sampling(slot, **overrides))


def test_large_numbers_arrive_whole_and_other_slots_stay() -> None:
    table = SamplingTable(5, CPU)
    values = {"seed": (1 << 63) - 1, "sample": 1023, "temperature": 0.1, "top_p": 0.3, "min_p": 0.7, "top_k": 1 << 40}
    longest = list(range(MAX_STOP_IDS))
    table.fill([new_slot(3, **values, min_tokens=(1 << 63) - 1, stop_ids=longest), new_slot(1)], Uploader(0, CPU))
    columns = table.columns
    assert columns.seed.tolist() == [0, 5, 0, (1 << 63) - 1, 0, 0]
    assert columns.sample.tolist() == [0, 0, 0, 1023, 0, 0]
    assert columns.row.tolist() == [0, 1, 0, 3, 0, 0]
    assert columns.temperature.tolist() == pytest.approx([0, 1, 0, 0.1, 0, 0])
    assert columns.top_p.tolist() == pytest.approx([0, 1, 0, 0.3, 0, 0])
    assert columns.min_p.tolist() == pytest.approx([0, 0, 0, 0.7, 0, 0])
    assert columns.top_k.tolist() == [0, 0, 0, 2**31 - 1, 0, 0]
    assert table.changes.min_len.tolist() == [0, 3, 0, 2**31 - 1, 0, 0]
    assert table.changes.entry_ids[3].tolist() == longest
    assert table.changes.entry_values[3].isneginf().all()
    table.fill([new_slot(3, presence_penalty=1.0), new_slot(1, stop_ids=[5])], Uploader(0, CPU))
    assert table.changes.entry_values.count_nonzero(dim=1).tolist() == [0, 1, 0, 0, 0, 0]


def test_the_padding_slot_is_greedy_and_asks_for_nothing() -> None:
    table = SamplingTable(3, CPU)
    table.fill([new_slot(i, top_k=5, top_p=0.5, num_logprobs=2) for i in range(3)], Uploader(0, CPU))
    assert table.columns.temperature[3] == 0
    assert not table.columns.is_limited[3]
    assert table.flags_host.tolist()[3] == 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_batch_is_simple_where_all_of_its_rows_are(num_ranks: int) -> None:
    group = TensorParallelGroup.single()
    group.size = num_ranks
    slot_table = SlotTable(engine_config(max_num_seqs=len(FLAGS)), 1, CPU)
    table, sampler = slot_table.sampling, Sampler(slot_table, group, 100)
    for round_ in range(2):  # the second round gives each slot other flags
        kinds = FLAGS[round_:] + FLAGS[:round_]
        table.fill([new_slot(i, **kind) for i, (kind, _) in enumerate(kinds)], Uploader(0, CPU))
        assert [SamplingFlag(int(flags)) for flags in table.flags_host[:-1]] == [flags for _, flags in kinds]
        limits = SamplingFlag.SMALL_TOP_K | SamplingFlag.OTHER_LIMITS
        for i, (_, flags) in enumerate(kinds):
            needs = sampler.needs(np.array([i, len(FLAGS)]))
            assert needs.is_simple == (not flags or (num_ranks == 1 and not flags & ~limits))
            must_gather = flags & ~SamplingFlag.SMALL_TOP_K if num_ranks > 1 else flags & ~limits
            assert needs.needs_whole_logits == bool(must_gather)
            assert needs.rows(SamplingFlag.PENALTIES).tolist() == ([0] if flags & SamplingFlag.PENALTIES else [])
        assert not sampler.needs(np.arange(len(FLAGS) + 1)).is_simple
