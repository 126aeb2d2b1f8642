"""Several ranks, each with its part of the logits, choose the tokens that one rank chooses from all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fake_runners import engine_config
from nvcli.distributed.tensor_parallel import TensorParallelGroup
from nvcli.messages import ForwardMode, NewSlot, SlotSampling, StepInput
from nvcli.runner.sampler import Sampler
from nvcli.runner.slot_table import SlotTable
from nvcli.runner.uploader import Uploader
from tensor_parallel_ranks import run_ranks

VOCAB_SIZE = 10_007  # divides by nothing
NUM_SLOTS = 40
CPU = torch.device("cpu")

SAMPLINGS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "temperatures": [{"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 1.5}],
    "filters": [{"temperature": 0.8, "top_k": 20}, {"temperature": 1.0}, {"temperature": 1.2, "top_p": 0.9}],
    "logprobs": [{"temperature": 1.0, "num_logprobs": 2}],
}


def slot_sampling(row: int, **overrides: Any) -> SlotSampling:
    values: dict[str, Any] = {
        "seed": 5,
        "row": row,
        "sample": 0,
        "prompt_len": 3,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_tokens": 0,
        "num_logprobs": -1,
        "stop_ids": [],
        "bias_ids": [],
        "bias_values": [],
    }
    return SlotSampling(**{**values, **overrides})


def run_rank(group: TensorParallelGroup) -> dict[str, Any]:
    """By case: (the ids, the log-probabilities, how often logits were gathered)."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(NUM_SLOTS, VOCAB_SIZE, generator=generator) * 3
    logits[:5] = logits[:5].round()  # with equal ones
    size = -(-VOCAB_SIZE // group.size)
    padded = torch.nn.functional.pad(logits, (0, size * group.size - VOCAB_SIZE), value=100.0)
    shard = padded[:, group.rank * size : (group.rank + 1) * size].contiguous()
    gathered = []
    gather = group.gather
    group.gather = lambda x: (gathered.append(1), gather(x))[1]  # type: ignore[method-assign]
    results = {}
    for case, kinds in SAMPLINGS.items():
        table = SlotTable(engine_config(max_num_seqs=NUM_SLOTS), CPU)
        new = [
            NewSlot(slot=i, num_cached_tokens=0, prefix_ids=b"", sampling=slot_sampling(i * 7, **kinds[i % len(kinds)]))
            for i in range(NUM_SLOTS)
        ]
        table.apply(StepInput(step_id=0, mode=ForwardMode.EXTEND, new_slots=new), Uploader(0, CPU))
        sampler = Sampler(table, group, VOCAB_SIZE)
        slots = torch.arange(NUM_SLOTS).flip(0)
        positions = torch.arange(NUM_SLOTS, dtype=torch.int32)
        gathered.clear()
        ids, logprobs = sampler.sample(shard, slots, positions, sampler.plan(tuple(slots.tolist())))
        assert ids.dtype == torch.int32
        results[case] = ids.tolist(), logprobs, len(gathered)
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_same_tokens_on_every_rank_as_with_one(size: int, tmp_path: Path) -> None:
    alone = run_rank(TensorParallelGroup.single())
    ranks = run_ranks(size, run_rank, tmp_path)
    for case, (ids, logprobs, _) in alone.items():
        assert all(rank[case][0] == ids for rank in ranks), case
        assert ranks[0][case][1] == logprobs
    num_gathers = {case: count for case, (_, _, count) in ranks[0].items()}
    assert num_gathers == {"greedy": 0, "temperatures": 0, "filters": 1, "logprobs": 1}
