"""Options of a row's sampling that the parent sees to: texts about tokens, cut prompts, and the text of an answer."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nvcli.core.messages import TokenLogprobs, pack, unpack
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.request import RequestOutput
from nvcli.job.job import Choice, ErrorInfo, Job, JobResult, RowContext
from nvcli.job.run.open_rows import OpenRow, results_of
from nvcli.job.text.model_limits import ModelLimits
from nvcli.job.text.prepare import PreparedRow, Preparer
from nvcli.job.text.tokenizer import Tokenizer

LIMITS = ModelLimits(max_model_len=64, vocab_size=258, eos_token_ids=(1,))
END = 1


def prepare(tokenizer: Tokenizer, prompt: str | list[int] = "abc", **sampling: Any) -> PreparedRow | JobResult:
    context = RowContext(id=0, index=0, line="line 1")
    key = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    job = Job(context=context, sampling=SamplingParams(**sampling), **{key: prompt})  # type: ignore[arg-type]
    (row,) = Preparer(tokenizer, LIMITS, lambda conversations: []).prepare([job])
    return row


def sound(tokenizer: Tokenizer, prompt: str | list[int] = "abc", **sampling: Any) -> PreparedRow:
    row = prepare(tokenizer, prompt, **sampling)
    assert isinstance(row, PreparedRow)
    return row


def error(tokenizer: Tokenizer, **sampling: Any) -> ErrorInfo:
    row = prepare(tokenizer, **sampling)
    assert isinstance(row, JobResult)
    assert row.error is not None
    return row.error


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    (found,) = tokenizer.encode([text], add_special_tokens=False)
    assert isinstance(found, list)
    return found


def test_texts_about_tokens_become_ids(tokenizer: Tokenizer) -> None:
    (a,) = ids(tokenizer, "a")
    space = ids(tokenizer, " ")[0]
    row = sound(tokenizer, logit_bias={"a": 2.0, "5": -1.0, "<|end|>": -3.0}, bad_words=["ab", " ab", "b", "ccab"])
    assert row.rules is not None
    assert row.rules.biases == {a: 2.0, 5: -1.0, END: -3.0}
    # "b" alone is one token, so no longer word with it can come up; behind a space it is two.
    assert row.rules.forbidden_ids == ids(tokenizer, "b")
    assert row.rules.bad_words == []
    pair = sound(tokenizer, bad_words=["ab"])
    assert pair.rules is not None
    assert pair.rules.bad_words == [ids(tokenizer, "ab"), [space, *ids(tokenizer, "ab")]]
    request = OpenRow(pair, 0).request(0)
    assert (request.bad_words, request.sampling.bad_words) == (pair.rules.bad_words, [])
    assert sound(tokenizer).rules is None


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"logit_bias": {"ab": 1.0}}, '`sampling.logit_bias` holds "ab", which is 2 tokens of this model'),
        ({"logit_bias": {"\ud800": 1.0}}, "the lone surrogate"),
        ({"bad_words": ["x" * 33]}, "which is 33 tokens of this model; allowed: at most 32"),
        ({"bad_words": ["x" * 20] * 30 + ["y" * 20 + str(i) for i in range(30)]}, "1,024 are allowed"),
        ({"allowed_token_ids": [5, 6], "bad_words": []}, ""),
        ({"allowed_token_ids": [1], "min_tokens": 2}, "`sampling.min_tokens` forbids all of the 1"),
    ],
)
def test_what_cannot_be_done_is_an_error(tokenizer: Tokenizer, sampling: dict[str, Any], message: str) -> None:
    if not message:
        sound(tokenizer, **sampling)
        return
    found = error(tokenizer, **sampling)
    assert found.type == "invalid_sampling"
    assert message in found.message


def test_tokens_of_rules_are_tokens_of_the_model(tokenizer: Tokenizer) -> None:
    found = error(tokenizer, allowed_token_ids=[300])
    assert (found.type, "`sampling.allowed_token_ids` holds 300" in found.message) == ("token_out_of_vocabulary", True)


def test_prompts_are_cut_at_their_left_end(tokenizer: Tokenizer) -> None:
    def kept(prompt: str, **sampling: Any) -> str:
        return tokenizer.decode_one(unpack(sound(tokenizer, prompt, **sampling).prompt_ids))

    assert kept("abcdef", truncate_prompt_tokens=3) == "ef"  # behind the token that begins every text, as in vLLM
    assert kept("abc", truncate_prompt_tokens=30) == "abc"
    assert kept("x" * 5000 + "end", truncate_prompt_tokens=4) == "end"
    assert kept("x" * 5000 + "end", truncate_prompt_tokens=-1, max_tokens=60) == "end"
    assert error(tokenizer, truncate_prompt_tokens=63, prompt="x" * 5000, max_tokens=10).type == "max_tokens_too_large"


def choices(tokenizer: Tokenizer, row: PreparedRow, *answers: str, logprobs: list[float] | None = None) -> list[Choice]:
    """The choices of a row that got these answers, each with a stop token at its end, all tokens equally likely."""
    opened = OpenRow(row, 10)
    for number, answer in enumerate(answers):
        tokens = [*ids(tokenizer, answer), END]
        entry = TokenLogprobs(logprob=0.0 if logprobs is None else logprobs[number], top_ids=[], top_logprobs=[])
        output = RequestOutput(
            request_id=10 + number,
            token_ids=pack(tokens),
            finish_reason="stop",
            stopped_by_id=True,
            logprobs=[] if logprobs is None else [entry] * len(tokens),
        )
        opened.take(output, tokenizer)
    (result,) = results_of([opened], tokenizer)
    assert result.usage.completion_tokens == sum(len(sample.token_ids) for sample in opened.samples)
    return result.choices


def test_the_best_answers_come_first(tokenizer: Tokenizer) -> None:
    answers, logprobs = ("a", "bbb", "cc"), [-1.0, -0.6, -2.0]
    by_mean = sound(tokenizer, n=2, best_of=3)
    assert OpenRow(by_mean, 0).request(0).n == 3
    assert OpenRow(by_mean, 0).request(0).sampling.logprobs == 0
    found = choices(tokenizer, by_mean, *answers, logprobs=logprobs)
    assert [(choice.index, choice.text, choice.score) for choice in found] == [(0, "bbb", -0.6), (1, "a", -1.0)]
    assert all(choice.logprobs is None for choice in found)
    by_sum = choices(tokenizer, sound(tokenizer, best_of=3, rank_by="sum"), *answers, logprobs=logprobs)
    assert [(choice.text, choice.score) for choice in by_sum] == [("a", -2.0)]
    echoed = choices(tokenizer, sound(tokenizer, best_of=2, echo=True), "a", "b", logprobs=[-2.0, -1.0])
    assert [choice.text for choice in echoed] == ["abcb"]
    (plain,) = choices(tokenizer, sound(tokenizer, best_of=1), "a")
    assert plain.score is None


def test_an_echo_is_the_prompt_as_it_was_given(tokenizer: Tokenizer) -> None:
    def text(prompt: str | list[int], **sampling: Any) -> str:
        (choice,) = choices(tokenizer, sound(tokenizer, prompt, echo=True, **sampling), "!")
        return choice.text

    assert text("a  b<|end|>") == "a  b<|end|>!"
    assert text([0, *ids(tokenizer, "ab")]) == "ab!"
    assert text("abcdef", truncate_prompt_tokens=3) == "ef!"
    context = RowContext(id=0, index=0, line="line 1")
    for arguments, expected in (({"continue_final_message": True}, "to be"), ({}, None)):
        job = Job(
            context=context,
            messages=[{"role": "assistant", "content": "to be"}],
            template_arguments=arguments,
            sampling=SamplingParams(echo=True),
        )
        (row,) = Preparer(tokenizer, LIMITS, lambda conversations: ["x"] * len(conversations)).prepare([job])
        assert (row.echo if isinstance(row, PreparedRow) else None) == expected
        job = msgspec.structs.replace(job, sampling=SamplingParams(echo=True, logprobs=0))
        (row,) = Preparer(tokenizer, LIMITS, lambda conversations: ["x"] * len(conversations)).prepare([job])
        assert isinstance(row, JobResult)
    assert row.error is not None
    assert "`echo` is true" in row.error.message


def test_stops_and_special_tokens_show_where_they_are_asked_for(tokenizer: Tokenizer) -> None:
    def text(answer: str, **sampling: Any) -> str:
        (choice,) = choices(tokenizer, sound(tokenizer, **sampling), answer)
        return choice.text

    assert text("to<|bos|> be or", stop="be") == "to "
    assert text("to<|bos|> be or", stop=["or", "e o"], include_stop_str_in_output=True) == "to be o"
    assert text("to<|bos|> be", skip_special_tokens=False) == "to<|bos|> be"
    assert text("to<|bos|> be", skip_special_tokens=False, include_stop_str_in_output=True) == "to<|bos|> be<|end|>"
    assert text("to be", include_stop_str_in_output=True) == "to be"  # the stop token has no text of its own
    assert text("to<|bos|> be", skip_special_tokens=False, stop="<|bos|>") == "to"


def test_rows_that_differ_in_these_have_other_answers(tokenizer: Tokenizer) -> None:
    keys = {
        sound(tokenizer, temperature=0, **each).answer_key
        for each in ({}, {"echo": True}, {"best_of": 2}, {"bad_words": ["ab"]}, {"include_stop_str_in_output": True})
    }
    assert len(keys) == 5
