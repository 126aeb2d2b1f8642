"""Answers that are looked at as they come: loops end, and thoughts end at their limit, by tokens put in their place."""

from __future__ import annotations

from array import array
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from test_scheduler import make_core, run

import rank_in_process
from fake_runners import Output
from nvcli.core.messages import StepOutput, pack, unpack
from nvcli.core.sampling_params import SamplingParams, StopRepetition
from nvcli.engine.answer_watch import LOOP_STRIDE, ends_in_loop, watch_of
from nvcli.engine.limits import SchedulerLimits
from nvcli.engine.request import PromptScoring, RequestOutput, ThoughtLimit
from rank_in_process import RankInProcess
from requests_factory import make_request

START, END, FORCED = 100, 110, [50, 51]


def naive(tokens: list[int], rule: StopRepetition) -> bool:
    for period in range(1, rule.max_pattern_size + 1):
        length = max(rule.min_count * period, rule.min_tokens)
        end = tokens[-length:]
        if length <= len(tokens) and all(end[i] == end[i - period] for i in range(period, length)):
            return True
    return False


rules = st.builds(
    StopRepetition, max_pattern_size=st.integers(1, 6), min_count=st.integers(2, 4), min_tokens=st.integers(2, 20)
)
patterns = st.lists(st.sampled_from([1, 2, 256, 1 << 24]), min_size=1, max_size=6)  # bytes of one are in another


@given(patterns, patterns, st.integers(0, 8), st.integers(0, 5), rules)
def test_a_loop_is_found_exactly_where_there_is_one(
    before: list[int], pattern: list[int], count: int, rest: int, rule: StopRepetition
) -> None:
    tokens = before + pattern * count + pattern[:rest]
    assert ends_in_loop(array("i", tokens), rule) == naive(tokens, rule)


def test_a_looping_row_ends_with_its_reason_at_a_place_of_its_own() -> None:
    core, scheduler, executor = make_core()
    executor.runner.launch = looping(executor.runner.launch)  # type: ignore[method-assign]
    rule = StopRepetition(max_pattern_size=4, min_count=4, min_tokens=40)
    for i, stop_repetition in enumerate((rule, False)):
        sampling = SamplingParams(temperature=0, stop_repetition=stop_repetition)
        core.scheduler.add([make_request(i, [1], 100, sampling=sampling)])
    done = run(core, scheduler)
    assert (done[1].finish_reason, len(unpack(done[1].token_ids))) == ("length", 100)
    assert done[0].finish_reason == "repetition"
    assert (
        unpack(done[0].token_ids).tolist() == unpack(done[1].token_ids).tolist()[: 4 * LOOP_STRIDE]
    )  # 10 + 40 at least


def looping(launch: Any) -> Any:
    """A rank that gives 100 to 109, and then three tokens again and again."""

    def launch_looping(step: Any) -> Any:
        given = unpack(launch(step).result().token_ids)
        tokens = [token if token < 110 else 200 + token % 3 for token in given]
        return Output(StepOutput(step_id=step.step_id, token_ids=pack(tokens)))

    return launch_looping


def thinking(budget: int, max_tokens: int = 30, **limit: Any) -> RequestOutput:
    """The answer of a rank that counts from 100 on, beside one without a limit."""
    core, scheduler, _ = make_core()
    values = {"start_ids": [], "ends": [[END]], "forced_ids": FORCED, **limit}
    sampling = SamplingParams(temperature=0, logprobs=0)
    thought = ThoughtLimit(budget=budget, **values)
    core.scheduler.add([make_request(0, [1, 2, 3], max_tokens, sampling=sampling, thought_limit=thought)])
    core.scheduler.add([make_request(1, [1, 2, 3], 40)])
    done = run(core, scheduler)
    assert unpack(done[1].token_ids).tolist() == list(range(100, 140))
    return done[0]


def test_a_thought_ends_at_its_limit_and_the_answer_goes_on() -> None:
    for budget in (0, 1, 4, 10):
        tokens = unpack(thinking(budget).token_ids).tolist()
        assert tokens == [*range(100, 100 + budget), *FORCED, *range(102 + budget, 130)]


def test_a_thought_that_ends_by_itself_is_left_alone() -> None:
    counted = list(range(100, 130))
    assert unpack(thinking(11).token_ids).tolist() == counted  # its end is the 11th token
    assert unpack(thinking(20, ends=[[5], [109, END]]).token_ids).tolist() == counted
    assert unpack(thinking(5, start_ids=[7]).token_ids).tolist() == counted  # it never began
    assert unpack(thinking(10, ends=[[109, END]]).token_ids).tolist() == counted  # it was about to end


def test_a_thought_that_the_answer_begins_is_counted_from_there() -> None:
    tokens = unpack(thinking(3, start_ids=[START]).token_ids).tolist()
    assert tokens == [START, 101, 102, 103, *FORCED, *range(106, 130)]
    late = unpack(thinking(3, start_ids=[102]).token_ids).tolist()  # behind two other tokens
    assert late == [*range(100, 106), *FORCED, *range(108, 130)]


def test_forced_tokens_count_and_have_log_probabilities() -> None:
    output = thinking(4, max_tokens=5)
    assert unpack(output.token_ids).tolist() == [100, 101, 102, 103, 50]
    assert output.finish_reason == "length"
    whole = thinking(0, max_tokens=2)
    assert (unpack(whole.token_ids).tolist(), whole.finish_reason) == (FORCED, "length")
    assert [token.logprob for token in whole.logprobs] == [0.0, 0.0]


def test_a_prompt_is_read_though_forced_tokens_would_fill_the_answer() -> None:
    """Room for a token of the model is left, without which no step would come that reads the prompt."""
    limits = SchedulerLimits(max_num_seqs=2, max_num_batched_tokens=2, max_model_len=32, block_size=4)
    core, scheduler = rank_in_process.make_core(limits, RankInProcess(limits), num_blocks=16)
    thought = ThoughtLimit(budget=0, start_ids=[], ends=[[END]], forced_ids=FORCED)
    for i, max_tokens in enumerate((1, 2, 3)):
        read = PromptScoring(first=1)
        core.scheduler.add([make_request(i, [1, 2, 3, 4], max_tokens, thought_limit=thought, read=read)])
    for i, output in rank_in_process.run(core, scheduler).items():
        tokens = unpack(output.token_ids).tolist()
        assert (tokens[:i], len(tokens), output.finish_reason) == (FORCED[:i], i + 1, "length")
        assert sum(len(unpack(result.logprobs)) for result in output.query_results) == 3


def test_a_request_that_asks_for_nothing_is_not_looked_at() -> None:
    assert watch_of(make_request(0, [1], 5)) is None
