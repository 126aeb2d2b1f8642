"""A row gives 0 to k tokens, which the host learns a step late: limits hold exactly, and bounds are taken back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest

from nvcli.core.messages import StepOutput, TokenLogprobs, unpack
from nvcli.engine.core import EngineCore
from nvcli.engine.draft_policy import NO_DRAFTS, Drafting
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.request import Request
from nvcli.engine.scheduler import Scheduler
from rank_in_process import RankInProcess, decode_slots_of, make_core, rows_of, run, spans_of, wait_for_last_tokens
from requests_factory import make_request


def make(
    accept: Callable[[int], int] | None,
    *,
    num_blocks: int = 100,
    max_in_flight: int = 2,
    tokens_per_row: int = 1,
    **limits: int,
) -> tuple[EngineCore, Scheduler, RankInProcess]:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 64, "block_size": 4}
    widths = tuple(range(2, tokens_per_row + 1))
    drafting = Drafting(widths=widths, policy="always") if widths else NO_DRAFTS
    scheduler_limits = SchedulerLimits(drafting=drafting, **{**values, **limits})
    rank = RankInProcess(scheduler_limits, accept=accept)
    core, scheduler = make_core(scheduler_limits, rank, num_blocks=num_blocks, max_in_flight=max_in_flight)
    return core, scheduler, rank


def answer(request: Request) -> list[int]:
    """The tokens of a request, one at a time."""
    core, scheduler, _ = make(None)
    core.scheduler.add([request])
    (output,) = run(core, scheduler).values()
    return unpack(output.token_ids).tolist()


def from_list(counts: Sequence[int]) -> Callable[[int], int]:
    """These numbers of tokens, then as many as may be."""
    left = list(counts)
    return lambda num_logits: min(left.pop(0), num_logits) if left else num_logits


def test_a_row_that_gives_nothing_is_computed_again() -> None:
    """The prompt's last row, too."""
    request = make_request(0, [1, 2, 3], 6)
    core, scheduler, rank = make(from_list([0, 0, 1, 0, 0, 0, 1]), max_in_flight=1)
    core.scheduler.add([request])
    (output,) = run(core, scheduler).values()
    assert unpack(output.token_ids).tolist() == answer(request)
    starts = [unpack(step.seq_lens)[0] - 1 for step in rank.steps]
    assert starts == [2, 2, 2, 3, 3, 3, 3, 4, 5, 6, 7]
    assert [step.num_decodes for step in rank.steps] == [0] + [1] * 10


@pytest.mark.parametrize("max_in_flight", [1, 2])
@pytest.mark.parametrize("max_tokens", range(1, 12))
def test_tokens_behind_the_limit_are_dropped(max_tokens: int, max_in_flight: int) -> None:
    core, scheduler, _ = make(lambda num_logits: num_logits, tokens_per_row=4, max_in_flight=max_in_flight)
    core.scheduler.add([request := make_request(0, [1, 2, 3], max_tokens)])
    (output,) = run(core, scheduler).values()
    assert unpack(output.token_ids).tolist() == answer(request)
    assert output.finish_reason == "length"
    assert core.scheduler.stats.generated_tokens == max_tokens


@pytest.mark.parametrize("place", range(1, 9))
def test_tokens_behind_a_stop_id_are_dropped_with_their_log_probabilities(place: int) -> None:
    request = make_request(0, [1, 2, 3], 12)
    tokens = answer(request)
    request = make_request(0, [1, 2, 3], 12, stop_ids=[tokens[place]])
    tokens = tokens[: tokens.index(tokens[place]) + 1]
    core, scheduler, rank = make(lambda num_logits: num_logits, tokens_per_row=4)
    collect = rank.collect

    def collect_with_logprobs() -> StepOutput:
        output = collect()
        logprobs = [TokenLogprobs(logprob=-token, top_ids=[], top_logprobs=[]) for token in unpack(output.token_ids)]
        return StepOutput(
            step_id=output.step_id, token_ids=output.token_ids, counts=output.counts, logprobs=list(logprobs)
        )

    rank.collect = collect_with_logprobs  # type: ignore[method-assign]
    core.scheduler.add([request])
    (output,) = run(core, scheduler).values()
    assert unpack(output.token_ids).tolist() == tokens
    assert (output.finish_reason, output.stopped_by_id) == ("stop", True)
    assert [-entry.logprob for entry in output.logprobs] == tokens


def test_no_row_passes_the_longest_length() -> None:
    """Prompt and answer fill it; the last row gives no more tokens than are left, though it computes more."""
    core, scheduler, rank = make(lambda num_logits: num_logits, tokens_per_row=5, max_model_len=23)
    core.scheduler.add([request := make_request(0, list(range(4)), 19)])
    (output,) = run(core, scheduler).values()
    assert unpack(output.token_ids).tolist() == answer(request)
    widths = [unpack(step.num_tokens)[0] for step in rank.steps]
    assert widths == [4, 5, 5, 5, 5]
    assert [step.num_decodes for step in rank.steps] == [0, 1, 1, 1, 1]


def test_a_lone_request_fits_whatever_the_width_of_its_rows() -> None:
    """8 blocks are filled to the last token that is computed; the width would need a ninth."""
    for width in (1, 2, 3, 5):
        core, scheduler, _ = make(lambda num_logits: num_logits, tokens_per_row=width, num_blocks=8)
        core.scheduler.add([request := make_request(0, list(range(9)), 24)])
        (output,) = run(core, scheduler).values()
        assert output.finish_reason == "length"
        assert unpack(output.token_ids).tolist() == answer(request)


def test_blocks_are_those_of_the_upper_bound() -> None:
    core, scheduler, _ = make(from_list([1, 2, 0]), tokens_per_row=8)
    core.scheduler.add([make_request(0, [1, 2, 3], 40)])
    used = []
    for _ in range(4):
        core.step()
        scheduler.check_integrity()
        used.append(scheduler.block_manager.num_used)
    # Bounds: 3 | 11, all of 1 came | 19 less 6 of 8 is 13 | 21 less all 8 is 13.
    assert used == [1, 3, 4, 4]


def test_rows_take_turns_where_a_step_has_no_room_for_all() -> None:
    core, scheduler, rank = make(lambda n: n, tokens_per_row=4, max_num_batched_tokens=8, max_num_seqs=4)
    core.scheduler.add(requests := [make_request(i, [i, 1], 12) for i in range(4)])
    done = run(core, scheduler)
    assert all(unpack(done[request.request_id].token_ids).tolist() == answer(request) for request in requests)
    full = [tuple(decode_slots_of(step)) for step in rank.steps if step.num_decodes == 2]
    assert all(not set(one) & set(next_one) for one, next_one in pairwise(full[:4]))


def test_rows_are_no_wider_than_a_step() -> None:
    core, scheduler, rank = make(lambda n: n, tokens_per_row=4, max_num_batched_tokens=2, max_num_seqs=2)
    core.scheduler.add([request := make_request(0, [1], 12)])
    (output,) = run(core, scheduler).values()
    assert unpack(output.token_ids).tolist() == answer(request)
    assert max(step.total_tokens for step in rank.steps) == 2


def test_a_request_that_needs_its_last_token_is_held_back_alone() -> None:
    """It is in every other step and brings its token along; the others are in every step."""
    core, scheduler, rank = make(None)
    requests = [make_request(i, [i, 1], 12) for i in range(4)]
    core.scheduler.add(requests)
    wait_for_last_tokens(scheduler, 2)
    done = run(core, scheduler)
    assert all(unpack(done[request.request_id].token_ids).tolist() == answer(request) for request in requests)
    held_slot = next(new.slot for new in rank.steps[0].new_slots if new.sampling.row == 2)
    decodes = [decode_slots_of(step) for step in rank.steps[1:]]
    assert [held_slot in slots for slots in decodes[:10]] == [False, True] * 5
    assert all(len(set(slots) - {held_slot}) == 3 for slots in decodes[:10])
    spans = [spans_of(step) for step in rank.steps[1:]]
    assert all([slot for slot, _, _ in brought] in ([], [held_slot]) for brought in spans)
    assert sum(map(len, spans)) == 11


def test_a_preempted_request_waits_for_the_tokens_on_their_way() -> None:
    """It comes back when their count is known, with those that came."""
    core, scheduler, rank = make(from_list([1, 1, 2, 1, 0, 3]), tokens_per_row=3, num_blocks=6, max_num_seqs=2)
    core.scheduler.add(requests := [make_request(i, [i, 1, 2], 18) for i in range(2)])
    done = run(core, scheduler)
    assert core.scheduler.stats.num_preemptions > 0
    assert all(unpack(done[request.request_id].token_ids).tolist() == answer(request) for request in requests)
    assert all(len(rows_of(step)) <= 2 for step in rank.steps)


def test_all_rows_decode_without_drafts_or_wait_where_drafts_have_taken_the_blocks() -> None:
    """A step for some of them would take as long as one for all."""
    core, scheduler, rank = make(lambda n: 1, tokens_per_row=3, num_blocks=7)
    core.scheduler.add(make_request(i, range(i, i + length), 10) for i, length in enumerate((2, 2, 1)))
    run(core, scheduler)
    before_any_is_preempted = rank.steps[1:7]
    assert [step.num_decodes for step in before_any_is_preempted] == [3] * 6
    assert {step.total_tokens for step in before_any_is_preempted} == {3, 9}


def test_a_cached_prefix_comes_with_its_tokens_where_drafts_are_looked_up_in_it() -> None:
    prompt = list(range(12))
    for width, brought in ((1, prompt[8:]), (4, prompt)):
        core, scheduler, rank = make(lambda n: n, tokens_per_row=width)
        core.scheduler.add([make_request(0, prompt, 2)])
        run(core, scheduler)
        core.scheduler.add([make_request(1, prompt, 2)])
        run(core, scheduler)
        (entering,) = [step for step in rank.steps if step.new_slots and step.new_slots[0].num_cached_tokens]
        assert sorted(token for _, _, tokens in spans_of(entering) for token in tokens) == brought
