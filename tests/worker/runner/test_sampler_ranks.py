"""Several ranks, each with its part of the logits, choose the tokens that one rank chooses from all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fake_runners import engine_config
from nvcli.core.messages import FORBIDDEN, NOT_FINITE, NewSlot
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from nvcli.worker.runner.sampler import Sampler, TokenMasks
from nvcli.worker.runner.slot_table import SlotTable
from slot_sampling import entering_step, slot_sampling
from tensor_parallel_ranks import run_ranks

VOCAB_SIZE = 10_007  # divides by nothing
NUM_SLOTS = 40
CPU = torch.device("cpu")
BROKEN = [34, 30]
"""Rows whose logits are not finite. They ask for no log-probabilities, and for two kinds of a small top-k."""

SAMPLINGS: dict[str, list[dict[str, Any]]] = {
    "greedy": [{"temperature": 0.0}],
    "temperatures": [{"temperature": 0.0}, {"temperature": 0.6}, {"temperature": 1.5}],
    "small top-k": [
        {"temperature": 0.8, "top_k": 20, "top_p": 0.95},
        {"temperature": 1.0},
        {"temperature": 0.0, "top_k": 3, "bias_ids": [9000, 3], "bias_values": [FORBIDDEN, FORBIDDEN]},
        {"temperature": 1.3, "top_k": 64, "min_p": 0.01},
        {"temperature": 0.7, "top_k": 1},
    ],
    "filters": [{"temperature": 0.8, "top_k": 20}, {"temperature": 1.0}, {"temperature": 1.2, "top_p": 0.9}],
    "logprobs": [{"temperature": 1.0, "num_logprobs": 2}, {"temperature": 0.5, "top_k": 4}],
    "changed logits": [
        {"temperature": 1.0, "repetition_penalty": 1.5, "presence_penalty": 0.5},
        {"temperature": 0.0, "bias_ids": [77, 5, 9000], "bias_values": [100.0, -100.0, 1.0]},
        {"temperature": 0.9, "top_k": 10, "stop_ids": [1, 2, 3], "min_tokens": 20},
        {"temperature": 0.3, "frequency_penalty": -1.5, "bias_ids": [6], "bias_values": [-5.0], "num_logprobs": 0},
    ],
}
SAMPLINGS["masked"] = SAMPLINGS["small top-k"]
SAMPLINGS["masked, changed logits"] = SAMPLINGS["changed logits"]
CONSTRAINED = range(1, NUM_SLOTS, 3)
"""The slots whose tokens are masked in the last two cases; the broken rows are not among them."""


def random_masks(generator: torch.Generator) -> torch.Tensor:
    """Masks that allow every eighth token or so, and one that allows a single token."""
    size = (len(CONSTRAINED), -(-VOCAB_SIZE // 32))
    bits = [torch.randint(-(2**31), 2**31, size, generator=generator) for _ in range(3)]
    masks = (bits[0] & bits[1] & bits[2]).int()
    masks[4] = 0
    masks[4, 5_000 // 32] = 1 << (5_000 % 32)
    return masks


def masks_in_memory(masks: torch.Tensor) -> TokenMasks:
    """Masks that lie between others."""
    memory = torch.full((2 * len(masks), masks.shape[1]), -1, dtype=torch.int32)
    memory[1::2] = masks
    return TokenMasks(memory, np.arange(len(masks)) * 2 + 1)


def is_allowed(masks: torch.Tensor, row: int, token: int) -> bool:
    return bool(int(masks[row, token // 32]) >> (token % 32) & 1)


def run_rank(group: TensorParallelGroup) -> dict[str, Any]:
    """By case: (the ids, the log-probabilities, how often logits were gathered, whether the batch is simple)."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(NUM_SLOTS, VOCAB_SIZE, generator=generator) * 3
    logits[:5] = logits[:5].round()  # with equal ones
    logits[BROKEN[0], VOCAB_SIZE - 1] = torch.nan
    logits[BROKEN[1]] = -torch.inf
    size = -(-VOCAB_SIZE // group.size)
    padded = torch.nn.functional.pad(logits, (0, size * group.size - VOCAB_SIZE), value=100.0)
    shard = padded[:, group.rank * size : (group.rank + 1) * size].contiguous()
    gathered = []
    gather = group.gather
    group.gather = lambda x: (gathered.append(1), gather(x))[1]  # type: ignore[method-assign]
    results = {}
    masks = random_masks(generator).flip(0)  # rows are in the order of descending slots
    for case, kinds in SAMPLINGS.items():
        is_masked = case.startswith("masked")
        slot_table = SlotTable(engine_config(max_num_seqs=NUM_SLOTS), 1, CPU)
        samplings = [slot_sampling(i * 7, **kinds[i % len(kinds)]) for i in range(NUM_SLOTS)]
        slot_table.apply(entering_step(samplings, CONSTRAINED if is_masked else ()))
        sampler = Sampler(slot_table, group, VOCAB_SIZE)
        slots = torch.arange(NUM_SLOTS).flip(0)
        positions = slots.int()
        gathered.clear()
        needs = sampler.needs(slots.numpy())
        given = masks_in_memory(masks) if group.rank == 0 else TokenMasks.allowing_all(*masks.shape, CPU)
        ids, logprobs = sampler.sample_fully(shard.clone(), slots, positions, needs, given if is_masked else None)
        assert ids.dtype == torch.int32
        if is_masked:
            chosen = [ids[NUM_SLOTS - 1 - slot].item() for slot in reversed(CONSTRAINED)]
            assert all(is_allowed(masks, row, token) for row, token in enumerate(chosen))
            assert 5_000 in chosen
        if needs.is_simple:
            assert torch.equal(ids, sampler.sample(shard.clone(), slots, positions))
        found = None if logprobs is None else logprobs.result()
        results[case] = ids.tolist(), found, len(gathered), needs.is_simple
    return results


@pytest.mark.parametrize("size", [2, 4])
def test_same_tokens_on_every_rank_as_with_one(size: int, tmp_path: Path) -> None:
    alone = run_rank(TensorParallelGroup.single())
    ranks = run_ranks(size, run_rank, tmp_path)
    for case, (ids, logprobs, _, _) in alone.items():
        assert all(rank[case][0] == ids for rank in ranks), case
        assert [row for row, token in enumerate(ids) if token == NOT_FINITE] == sorted(BROKEN), case
        assert ranks[0][case][1] == logprobs
    num_gathers = {case: count for case, (_, _, count, _) in ranks[0].items()}
    assert num_gathers == {
        "greedy": 0,
        "temperatures": 0,
        "small top-k": 0,
        "filters": 1,
        "logprobs": 1,
        "changed logits": 1,
        "masked": 0,
        "masked, changed logits": 1,
    }
    assert [case for case, result in ranks[0].items() if result[3]] == ["greedy", "temperatures"]
    assert [case for case, result in alone.items() if result[3]] == ["greedy", "temperatures", "small top-k", "filters"]


def test_log_probabilities_are_of_the_unmodified_logits_and_of_the_rows_that_asked() -> None:
    result = run_rank(TensorParallelGroup.single())
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(NUM_SLOTS, VOCAB_SIZE, generator=generator) * 3
    logits[:5] = logits[:5].round()
    for case, asking, num_alternatives in (("logprobs", 0, 2), ("changed logits", 3, 0)):
        ids, found, _, _ = result[case]
        for row, token in enumerate(ids):
            slot, entry = NUM_SLOTS - 1 - row, found[row]
            if slot % len(SAMPLINGS[case]) != asking:
                assert entry is None
                continue
            expected = logits[row].log_softmax(dim=-1)
            assert entry.logprob == pytest.approx(float(expected[token]), abs=1e-5)
            assert entry.top_logprobs == pytest.approx(expected.topk(num_alternatives).values.tolist(), abs=1e-5)
            assert len(entry.top_ids) == num_alternatives


def test_biases_and_forbidden_stop_ids_hold_for_their_rows_and_leave_with_the_request() -> None:
    """The greedy token by hand; a slot that is filled again keeps nothing of its last request."""
    slot_table = SlotTable(engine_config(max_num_seqs=4), 1, CPU)
    sampler = Sampler(slot_table, TensorParallelGroup.single(), 50)
    logits = torch.arange(50.0).repeat(4, 1)
    slots, positions = torch.arange(4), torch.tensor([9, 9, 10, 9], dtype=torch.int32)

    def fill(*kinds: dict[str, Any]) -> None:
        new = [
            NewSlot(slot=i, num_cached_tokens=0, sampling=slot_sampling(i, temperature=0.0, **kind))
            for i, kind in enumerate(kinds)
        ]
        slot_table.sampling.fill(new, slot_table.upload)

    def choose() -> list[int]:
        needs = sampler.needs(slots.numpy())
        ids, logprobs = sampler.sample_fully(logits.clone(), slots, positions, needs)
        assert logprobs is None
        return ids.tolist()  # type: ignore[no-any-return]

    stops = {"prompt_len": 4, "min_tokens": 6, "stop_ids": [49, 48]}
    biased = {"bias_ids": [7, 49, 0], "bias_values": [60.0, -60.0, 0.5]}
    fill(biased, stops, stops, {**stops, "bias_ids": [49, 47], "bias_values": [100.0, -100.0]})
    assert choose() == [7, 47, 49, 46]
    fill({"presence_penalty": 0.5}, biased, {}, {"bias_ids": [3], "bias_values": [99.0]})
    assert choose() == [49, 7, 49, 3]
