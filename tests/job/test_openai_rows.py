"""Rows of OpenAI batch files: which parameters are taken, which refused, and what an answer looks like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from nvcli.core.sampling_params import SamplingParams, StopRepetition
from nvcli.errors import RowError
from nvcli.job.job import RETRYABLE_ERRORS, Choice, Job, JobResult, Logprobs, RowForm, Usage, failed
from nvcli.job.rows.output_row import OutputForm, moved_row, output_row, read_output_row
from nvcli.llm.answer import Answer
from nvcli.tools.show.answers import read_shown_row
from output_jobs import extra_of

ReadRows = Callable[..., list[Job | JobResult]]
CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    RESPONSE: {"input": "hi"},
}
MESSAGES = [{"role": "user", "content": "hi"}]


def line(url: str = CHAT, **changes: Any) -> bytes:
    """A row whose body has these keys over a good one's; `outer` are keys of the row itself."""
    outer = changes.pop("outer", {})
    body = {"model": "gpt-x", **PROMPTS.get(url, {"prompt": "hi"}), **changes}
    row = {"custom_id": "a", "method": "POST", "url": url, "body": body, **outer}
    return msgspec.json.encode({key: value for key, value in row.items() if value is not None}) + b"\n"


def parse(read_rows: ReadRows, data: bytes, **options: Any) -> Job | JobResult:
    (row,) = read_rows(data, **options)
    return row


def as_json(result: JobResult) -> dict[str, Any]:
    row = output_row(result, OutputForm(created=77, model="served"))
    decoded: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(row))
    return decoded


def test_a_chat_row(read_rows: ReadRows) -> None:
    job = parse(
        read_rows,
        line(
            max_completion_tokens=5, temperature=0.5, top_p=0.9, n=2, stop=["x"], seed=-3, presence_penalty=1,
            frequency_penalty=-1, logit_bias={"7": -100}, logprobs=True, top_logprobs=4, user="u", metadata={"a": "b"},
            store=True, service_tier="auto", stream=False, response_format={"type": "text"}, tools=None, top_k=3,
        ),
        defaults={"temperature": 0.1, "min_p": 0.2},
    )  # fmt: skip
    assert isinstance(job, Job)
    assert (job.context.id, job.context.form, job.context.model, job.messages) == ("a", RowForm.CHAT, "gpt-x", MESSAGES)
    assert job.context.extra == {}
    assert job.sampling == SamplingParams(
        max_tokens=5, temperature=0.5, top_p=0.9, n=2, stop=["x"], seed=-3, presence_penalty=1.0,
        frequency_penalty=-1.0, logit_bias={7: -100.0}, logprobs=4, min_p=0.2, top_k=3,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("prompt", "text", "ids"), [("hi", "hi", None), (["hi"], "hi", None), ([1, 2], None, [1, 2]), ([[1]], None, [1])]
)
def test_a_completion_row(read_rows: ReadRows, prompt: Any, text: str | None, ids: list[int] | None) -> None:
    job = parse(read_rows, line(COMPLETION, prompt=prompt, logprobs=2, best_of=1, echo=False, max_tokens=None))
    assert isinstance(job, Job)
    assert (job.context.form, job.prompt, job.prompt_token_ids) == (RowForm.COMPLETION, text, ids)
    assert job.sampling == SamplingParams(logprobs=2, best_of=1)


@pytest.mark.parametrize("url", [CHAT, COMPLETION, RESPONSE])
def test_urls_of_other_services(read_rows: ReadRows, url: str) -> None:
    """Azure's have no version, others another one or a host, and files for Mistral, Together and Fireworks no url."""
    bare = url.removeprefix("/v1")
    for other in (bare, f"https://api.openai.com{url}/", f"v4{bare}", f"https://a/openai{bare}?api-version=2024-10-21"):
        assert parse(read_rows, line(url, outer={"url": other, "method": "post"})) == parse(read_rows, line(url))
    without_url = parse(read_rows, line(url, outer={"url": None}))
    if url != RESPONSE:
        assert without_url == parse(read_rows, line(url))
    else:
        assert isinstance(without_url, JobResult)
        assert without_url.error is not None
        assert "`url` is null; allowed: " in without_url.error.message
        assert "`nvcli embed` answers such rows" in without_url.error.message


def test_a_completion_row_takes_the_additions_of_vllm(read_rows: ReadRows) -> None:
    own: dict[str, Any] = {
        "best_of": 3, "rank_by": "sum", "bad_words": ["a"], "allowed_token_ids": [3], "echo": True,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "truncate_prompt_tokens": -1,
        "stop_repetition": {"min_count": 9}, "logit_bias": {" x": 1},
    }  # fmt: skip
    job = parse(read_rows, line(COMPLETION, **own))
    assert isinstance(job, Job)
    given = {**own, "stop_repetition": StopRepetition(min_count=9), "logit_bias": {" x": 1.0}}
    assert job.sampling == SamplingParams(**given)


@pytest.mark.parametrize("url", [CHAT, COMPLETION])
def test_what_clients_and_other_servers_send_without_an_effect_is_accepted(read_rows: ReadRows, url: str) -> None:
    own: dict[str, Any] = {
        "verbosity": "medium", "prediction": {"type": "content", "content": "a"}, "prompt_cache_retention": "24h",
        "use_beam_search": False, "length_penalty": 1.0, "spaces_between_special_tokens": True, "priority": 3,
        "cache_salt": "s", "request_id": "r", "include_reasoning": True, "return_token_ids": False,
        "add_special_tokens": url == COMPLETION, "routed_experts_prompt_start": 0, "return_mm_kwargs": True,
        "return_hidden_states": False, "stream_reasoning": True, "no_stop_trim": False, "thinking_token_budget": None,
        "seed": -1,
    }  # fmt: skip
    if url == CHAT:
        own["top_logprobs"] = 0
    job = parse(read_rows, line(url, **own))
    assert isinstance(job, Job)
    assert job.sampling == SamplingParams()


BAD = [
    (line(stream=True), "unsupported_parameter", "`body.stream` is true"),
    (line(use_beam_search=True), "unsupported_parameter", "which is not supported; nvcli samples and has no beam"),
    (line(functions=[{"name": "f"}]), "unsupported_parameter", "give `tools` and `tool_choice`"),
    (line(extra_body={"top_k": 3}), "unsupported_parameter", "`body.extra_body` is not supported; put its keys beside"),
    (line(response_format={"type": "xml"}), "invalid_structured", "`body.response_format` is"),
    (line(tools=[{}]), "invalid_value", "`body.tools[0]`"),
    (line(temprature=1), "unsupported_parameter", "`body.temprature` is not supported; did you mean `temperature`?"),
    (line(guided_regx="a"), "unsupported_parameter", "`body.guided_regx` is not supported; did you mean `guided_r"),
    (line(suffix="x", url=COMPLETION), "unsupported_parameter", "`body.suffix`"),
    (line(best_of=3), "unsupported_parameter", "`body.best_of`"),
    (line(COMPLETION, best_of=3, n=4), "invalid_sampling", "`best_of` (3) is smaller than `n` (4)"),
    (line(temperature=-1), "invalid_sampling", "`body.temperature` is -1; allowed"),
    (line(n="2"), "invalid_sampling", "`body.n` is"),
    (line(max_tokens=3, max_completion_tokens=4), "invalid_sampling", "differ"),
    (line(logprobs=5), "invalid_sampling", "`body.logprobs` is 5"),
    (line(top_logprobs=5), "invalid_sampling", "without `body.logprobs`"),
    (line(logprobs=True, top_logprobs=21), "invalid_sampling", "`body.top_logprobs` is 21"),
    (line(messages=[]), "invalid_value", "`body.messages` is empty"),
    (line(messages=[{"role": "user", "content": 3}]), "invalid_value", "`body.messages[0].content` is 3"),
    (line(messages=None), "missing_prompt", "`body.messages`"),
    (line(COMPLETION, prompt=None), "missing_prompt", "`body.prompt`"),
    (line(COMPLETION, prompt=None, messages=[]), "missing_prompt", "reads `body.prompt`; the `url` for it is /v1/chat"),
    (line(messages=None, input="a"), "missing_prompt", "`url` for it is /v1/responses or /v1/embeddings"),
    (line(COMPLETION, prompt=["a", 5]), "invalid_value", "`body.prompt[1]` is 5"),
    (line(COMPLETION, prompt=["a", "b"], prompt_logprobs=1), "unsupported_parameter", "beside several prompts"),
    (line(RESPONSE, input=None), "missing_prompt", "`body.input` is not given"),
    (line(RESPONSE, input=5), "invalid_value", "`body.input` is 5"),
    (line(RESPONSE, input=[{"type": "function_call"}]), "unsupported_content", 'of the type "function_call"'),
    (line(RESPONSE, input=[{"role": "user", "content": [{"type": "input_file"}]}]), "unsupported_content", "input_fi"),
    (line(RESPONSE, input="a", tools=[{"type": "web_search"}]), "unsupported_parameter", "`body.tools` is"),
    (
        line(RESPONSE, input="a", previous_response_id="r"),
        "unsupported_parameter",
        "`body.previous_response_id`",
    ),
    (line(RESPONSE, input="a", background=True), "unsupported_parameter", "`body.background` is true"),
    (line(RESPONSE, input="a", include=["reasoning.encrypted_content"]), "unsupported_parameter", "`body.include` is"),
    (line(RESPONSE, input="a", text={"verbosity": "low"}), "unsupported_parameter", '`body.text.verbosity` is "low"'),
    (line(RESPONSE, input="a", max_output_tokens=0), "invalid_sampling", "`body.max_output_tokens` is 0"),
    (line(COMPLETION, prompt=[1, "b"]), "invalid_value", "`body.prompt[1]`"),
    (line(COMPLETION, prompt=5), "invalid_value", "`body.prompt` is 5"),
    (line(model=5), "invalid_value", "`body.model` is 5"),
    (line(outer={"method": "GET"}), "invalid_value", "`method`"),
    (line("/v1/embeddings"), "unsupported_url", "/v1/responses; `nvcli embed` answers such rows"),
    (line(outer={"url": 5}), "unsupported_url", "`url` is 5"),
    (line(outer={"body": None}), "invalid_value", "`body` is null"),
    (line(outer={"custom_id": None}), "invalid_id", "`custom_id` is missing"),
    (line(outer={"custom_id": 5}), "invalid_id", "`custom_id` is 5"),
]


@pytest.mark.parametrize(("data", "kind", "message"), BAD)
def test_a_bad_row_is_answered_with_error_objects(read_rows: ReadRows, data: bytes, kind: str, message: str) -> None:
    result = parse(read_rows, b"\n" + data)
    assert isinstance(result, JobResult)
    row = as_json(result)
    assert list(row) == ["id", "custom_id", "response", "error"]
    assert row["id"] == "batch_req_0"
    assert row["error"]["code"] == kind
    assert row["error"]["message"].startswith("line 2: ")
    assert message in row["error"]["message"]
    assert row["response"]["status_code"] == 400
    assert row["response"]["body"]["error"] == {
        "message": row["error"]["message"],
        "type": "invalid_request_error",
        "param": None,
        "code": kind,
    }


@pytest.mark.parametrize("kind", sorted(RETRYABLE_ERRORS))
def test_an_error_that_is_not_the_rows_fault_is_the_servers(read_rows: ReadRows, kind: str) -> None:
    job = parse(read_rows, line())
    assert isinstance(job, Job)
    response = as_json(failed(job.context, RowError(kind, "why")))["response"]
    assert (response["status_code"], response["body"]["error"]["type"]) == (500, "server_error")


def test_ids_are_shared_by_both_forms_and_foreign_keys_pass_through(read_rows: ReadRows) -> None:
    rows = read_rows(line(outer={"topic": "t"}) + b'{"id":"a","prompt":"x"}\n' + line())
    assert isinstance(rows[0], Job)
    assert extra_of(rows[0]) == {"topic": "t"}
    assert [row.error and row.error.type for row in rows[1:] if isinstance(row, JobResult)] == ["duplicate_id"] * 2
    assert [row.context.form for row in rows[1:]] == [RowForm.NATIVE, RowForm.CHAT]


def test_a_native_row_may_carry_such_keys_along(read_rows: ReadRows) -> None:
    job = parse(read_rows, b'{"prompt":"x","custom_id":"c","url":"u","body":{}}')
    assert isinstance(job, Job)
    assert job.context.form is RowForm.NATIVE
    assert list(job.context.extra) == ["custom_id", "url", "body"]


def result_for(read_rows: ReadRows, data: bytes) -> JobResult:
    job = parse(read_rows, data)
    assert isinstance(job, Job)
    logprobs = Logprobs(tokens=["a", "\ufffd"], token_logprobs=[-0.5, -1.0], top_logprobs=[{"a": -0.5, "b": -2.0}, {}])
    choice = Choice(index=0, text="a?", finish_reason="stop", logprobs=logprobs)
    usage = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1)
    return JobResult(context=job.context, choices=[choice], usage=usage)


USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 1},
}


def test_the_answer_to_a_chat_row(read_rows: ReadRows) -> None:
    row = as_json(result_for(read_rows, line()))
    assert row == {
        "id": "batch_req_0",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "req_0",
            "body": {
                "id": "chatcmpl-0",
                "object": "chat.completion",
                "created": 77,
                "model": "gpt-x",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "a?", "refusal": None},
                        "logprobs": {
                            "content": [
                                {
                                    "token": "a",
                                    "logprob": -0.5,
                                    "bytes": [97],
                                    "top_logprobs": [
                                        {"token": "a", "logprob": -0.5, "bytes": [97]},
                                        {"token": "b", "logprob": -2.0, "bytes": [98]},
                                    ],
                                },
                                {"token": "\ufffd", "logprob": -1.0, "bytes": None, "top_logprobs": []},
                            ],
                            "refusal": None,
                        },
                        "finish_reason": "stop",
                    }
                ],
                "usage": USAGE,
            },
        },
        "error": None,
    }


def test_a_row_for_responses(read_rows: ReadRows) -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    schema = {"type": "object"}
    said = {"type": "message", "role": "assistant", "content": "c", "id": "m"}
    job = parse(
        read_rows,
        line(
            RESPONSE, instructions="Be brief.", max_output_tokens=5, temperature=0, top_logprobs=2, store=False,
            text={"format": {"type": "json_schema", "name": "n", "schema": schema}}, reasoning={"effort": "low"},
            input=[{"role": "user", "content": parts}, said, {"role": "user", "content": "d"}], tools=[],
            tool_choice="auto", truncation="disabled",
        ),
        defaults={"n": 3},
    )  # fmt: skip
    assert isinstance(job, Job)
    assert job.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert (job.sampling.n, job.sampling.max_tokens, job.sampling.logprobs) == (1, 5, 2)
    assert job.sampling.structured is not None
    assert job.template_arguments == {"reasoning_effort": "low"}


@pytest.mark.parametrize(("reason", "status"), [("stop", "completed"), ("length", "incomplete")])
def test_the_answer_to_a_row_for_responses(read_rows: ReadRows, reason: str, status: str) -> None:
    result = result_for(read_rows, line(RESPONSE))
    (choice,) = result.choices
    choice = msgspec.structs.replace(choice, finish_reason=reason, reasoning_content="hm", logprobs=None)
    row = msgspec.json.encode(output_row(msgspec.structs.replace(result, choices=[choice]), OutputForm(created=77)))
    body = msgspec.json.decode(row)["response"]["body"]
    assert body.pop("usage") == {
        "input_tokens": 3,
        "input_tokens_details": {"cached_tokens": 1},
        "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 5,
    }
    thought, message = body.pop("output")
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (message["status"], message["content"][0]["text"]) == (status, "a?")
    assert body == {
        "id": "resp-0",
        "object": "response",
        "created_at": 77,
        "status": status,
        "error": None,
        "incomplete_details": None if reason == "stop" else {"reason": "max_output_tokens"},
        "model": "gpt-x",
    }
    assert read_output_row(row) is not None
    shown = read_shown_row(row)
    assert shown is not None
    assert [(each.text, each.reasoning, each.finish_reason) for each in shown.choices] == [("a?", "hm", reason)]
    assert shown.prompt_tokens == 3
    assert (Answer(msgspec.json.decode(row)).text, Answer(msgspec.json.decode(row)).reasoning_content) == ("a?", "hm")
    moved = msgspec.json.decode(moved_row(row, 12, None))["response"]["body"]
    assert [moved["id"], *(item["id"] for item in moved["output"])] == ["resp-12", "rs-12", "msg-12"]


def test_the_answer_to_a_completion_row(read_rows: ReadRows) -> None:
    body = as_json(result_for(read_rows, line(COMPLETION, model=None)))["response"]["body"]
    assert body == {
        "id": "cmpl-0",
        "object": "text_completion",
        "created": 77,
        "model": "served",
        "choices": [
            {
                "index": 0,
                "text": "a?",
                "logprobs": {
                    "tokens": ["a", "\ufffd"],
                    "token_logprobs": [-0.5, -1.0],
                    "top_logprobs": [{"a": -0.5, "b": -2.0}, {}],
                    "text_offset": [0, 1],
                },
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }


def test_a_later_run_knows_the_rows_of_both_forms(read_rows: ReadRows) -> None:
    (bad,) = read_rows(line(stream=True))
    assert isinstance(bad, JobResult)
    for result, error in ((result_for(read_rows, line()), None), (bad, "unsupported_parameter")):
        context = msgspec.structs.replace(result.context, index=12)
        data = msgspec.json.encode(output_row(msgspec.structs.replace(result, context=context), OutputForm()))
        written = read_output_row(data)
        assert written is not None
        assert (written.index, written.error_type) == (12, error)
