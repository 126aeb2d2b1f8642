"""What requests begin with alike is computed once to the token: by choices that are scored, and by requests that enter
in a later step."""

from __future__ import annotations

from typing import Any

import pytest

from nvcli.core.messages import MOST_KEY_COPIES, KVGroup, StepInput, StepOutput, pack, unpack
from nvcli.engine.admission import Admission
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.request import PromptScoring, Request
from nvcli.engine.scheduler import Scheduler
from nvcli.engine.state import RequestState
from nvcli.engine.step_draft import ScheduledStep
from requests_factory import make_request

BLOCK_SIZE = 64
FULL, WINDOW, STATE = KVGroup(), KVGroup(window=30), KVGroup(window=2, is_state=True)


def choices(first_id: int, context: list[int], num: int, *, num_tokens: int = 8) -> list[Request]:
    """The requests of a row that is scored. All tokens of a choice but its last are computed."""
    texts = [[1000 + first_id + number] * num_tokens for number in range(num)]
    return [
        make_request(
            first_id + number, context + text[:-1], 1, read=PromptScoring(first=len(context), next_id=text[-1])
        )
        for number, text in enumerate(texts)
    ]


def first_step(requests: list[Request], *, groups: tuple[KVGroup, ...] = (FULL,), caching: bool = True) -> StepInput:
    limits = SchedulerLimits(
        max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=1024, block_size=BLOCK_SIZE, kv_groups=groups
    )
    scheduler = Scheduler(limits, BlockManager(1000, enable_prefix_caching=caching))
    scheduler.add(requests)
    step = scheduler.schedule()
    assert step is not None
    scheduler.check_integrity()
    return step.input


def copies_of(step: StepInput) -> list[tuple[int, ...]]:
    return [*zip(*[iter(unpack(step.key_copies))] * 5, strict=True)]


@pytest.mark.parametrize("groups", [(FULL,), (WINDOW, FULL)])
def test_choices_compute_their_context_once_to_the_token(groups: tuple[KVGroup, ...]) -> None:
    """The last token of the context is computed for each choice, because the choice's first token is read there."""
    context = list(range(499))
    requests = choices(0, context, 4) + choices(100, context[:0:-1], 4)
    step = first_step(requests, groups=groups)
    assert unpack(step.num_tokens).tolist() == [499 + 7, 8, 8, 8, 498 + 7, 8, 8, 8]
    copies = copies_of(step)
    assert [copy[0] for copy in copies] == [group for group in range(len(groups)) for _ in range(6)]
    assert {copy[3:] for copy in copies} == {(0, 498 % 64), (0, 497 % 64)}
    cached = [slot.num_cached_tokens for slot in step.new_slots]
    assert cached == [0, 498, 498, 498, 0, 497, 497, 497]


def test_long_choices_are_left_behind_with_their_blocks() -> None:
    """The first choice goes on for blocks, of which the first begins with the context's end."""
    step = first_step(choices(0, list(range(100)), 3, num_tokens=300))
    assert unpack(step.num_tokens).tolist() == [399, 300, 300]


def test_one_token_is_computed_of_prompts_that_are_equal() -> None:
    """Choices of a single token have the context as their prompt."""
    step = first_step(choices(0, list(range(200)), 4, num_tokens=1))
    assert unpack(step.num_tokens).tolist() == [200, 1, 1, 1]


def test_what_the_other_request_copies_comes_from_where_it_copies_it() -> None:
    """Rows with a few tokens in common, each with choices, all within one block. Pieces beyond the most are computed
    again."""
    lead = [7, 8, 9]
    rows = [choices(10 * row, lead + [100 + row] * 20, 2) for row in range(3)]
    step = first_step([request for row in rows for request in row])
    assert unpack(step.num_tokens).tolist() == [30, 8, 27, 8, 27, 8]
    written = {(target, offset) for _, _, target, first, end in copies_of(step) for offset in range(first, end)}
    read = {(source, offset) for _, source, _, first, end in copies_of(step) for offset in range(first, end)}
    assert read.isdisjoint(written)
    longer = [choices(10 * number, [*range(10 * (number + 1)), 500 + number], 1) for number in range(4)]
    step = first_step([request for row in longer for request in row])
    most = max(sum(copy[2] == target for copy in copies_of(step)) for _, _, target, _, _ in copies_of(step))
    assert most == MOST_KEY_COPIES
    assert unpack(step.num_tokens).tolist() == [18, 18, 18, 28]


def test_nothing_is_copied_where_it_must_not_be() -> None:
    context = list(range(100))
    plain = [make_request(number, [*context, number], 5) for number in range(4)]
    assert not first_step(plain).key_copies, "keys of the step itself are not copied where graphs may run it"
    requests = choices(0, context, 4)
    assert first_step(requests).key_copies
    assert not first_step(requests, caching=False).key_copies
    assert not first_step(requests, groups=(FULL, STATE)).key_copies
    whole = [make_request(number, [*context, number], 1, read=PromptScoring(first=1)) for number in range(4)]
    assert not first_step(whole).key_copies, "all of their tokens are read"


def next_step(scheduler: Scheduler, last: ScheduledStep | None = None) -> ScheduledStep:
    """Give the last step's tokens, all of them 5, and return the next one."""
    if last is not None:
        num_logits = sum(unpack(last.input.num_logits))
        scheduler.process(last, StepOutput(step_id=last.input.step_id, token_ids=pack([5] * num_logits)))
    step = scheduler.schedule()
    assert step is not None
    scheduler.check_integrity()
    return step


@pytest.mark.parametrize(("length", "num_computed"), [(100, 1), (79, 15)])
def test_a_request_that_enters_later_copies_before_its_step(length: int, num_computed: int) -> None:
    """It computes the prompt's last token alone. Few tokens are not worth a copy."""
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=512, max_model_len=256, block_size=BLOCK_SIZE)
    scheduler = Scheduler(limits, BlockManager(100))
    scheduler.add([make_request(number, list(range(length)), 9 if number == 1 else 1) for number in range(3)])
    first = next_step(scheduler)
    assert not first.input.key_copies
    step = next_step(scheduler, first).input
    assert unpack(step.num_tokens).tolist() == [1, num_computed]
    assert bool(step.key_copies) == (num_computed == 1)
    assert not step.copies_new_keys


def test_a_choice_that_is_not_admitted_leaves_the_step_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies would have been of keys that the step computes, for which no graph runs."""
    fits = Admission._fits

    def fits_unqueried(self: Admission, state: RequestState, *rest: Any) -> bool:
        return state.queries is None and fits(self, state, *rest)

    monkeypatch.setattr(Admission, "_fits", fits_unqueried)
    limits = SchedulerLimits(
        max_num_seqs=8, max_num_batched_tokens=512, max_model_len=256, block_size=BLOCK_SIZE, plans_admission=True
    )
    scheduler = Scheduler(limits, BlockManager(8))
    context = list(range(100))
    scheduler.add([make_request(0, list(range(500, 540)), 150), make_request(1, [*context, 7], 20)])
    scheduler.add(choices(10, context, 1))
    step = next_step(scheduler).input
    assert unpack(step.num_tokens).tolist() == [40, 101]
    assert not step.key_copies
    assert not step.copies_new_keys
