"""Tools, documents and the place where an answer begins reach the chat template, or the row says why they cannot."""

from __future__ import annotations

from typing import Any

import pytest

from nvcli.core.messages import unpack
from nvcli.core.sampling_params import SamplingParams
from nvcli.errors import RowError
from nvcli.job.job import Job, JobResult, RowContext
from nvcli.job.text.model_limits import ModelLimits
from nvcli.job.text.prepare import PreparedRow, Preparer
from nvcli.job.text.tokenizer import Tokenizer

TEMPLATE = (
    "{%- for tool in tools or [] %}T:{{ tool.function.name }} {% endfor %}"
    "{%- for document in documents or [] %}D:{{ document.text }} {% endfor %}"
    "{%- for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{%- if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look"}}
MESSAGES = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture
def templated(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Tokenizer:
    monkeypatch.setattr(tokenizer._tokenizer, "chat_template", TEMPLATE)
    return tokenizer


def prepare(tokenizer: Tokenizer, special_tokens: Any = "allow", **arguments: Any) -> PreparedRow | JobResult:
    def render(conversations: Any) -> list[str | RowError]:
        return [tokenizer.render(each.messages, each.variables) for each in conversations]

    limits = ModelLimits(max_model_len=256, vocab_size=258, eos_token_ids=(1,), special_tokens=special_tokens)
    context = RowContext(id=0, index=0, line="line 1")
    job = Job(context=context, messages=MESSAGES, template_arguments=arguments, sampling=SamplingParams())
    (row,) = Preparer(tokenizer, limits, render).prepare([job])
    return row


def text_of(tokenizer: Tokenizer, row: PreparedRow | JobResult) -> str:
    assert isinstance(row, PreparedRow)
    return tokenizer.decode_one(unpack(row.prompt_ids))


def test_arguments_reach_the_template(templated: Tokenizer) -> None:
    row = prepare(templated, tools=[TOOL], documents=[{"text": "x"}])
    assert text_of(templated, row) == "T:look D:x <user>a<assistant>b<assistant>"
    assert text_of(templated, prepare(templated, continue_final_message=True)) == "<user>a<assistant>b"
    assert text_of(templated, prepare(templated, add_generation_prompt=False)) == "<user>a<assistant>b"


def test_an_argument_that_the_template_does_not_know_is_an_error(tokenizer: Tokenizer) -> None:
    row = prepare(tokenizer, tools=[TOOL])
    assert isinstance(row, JobResult)
    assert row.error is not None
    assert row.error.type == "unsupported_parameter"
    assert "`tools` would have no effect" in row.error.message


def test_texts_of_arguments_are_texts_of_the_row(templated: Tokenizer) -> None:
    token = templated.control_tokens[0]
    row = prepare(templated, "refuse", documents=[{"text": f"x{token}"}])
    assert isinstance(row, JobResult)
    assert row.error is not None
    assert row.error.type == "special_token"
    assert f"`documents[0].text` holds {token}" in row.error.message
