"""The samples of a row share its prompt."""

from __future__ import annotations

import tracemalloc
from array import array

import msgspec
import pytest

from nvcli.core.messages import StepOutput, unpack
from nvcli.engine.block_manager import BlockManager, hash_blocks
from nvcli.engine.prompt_hashes import PromptHashes
from nvcli.engine.protocol import AddRequests
from nvcli.engine.scheduler import Scheduler, SchedulerLimits
from nvcli.engine.state import Prompt, RequestState
from requests_factory import make_request

BLOCK_SIZE = 4


def test_a_request_of_several_samples_is_one_request_for_each() -> None:
    request = make_request(7, [1, 2], 5, n=3, sample=0, row=2)
    samples = request.samples()
    assert [(each.request_id, each.sample, each.row, each.n) for each in samples] == [
        (7, 0, 2, 1),
        (8, 1, 2, 1),
        (9, 2, 2, 1),
    ]
    assert make_request(7, [1, 2], 5).samples() == [make_request(7, [1, 2], 5)]


def test_many_samples_of_a_long_prompt_take_little_memory_and_a_short_message() -> None:
    """1,024 copies of this prompt would be 200 MB, in the message and in the engine."""
    length, n = 50_000, 1024
    request = make_request(0, range(length), 4, n=n, stop_ids=list(range(1000, 2000)))
    assert len(msgspec.msgpack.encode(AddRequests([request]))) < 6 * length
    limits = SchedulerLimits(max_num_seqs=16, max_num_batched_tokens=8192, max_model_len=length + 4, block_size=64)
    scheduler = Scheduler(limits, BlockManager(2000))
    tracemalloc.start()
    try:
        scheduler.add([request])
        for _ in range(20):
            step = scheduler.schedule()
            assert step is not None
            tokens = b"\5\0\0\0" * sum(unpack(step.input.num_logits))
            scheduler.process(step, StepOutput(step_id=step.input.step_id, token_ids=tokens))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert scheduler.stats.num_running == 16
    assert peak < 20 * 4 * length
    scheduler.check_integrity()


@pytest.mark.parametrize("num_prompt", [1, 3, 4, 9, 12])
def test_tokens_and_hashes_are_those_of_prompt_and_answer_in_a_row(num_prompt: int) -> None:
    request = make_request(0, range(100, 100 + num_prompt), 30)
    prompt, hashes = Prompt(request), PromptHashes(BLOCK_SIZE)
    first, other = RequestState(request, prompt), RequestState(request, prompt)
    known = array("i", range(100, 100 + num_prompt))
    for token in range(200, 217):
        first.generated.append(token)
        known.append(token)
        assert first.num_tokens == len(known)
        for start in range(len(known)):
            assert first.tokens(start, start + 3) == known[start : start + 3]
        expected = hash_blocks(known.tobytes(), BLOCK_SIZE)
        for begin in range(len(expected) + 1):
            assert first.hash_blocks(begin, len(expected), hashes) == expected[begin:]
    assert other.num_tokens == num_prompt
    assert other.hash_blocks(0, num_prompt // BLOCK_SIZE, hashes) == expected[: num_prompt // BLOCK_SIZE]
