"""Tokens that take the place of the model's own: the answer goes on as behind a prompt that ends with them."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer

from nvcli.core.sampling_params import SamplingParams
from nvcli.demo import demo_path
from nvcli.engine.request import ThoughtLimit
from one_rank import make_runner, run_requests, run_to_outputs
from requests_factory import make_request

GREEDY = SamplingParams(temperature=0)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_an_answer_goes_on_behind_its_forced_tokens(device: str) -> None:
    """Rows with a limit run beside rows without one, in the same steps; on a GPU in graphs where there are some."""
    runner = make_runner(demo_path(), device, dtype="float32", max_model_len=256, block_size=16)
    tokenizer = Tokenizer.from_file(str(demo_path() / "tokenizer.json"))

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids  # type: ignore[no-any-return]

    prompts = [ids(f"Count from {first} to {first + 20}.\n") for first in (3, 40, 60)]
    forced = ids("<|endoftext|>Count from 9 to 14.\n")
    budgets = (0, 5, 11)
    plain = run_requests(runner, [make_request(i, prompt, 60, sampling=GREEDY) for i, prompt in enumerate(prompts)])
    limited: list[Any] = [
        make_request(
            10 + i,
            prompt,
            60,
            sampling=GREEDY,
            thought_limit=ThoughtLimit(budget=budget, start_ids=[], ends=[forced[:1]], forced_ids=forced),
        )
        for i, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True))
    ]
    beside = [make_request(i, prompt, 60, sampling=GREEDY) for i, prompt in enumerate(prompts)]
    answers = run_requests(runner, [*limited, *beside])
    assert {number: answers[number] for number in plain} == plain
    for i, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        known = plain[i][:budget] + forced
        assert answers[10 + i][: len(known)] == known
        expected = run_to_outputs(runner, [make_request(0, prompt + known, 60 - len(known), sampling=GREEDY)])
        (output,) = expected.values()
        rest = memoryview(output.token_ids).cast("i").tolist()
        assert answers[10 + i][len(known) :] == rest
