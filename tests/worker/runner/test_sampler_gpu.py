"""The sampler on a GPU never makes the host wait, and chooses what it chooses on a CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fake_runners import engine_config
from nvcli.core.messages import FORBIDDEN, TokenLogprobs
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from nvcli.worker.runner.sampler import Sampler, TokenMasks
from nvcli.worker.runner.slot_table import SlotTable
from slot_sampling import entering_step, slot_sampling

pytestmark = pytest.mark.gpu

NUM_SLOTS = 64
VOCAB_SIZE = 30_011
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "num_logprobs": 3},
    {"temperature": 1.2, "top_p": 0.9, "repetition_penalty": 1.4, "presence_penalty": 0.3},
    {"temperature": 0.7, "top_k": 200, "bias_ids": [5, 900], "bias_values": [6.0, -7.0]},
    {"temperature": 1.0, "min_p": 0.1, "stop_ids": [3, 17], "min_tokens": 70, "num_logprobs": 0},
    {"temperature": 1.0, "top_k": 5, "stop_ids": [3], "min_tokens": 9, "bias_ids": [17], "bias_values": [FORBIDDEN]},
    {"temperature": 0.0, "frequency_penalty": 0.5, "bias_ids": [8], "bias_values": [4.0], "num_logprobs": 20},
    {"temperature": 0.9, "allowed_ids": [3, 5, 9_000], "bias_ids": [5], "bias_values": [1.0]},
    {"temperature": 0.0, "bad_words": [[60, 61], [7, 8, 9]], "num_logprobs": 2},
]


class Rank:
    """The tables of one rank and its sampler."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots = SlotTable(engine_config(max_num_seqs=NUM_SLOTS), 1, device)
        self.sampler = Sampler(self.slots, TensorParallelGroup.single(), VOCAB_SIZE)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@torch.inference_mode()
def test_nothing_waits_and_the_tokens_are_the_cpus() -> None:
    constrained = range(0, NUM_SLOTS, 5)
    entering = entering_step([slot_sampling(i * 7, **KINDS[i % len(KINDS)]) for i in range(NUM_SLOTS)], constrained)
    size = (len(constrained), -(-VOCAB_SIZE // 32))
    masks = torch.randint(-(2**31), 2**31, size, generator=torch.Generator().manual_seed(2)).int()
    logits = torch.randn(NUM_SLOTS, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 3
    host_slots = np.arange(NUM_SLOTS)[::-1].copy()
    ids: dict[str, list[int]] = {}
    logprobs: dict[str, list[TokenLogprobs | None]] = {}
    for name in ("cpu", "cuda", "cuda"):  # the first round on the GPU compiles
        rank = Rank(torch.device(name))
        here, slots = logits.to(rank.device, copy=True), torch.from_numpy(host_slots).to(rank.device)
        positions, own_masks = slots.int(), TokenMasks(masks.to(rank.device), np.arange(len(masks)))
        try:
            if name in ids:
                torch.cuda.set_sync_debug_mode("error")
            rank.slots.apply(entering)
            needs = rank.sampler.needs(host_slots)
            assert not needs.is_simple
            found, pending = rank.sampler.sample_fully(here, slots, positions, needs, own_masks)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        assert pending is not None
        ids[name], logprobs[name] = found.tolist(), pending.result()
    assert sum(a != b for a, b in zip(ids["cpu"], ids["cuda"], strict=True)) <= 1  # rounding may tip one
    for row, (a, b) in enumerate(zip(logprobs["cpu"], logprobs["cuda"], strict=True)):
        assert (a is None) == (b is None)
        if a is not None and b is not None and ids["cpu"][row] == ids["cuda"][row]:
            assert b.logprob == pytest.approx(a.logprob, abs=1e-4)
            assert b.top_ids == a.top_ids
            assert b.top_logprobs == pytest.approx(a.top_logprobs, abs=1e-4)
