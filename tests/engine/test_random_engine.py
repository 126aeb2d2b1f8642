"""Whatever is drawn at random, in any combination: numbers of tokens that a row gives, windows, stages, too few blocks,
aborts, steps that run out of memory. Every request gets the tokens that it gets alone, one at a time, all keys in the
cache."""

from __future__ import annotations

import random
import re
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import dropwhile
from typing import Any

import msgspec
import pytest

from combinations import seeds
from nvcli.core.messages import KVGroup, StepInput, pack, unpack
from nvcli.core.sampling_params import SamplingParams, StopRepetition
from nvcli.engine import key_copies, running_requests
from nvcli.engine.chunk_groups import PrefixCosts
from nvcli.engine.draft_policy import NO_DRAFTS, Drafting
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.merged_adapter import MergedAdapter
from nvcli.engine.request import Pooling, PromptScoring, Request, RequestOutput, ThoughtLimit
from nvcli.engine.segment_forest import SegmentCosts
from nvcli.engine.state import RequestState
from rank_in_process import RankInProcess, draw_widths, make_core, random_count, wait_for_last_tokens
from requests_factory import make_request

MAX_MODEL_LEN = 96
Tokens = dict[int, list[int]]
Answer = tuple[list[int], str | None, list[int] | None]
"""The tokens, the reason for their end, and what is read of the prompt."""
FULL, NARROW, WIDE = KVGroup(), KVGroup(window=6), KVGroup(window=17)
STATE = KVGroup(window=2, is_state=True)
EASY_LOOP = StopRepetition(max_pattern_size=30, min_count=2, min_tokens=2)
MOST_ADAPTERS = 6
CHECKED_STEPS = 3
"""What is wrong in the engine's tables stays there for some steps: checking takes as long as a step."""
FORCED = [60, 61, 62]
"""Tokens that no rank gives."""


@dataclass
class Case:
    """One random engine with its job."""

    rng: random.Random
    limits: SchedulerLimits
    rank: RankInProcess
    num_blocks: int
    requests: list[Request]
    read: Tokens = field(default_factory=dict)
    """What was read of each prompt: a number for each position, or one sum."""


def random_requests(rng: random.Random, number: int) -> list[Request]:
    prefixes = [[rng.randrange(50) for _ in range(rng.randrange(30))] for _ in range(3)]
    requests = []
    for i in range(number):
        prompt = rng.choice(prefixes) + [rng.randrange(50) for _ in range(rng.randint(1, 20))]
        if i and rng.random() < 0.2:  # an earlier prompt and what may be its answer's beginning
            prompt = unpack(rng.choice(requests).prompt_ids).tolist()[: MAX_MODEL_LEN // 2]
        longest = MAX_MODEL_LEN - len(prompt)
        max_tokens = longest if rng.random() < 0.15 else rng.randint(1, min(30, longest))
        stop_ids = [100 + rng.randrange(50) for _ in range(rng.choice([0, 0, 1, 4]))]
        sampling = SamplingParams(
            temperature=0,
            repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
            min_tokens=rng.choice([0, 0, rng.randint(0, max_tokens)]),
            stop_repetition=rng.choice([False, False, EASY_LOOP]),
        )
        thought = ThoughtLimit(
            budget=rng.randrange(20),
            start_ids=rng.choice([[], [100 + rng.randrange(50)]]),
            ends=[[100 + rng.randrange(50) for _ in range(rng.randint(1, 2))]],
            forced_ids=FORCED[: rng.randint(1, 3)],
        )
        reads = [
            None,
            PromptScoring(first=rng.randint(1, len(prompt)), next_id=7),
            Pooling(position=rng.choice(["first", "last", "all"])),
        ]
        fields: dict[str, Any] = {
            "read": rng.choice(reads),
            "stop_ids": stop_ids,
            "sampling": sampling,
            "stream": rng.random() < 0.2,
            "thought_limit": thought if rng.random() < 0.3 else None,
        }
        requests.append(make_request(i, prompt, max_tokens, **fields))
    return requests


def behind_prefixes(requests: list[Request], rng: random.Random) -> list[Request]:
    """The same requests, with short prompts behind one of a few prefixes."""
    prefixes = [[rng.randrange(50) for _ in range(rng.randrange(10, 50))] for _ in range(rng.randint(1, 3))]
    changed = []
    for request in requests:
        prompt = rng.choice(prefixes) + [rng.randrange(50) for _ in range(rng.randint(1, 6))]
        read = rng.choice(
            [None, None, PromptScoring(first=rng.randint(1, len(prompt)), next_id=7), Pooling(position="all")]
        )
        max_tokens = rng.choice([4, 8, 30])
        sampling = msgspec.structs.replace(request.sampling, min_tokens=0)
        changed.append(
            msgspec.structs.replace(
                request, prompt_ids=pack(prompt), max_tokens=max_tokens, sampling=sampling, read=read
            )
        )
    return changed


def choices_behind_contexts(requests: list[Request], rng: random.Random) -> list[Request]:
    """The same number of requests, most of them choices to be scored, some of a context one after the other. Contexts
    begin alike, and some have few different tokens, so that they are also alike behind where they part."""
    lead = [rng.randrange(50) for _ in range(rng.randrange(12))]
    num_tokens = rng.choice([2, 50])
    changed: list[Request] = []
    while len(changed) < len(requests):
        context = lead + [rng.randrange(num_tokens) for _ in range(rng.choice([1, 2, 5, 40]))]
        for request in requests[len(changed) :][: rng.choice([1, 4, 5])]:
            prompt = context + [rng.randrange(3) for _ in range(rng.choice([0, 1, 3, 30]))]
            read = rng.choice([None, None, *[PromptScoring(first=len(context), next_id=7)] * 4])
            changed.append(make_request(request.request_id, prompt, rng.choice([1, 1, 1, 9]), read=read, n=request.n))
    return changed


def num_lowerings(limits: SchedulerLimits) -> int:
    """How often a step may run out of memory before there is no smaller one."""
    lowered = limits.lowered()
    return 0 if lowered is None else 1 + num_lowerings(lowered)


def _costs(least_gain: int) -> SegmentCosts:
    return SegmentCosts(tile=1, partial_result=0, least_gain=least_gain, least_saved_in_step=1)


def drafting_of(tokens_per_row: int) -> Drafting:
    """As many drafts as fit."""
    if tokens_per_row == 1:
        return NO_DRAFTS
    means = tuple(mean for mean in (1.5, 2.0, 3.0) if mean < tokens_per_row)
    return Drafting(
        widths=tuple(range(2, tokens_per_row + 1)),
        uneven_widths=means,
        most_of_uneven=tokens_per_row,
        uneven_from=2,
        policy="always",
    )


def random_case(seed: int, groups: tuple[KVGroup, ...], *, shares_prefixes: bool = False, num_homes: int = 1) -> Case:
    """`shares_prefixes`: prompts are short behind common prefixes, and attended together wherever they may be.
    `num_homes`: of requests, which have neither drafts nor anything in common if there are several."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 2, 4, 4, 4, 8])
    num_seqs = rng.randint(6 if shares_prefixes else 1, 12)
    limits = SchedulerLimits(
        max_num_seqs=num_seqs,
        max_num_batched_tokens=rng.randint(40 if shares_prefixes else num_seqs, 64),
        max_model_len=MAX_MODEL_LEN,
        block_size=block_size,
        num_micro_batches=rng.choice([1, 1, 1, 2, 3]),
        drafting=drafting_of(rng.choice([1, 1, 2, 3, 5])),
        kv_groups=groups,
        segment_costs=random.Random(seed).choice([None, *map(_costs, (1, 8, 30))]),
        prefix_costs=PrefixCosts(tile_tokens=8, token=0, least_gain=1, least_gain_in_step=1)
        if seed % 2 or shares_prefixes
        else None,
        plans_admission=seed % 3 == 0,
        max_loaded_adapters=random.Random(seed).choice([1, 2, 3]),
    )
    if num_homes > 1:
        plain = {"num_micro_batches": 1, "drafting": NO_DRAFTS, "segment_costs": None, "prefix_costs": None}
        limits = replace(limits, num_homes=num_homes, **plain)  # type: ignore[arg-type]
    failures = min(rng.choice([0, 0, rng.randint(1, 4)]), num_lowerings(limits))
    share = rng.choice([0.03, 0.1, 0.5])

    def fails(step: StepInput) -> bool:
        return len(rank.failed) < failures and rng.random() < share

    def some_blocks() -> int:
        return rng.randint(len(groups) * (24 // block_size + 1), len(groups) * 240 // block_size)

    rank = RankInProcess(
        limits,
        accept=random_count(rng, is_single_certain=STATE in groups) if rng.random() < 0.7 else None,
        force=(lambda: rng.choice([0, 0, 1, 2, rng.randint(3, 15)])) if seed % 3 == 1 else None,
        fails=fails,
        blocks_anew=some_blocks if rng.random() < 0.5 else None,
    )
    num_blocks, requests = some_blocks(), random_requests(rng, 40)
    return Case(rng, limits, rank, num_blocks, behind_prefixes(requests, rng) if shares_prefixes else requests)


def run_at_random(
    case: Case, *, hold_back: float, abort: float, checked_steps: int = CHECKED_STEPS
) -> tuple[dict[int, RequestOutput], Tokens]:
    """Requests arrive bit by bit; some need their last token, some are aborted. Last outputs and tokens by request.
    The integrity of the engine's tables is checked once in so many steps, and at the end."""
    rng = case.rng
    max_in_flight = max(case.limits.num_micro_batches, rng.choice([1, 2, 2, 2]))
    core, scheduler = make_core(case.limits, case.rank, num_blocks=case.num_blocks, max_in_flight=max_in_flight)
    if rng.random() < 0.5:
        draw_widths(scheduler, rng)
    done: dict[int, RequestOutput] = {}
    tokens: Tokens = {request.request_id: [] for request in case.requests}
    num_added = 0
    for number in range(20_000):
        if num_added == len(case.requests) and not core.has_work:
            break
        for request in case.requests[num_added : num_added + rng.randrange(4)]:
            core.scheduler.add([request])
            num_added += 1
            if rng.random() < hold_back:
                wait_for_last_tokens(scheduler, request.request_id)
        if num_added and rng.random() < abort:
            core.scheduler.abort([rng.randrange(num_added)])
        if rng.random() < 0.01:
            core.scheduler.forget_prefixes()
        for output in core.step():
            assert output.request_id not in done
            tokens[output.request_id] += unpack(output.token_ids)
            for result in output.query_results:
                found = case.read.setdefault(output.request_id, [])
                found += unpack(result.logprobs)
                if result.hidden_sum:
                    found[:] = [sum([*found, *unpack(result.hidden_sum)])]
            if output.finish_reason is not None:
                done[output.request_id] = output
        if number % checked_steps == 0:
            scheduler.check_integrity()
    scheduler.check_integrity()
    assert done.keys() == tokens.keys(), "the engine does not come to an end"
    assert scheduler.num_used_blocks == 0
    assert len(core.take_notes()) == len(case.rank.failed)
    assert core.scheduler.stats.num_running == 0
    return done, tokens


@cache
def requests_and_answers(seed: int) -> tuple[list[Request], dict[int, Answer]]:
    requests = random_requests(random.Random(seed), 40)
    return requests, expected_answers(requests)


def expected_answers(requests: list[Request]) -> dict[int, Answer]:
    """The answers by request: one token at a time, one group that keeps all, and room for everything."""
    plain = SchedulerLimits(
        max_num_seqs=8,
        max_num_batched_tokens=512,
        max_model_len=MAX_MODEL_LEN,
        block_size=4,
        max_loaded_adapters=MOST_ADAPTERS,
    )
    case = Case(random.Random(0), plain, RankInProcess(plain), 1000, requests)
    done, tokens = run_at_random(case, hold_back=0, abort=0, checked_steps=20_000)
    return {i: (tokens[i], output.finish_reason, case.read.get(i)) for i, output in done.items()}


def blocks_needed(num_tokens: int, limits: SchedulerLimits) -> int:
    """What a request takes that computes so many tokens one by one."""

    def held(position: int, group: KVGroup) -> int:
        if group.is_state:
            return 1
        first = 0 if group.window is None else max(0, position - group.window + 1)
        return len({p // limits.block_size for p in range(first, position + 1)})

    return max(sum(held(position, group) for group in limits.kv_groups) for position in range(num_tokens))


GROUPS = {
    "full": (FULL,),
    "window": (NARROW,),
    "wide window": (WIDE,),
    "full and window": (FULL, NARROW),
    "three": (WIDE, FULL, NARROW),
    "full and states": (FULL, STATE, STATE),
    "window and spans": (NARROW, KVGroup(span=4), WIDE, KVGroup(span=2)),
}


@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS.keys())
@pytest.mark.parametrize("seed", seeds(12))
def test_answers_are_those_of_one_token_at_a_time(seed: int, groups: tuple[KVGroup, ...]) -> None:
    """Engines of other groups answer the same requests."""
    case = random_case(seed * 7 + len(groups), groups)
    case.requests, expected = requests_and_answers(seed)
    check_answers(case, expected)


def test_homes_change_no_answer() -> None:
    """With requests that end at different times, too few blocks and prompts that begin alike."""
    num_again = num_cached = num_uneven = 0
    for seed in range(18):
        case = random_case(seed, [*GROUPS.values()][seed % len(GROUPS)], num_homes=2 + seed % 3)
        check_answers(case)
        entered = [new for step in case.rank.ran for new in step.new_slots]
        num_again += max(0, len(entered) - len(case.requests))
        num_cached += sum(new.num_cached_tokens for new in entered)
        homes = [{slot % case.limits.num_homes for slot in unpack(step.slots)} for step in case.rank.ran]
        num_uneven += sum(len(used) < case.limits.num_homes for used in homes)
    assert num_again > 20
    assert num_cached > 200
    assert num_uneven > 20


def test_answers_behind_shared_prefixes_are_those_of_one_token_at_a_time() -> None:
    num_prefixes = 0
    for seed in range(12):
        case = random_case(seed, [*GROUPS.values()][seed % len(GROUPS)], shares_prefixes=True)
        check_answers(case)
        num_prefixes += sum(len(step.shared_prefixes) // 12 for step in case.rank.steps)
    assert num_prefixes > 15


def test_requests_that_copy_keys_are_answered_as_one_token_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_copies, "_LEAST_TOKENS", 1)
    num_copied = num_early = 0
    for seed in range(24):
        case = random_case(seed, [*GROUPS.values()][seed % len(GROUPS)])
        case.requests = choices_behind_contexts(case.requests, case.rng)
        check_answers(case)
        num_copied += case.rank.runner.num_copied
        num_early += case.rank.runner.num_early_copies
    assert num_copied > 300
    assert num_early > 20


def test_requests_with_adapters_are_answered_as_one_token_at_a_time() -> None:
    """With too few places for the adapters that requests want."""
    num_loads = 0
    for seed in range(6):
        case = random_case(seed, [*GROUPS.values()][seed % len(GROUPS)])
        most = case.rng.randint(1, MOST_ADAPTERS)
        case.requests = [
            msgspec.structs.replace(request, adapter=case.rng.choice([0, case.rng.randint(1, most)]))
            for request in case.requests
        ]
        check_answers(case)
        num_loads += case.rank.runner.num_adapter_loads
    assert num_loads > 30


def test_adapters_are_merged_in_turn() -> None:
    """Some adapters may be merged, some have no other way, and requests of all of them arrive in any order."""
    num_merges = num_loads = 0
    for seed in range(9):
        case = random_case(seed, [*GROUPS.values()][seed % len(GROUPS)])
        rng = random.Random(seed)
        merged = rng.sample(range(1, MOST_ADAPTERS + 1), rng.randint(1, MOST_ADAPTERS))
        case.limits = replace(
            case.limits, merged_adapters=tuple(merged), merged_only_adapters=tuple(merged[: rng.choice([0, 0, 1, 9])])
        )
        runs = [rng.randint(0, MOST_ADAPTERS) for _ in case.requests]
        if seed % 3:  # one adapter after the other
            runs.sort()
        case.requests = [
            msgspec.structs.replace(request, adapter=adapter)
            for request, adapter in zip(case.requests, runs, strict=True)
        ]
        check_answers(case)
        num_merges += case.rank.runner.num_merges
        num_loads += case.rank.runner.num_adapter_loads
    assert num_merges > 30
    assert num_loads > 30


def test_tails_rest_while_the_next_group_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of one merged adapter after the other, with few slots; in some engines few blocks may be in use then."""
    rest, resting = MergedAdapter._rest, []

    def count(self: MergedAdapter, running: Collection[RequestState]) -> list[RequestState]:
        resting.extend(rest(self, running))
        return resting[-len(running) :]

    monkeypatch.setattr(MergedAdapter, "_rest", count)
    for seed in range(10):
        rng = random.Random(seed)
        monkeypatch.setattr(running_requests, "_REST_SHARE", rng.choice([0.3, 1, 1]))
        case = random_case(seed, [*GROUPS.values()][seed % len(GROUPS)], num_homes=rng.choice([1, 1, 2]))
        slots = max(case.limits.num_homes, min(case.limits.max_num_seqs, rng.randint(2, 5)))
        merged = tuple(rng.sample(range(1, MOST_ADAPTERS + 1), 3))
        merged_only = merged[: rng.choice([0, 0, 1])]
        case.limits = replace(case.limits, max_num_seqs=slots, merged_adapters=merged, merged_only_adapters=merged_only)
        runs = sorted(rng.choice([0, *merged, *merged]) for _ in case.requests)
        case.requests = [
            msgspec.structs.replace(request, adapter=adapter)
            for request, adapter in zip(case.requests, runs, strict=True)
        ]
        check_answers(case)
    assert len(resting) > 15


def check_answers(case: Case, expected: dict[int, Answer] | None = None) -> None:
    """Assert that every request gets its tokens, or as many as it can get before it is aborted or has no room."""
    expected = expected or expected_answers(case.requests)
    done, tokens = run_at_random(case, hold_back=case.rng.choice([0, 0.3]), abort=case.rng.choice([0, 0.02]))
    for request in case.requests:
        i = request.request_id
        answer, reason, read = expected[i]
        num_computed = len(unpack(request.prompt_ids)) + len(answer) - 1
        num_computed -= len(answer) - len([*dropwhile(FORCED.__contains__, reversed(answer))])  # at its end
        if done[i].finish_reason == "abort":
            assert tokens[i] == answer[: len(tokens[i])]
        elif done[i].finish_reason == "error":
            assert tokens[i] == answer[: len(tokens[i])]
            num_tokens, num_slots = (int(word) for word in re.findall(r"\d+", done[i].error))
            assert num_tokens <= num_computed
            assert blocks_needed(num_tokens, case.limits) * case.limits.block_size > num_slots
        else:
            assert (tokens[i], done[i].finish_reason, case.read.get(i)) == (answer, reason, read)
            assert (read is None) == (request.read is None)
            fits = blocks_needed(num_computed, case.limits) <= case.num_blocks
            assert fits or case.rank.failed or case.rank.force  # forced tokens at its end are not computed
