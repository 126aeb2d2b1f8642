"""What a step is said to have computed is what its requests' lengths say."""

from __future__ import annotations

from collections import deque
from collections.abc import Container

import pytest

from nvcli.core.messages import ForwardMode, KVGroup, StepInput, StepOutput, pack, unpack
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.core import EngineCore
from nvcli.engine.scheduler import Scheduler, SchedulerLimits
from nvcli.engine.step_recorder import StepRecorder
from requests_factory import make_request


class InstantExecutor:
    def __init__(self, failing: Container[int] = ()) -> None:
        self._failing = failing
        self._outputs: deque[StepOutput] = deque()

    def submit(self, step: StepInput) -> None:
        tokens = [7] * sum(unpack(step.num_logits))
        reason = "as planned" if step.step_id in self._failing else ""
        self._outputs.append(
            StepOutput(step_id=step.step_id, token_ids=pack(tokens), seconds=step.step_id + 1.0, out_of_memory=reason)
        )

    def collect(self) -> StepOutput:
        return self._outputs.popleft()

    def recover(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> int:
        return 100


def recorded_core(limits: SchedulerLimits, failing: Container[int] = ()) -> EngineCore:
    """Steps with these numbers run out of memory, and new ranks take the place of those that ran them."""
    scheduler = Scheduler(limits, BlockManager(100))
    return EngineCore(scheduler, InstantExecutor(failing), max_in_flight=2, recorder=StepRecorder(limits))


def test_counts_follow_from_lengths_chunks_and_prefix_hits() -> None:
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=10, max_model_len=64, block_size=4)
    core = recorded_core(limits)
    prompt = list(range(14))
    core.scheduler.add([make_request(0, prompt, 3)])
    while core.has_work:
        core.step()
    core.scheduler.add([make_request(1, prompt, 1)])  # 12 of its 14 tokens are in the cache
    while core.has_work:
        core.step()
    first, second, *decodes, hit = core.take_records()
    assert (first.mode, first.num_prefill_tokens, first.num_sampled) == (ForwardMode.EXTEND, 10, 0)
    assert (first.prefill_keys, first.prefill_pairs) == (10, sum(range(1, 11)))
    assert (second.num_prefill_tokens, second.num_sampled) == (4, 1)
    assert (second.prefill_keys, second.prefill_pairs) == (14, 11 + 12 + 13 + 14)
    assert [(step.num_decodes, step.decode_keys, step.num_sampled) for step in decodes] == [(1, 15, 1), (1, 16, 1)]
    assert (hit.num_prefill_tokens, hit.prefill_keys, hit.prefill_pairs) == (2, 14, 13 + 14)
    assert [step.num_chunks for step in (first, second, *decodes, hit)] == [1, 1, 0, 0, 1]
    assert [step.seconds for step in (first, second, *decodes, hit)] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [step.num_used_blocks for step in (first, second, *decodes)] == [4, 4, 4, 4]
    assert core.take_records() == []


@pytest.mark.parametrize("kv_groups", [(KVGroup(),), (KVGroup(window=8), KVGroup())])
def test_keys_that_several_rows_read_are_counted(kv_groups: tuple[KVGroup, ...]) -> None:
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=40, max_model_len=64, block_size=4, kv_groups=kv_groups
    )
    core = recorded_core(limits)
    prefix = list(range(14))  # three blocks are shared
    core.scheduler.add([make_request(0, [*prefix, 50], 9)])
    core.step()
    core.scheduler.add(
        [make_request(1, [*prefix, 51], 3), make_request(2, [*prefix, 52, 53], 2), make_request(3, [60] * 9, 4)]
    )
    while core.has_work:
        core.step()
    records = core.take_records()
    assert records[0].repeated_prefill_keys == 0
    assert (records[1].num_chunks, records[1].repeated_prefill_keys) == (3, 3 * 4), "two chunks share three blocks"
    shared = [(step.num_decodes, step.repeated_decode_keys) for step in records[1:]]
    # Four rows of which three share; then the second and third request have ended.
    assert shared == [(1, 0), (4, 2 * 12), (3, 12), (2, 0), (1, 0), (1, 0), (1, 0), (1, 0)]


def test_keys_are_no_longer_shared_once_a_slot_is_anothers() -> None:
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=40, max_model_len=64, block_size=4)
    core = recorded_core(limits)
    core.scheduler.add(
        [make_request(i, [*range(8), 50 + i] if i < 2 else [70 + i] * 9, 3 if i else 6) for i in range(4)]
    )
    while core.has_work:
        core.step()
    shared = [step.repeated_decode_keys for step in core.take_records() if step.num_decodes == 2]
    assert shared[:2] == [8, 8]
    assert not any(shared[2:])


def test_new_ranks_share_nothing_with_those_before() -> None:
    """A request that is taken back comes into the slot of another one, which had more blocks."""
    limits = SchedulerLimits(max_num_seqs=3, max_num_batched_tokens=60, max_model_len=64, block_size=4)
    core = recorded_core(limits, failing=(5, 6))
    core.scheduler.add([make_request(i, [70 + i] * length, 1 if i == 0 else 20) for i, length in enumerate([4, 30, 4])])
    while core.has_work:
        core.step()
    assert len(core.take_notes()) == 1
    assert not any(step.repeated_decode_keys for step in core.take_records())
