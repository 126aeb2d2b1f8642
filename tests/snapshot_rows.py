"""Rows of all kinds for the snapshot of answers: 500 lines in two jobs, the same on every machine.

A row gets the same answer whenever and beside whatever it is computed: it is greedy, or has a seed of its own or that
of its index. Few tokens are drawn at random, because on another CPU each may be another one, once in 100,000 times.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

TEMPLATE = """
{%- if tools %}{{ '<|im_start|>system\\n' }}Call as <tool_call>{"name": …, "arguments": …}</tool_call>
{%- for tool in tools %} {{ tool.function.name }}{% endfor %}{{ '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% if enable_thinking %}{{ '<think>\\n' }}{% endif %}
{%- endif %}"""
"""The built-in model's chat template, with tools and thoughts."""
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "hour", "parameters": {"type": "object", "properties": {}}}},
]
WORDS = ["game", "wind", "clay", "lion", "milk", "boat", "ring", "cup", "dog", "apple"]
STRUCTURED: list[dict[str, Any]] = [
    {"json_schema": WEATHER},
    {"regex": "[a-f]{2}-[0-9]{1,3}"},
    {"choice": ["red", "green", "blue"]},
    {"grammar": 'start: "x" ("," /[0-9]/)+ "."'},
    {"json_object": True},
]


def question(number: int) -> str:
    """Return a question that the model knows the answer to."""
    a, b = number * 37 % 900 + 3, number * 53 % 90 + 2
    words = [WORDS[(number * 3 + step * 7) % len(WORDS)] for step in range(3 + number % 3)]
    return (
        f"What is {a} + {b}?",
        f"Which is larger, {a} or {b}?",
        f"Reverse these words: {' '.join(words)}",
        f"Count from {b} to {b + 3 + number % 5}.",
        f"What is {a} - {b}?" if a > b else f"What is {b} - {a}?",
    )[number % 5]


def user(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": question(number)}]


def plain(number: int) -> dict[str, Any]:
    return {"prompt": question(number) + "\n"}


def conversation(number: int) -> dict[str, Any]:
    system = [{"role": "system", "content": "Answer."}] if number % 3 == 0 else []
    earlier = [*user(number + 50), {"role": "assistant", "content": "7"}] if number % 4 == 1 else []
    row: dict[str, Any] = {"messages": [*system, *earlier, *user(number)]}
    if number % 5 == 2:
        row["messages"].append({"role": "assistant", "content": "1"})
        row["continue_final_message"] = True
    if number % 7 == 3:
        row["chat_template_kwargs"] = {"enable_thinking": True}
    if number % 7 == 5:
        row["messages"][-1]["content"] = [{"type": "text", "text": row["messages"][-1]["content"]}]
    return row


def token_ids(number: int) -> dict[str, Any]:
    ids = [(number * 31 + place * 17) % 600 + 20 for place in range(4 + number % 9)]
    return {"prompt_token_ids": ids, "sampling": {"max_tokens": 5, "return_token_ids": number % 2 == 0}}


def sampled(number: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 4.0 + number % 3, "max_tokens": 4, "seed": number}
    sampling |= ({"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"n": 2}, {"n": 2, "best_of": 3})[number % 5]
    if number % 4 == 3:
        del sampling["seed"]
    return {**plain(number), "sampling": sampling}


def stopped(number: int) -> dict[str, Any]:
    stop = ("1", ["2", " "], ["clay", "5"])[number % 3]
    options = ({}, {"include_stop_str_in_output": True}, {"min_tokens": 4}, {"echo": True})[number % 4]
    row = {**plain(number), "sampling": {"stop": stop, **options}}
    if number % 6 == 5:
        row["sampling"] = {
            "ignore_eos": True,
            "max_tokens": 9,
            "stop_token_ids": [30, 31],
            "skip_special_tokens": False,
        }
    return row


def changed_logits(number: int) -> dict[str, Any]:
    options: tuple[dict[str, Any], ...] = (
        {"presence_penalty": 1.5, "frequency_penalty": 1.5},
        {"repetition_penalty": 3},
        {"logit_bias": {"25": 60, "26": -50}},
        {"allowed_token_ids": [0, 2, 40, 41, 42, 43]},
        {"bad_words": ["1", "clay"]},
        {"truncate_prompt_tokens": 6},
        {"stop_repetition": {"max_pattern_size": 4, "min_count": 2, "min_tokens": 4}, "ignore_eos": True},
    )
    return {**plain(number), "sampling": {"max_tokens": 10, **options[number % len(options)]}}


def with_logprobs(number: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {"max_tokens": 3, "logprobs": number % 3}
    if number % 4 == 1:
        sampling["prompt_logprobs"] = 1
    if number % 4 == 3:
        sampling["echo"] = True
    return {"prompt": f"What is {number} + 4?\n", "sampling": sampling}


def structured(number: int) -> dict[str, Any]:
    sampling = {"structured": STRUCTURED[number % len(STRUCTURED)], "max_tokens": 30}
    prompt = {"messages": user(number)} if number % 2 else plain(number)
    return {**prompt, "sampling": sampling}


def tools(number: int) -> dict[str, Any]:
    named = {"type": "function", "function": {"name": "weather"}}
    choice = ("required", named, "auto", "none")[number % 4]
    row = {
        "messages": user(number),
        "tools": TOOLS,
        "tool_choice": choice,
        "sampling": {"max_tokens": 130 if number < 8 else 20},
    }
    return {**row, "parallel_tool_calls": False} if number % 8 < 2 else row


def openai_row(number: int, url: str, **body: Any) -> dict[str, Any]:
    return {"custom_id": f"{url}-{number}", "method": "POST", "url": f"/v1/{url}", "body": {"max_tokens": 40, **body}}


def openai_chat(number: int) -> dict[str, Any]:
    body: tuple[dict[str, Any], ...] = (
        {"model": "any"},
        {"n": 2, "temperature": 2.0, "seed": number, "max_tokens": 4},
        {"logprobs": True, "top_logprobs": 1, "max_tokens": 2},
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 130},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "w", "schema": WEATHER}}},
        {"stop": ["1"], "max_tokens": None, "max_completion_tokens": 20},
        {"chat_template_kwargs": {"enable_thinking": True}},
    )
    return openai_row(number, "chat/completions", messages=user(number), **body[number % len(body)])


def openai_completion(number: int) -> dict[str, Any]:
    prompt = question(number) + "\n"
    bodies: tuple[dict[str, Any], ...] = (
        {"prompt": prompt, "model": "other"},
        {"prompt": [prompt, question(number + 1) + "\n"]},
        {"prompt": prompt, "logprobs": 1, "max_tokens": 2},
        {"prompt": prompt, "echo": True},
    )
    return openai_row(number, "completions", **bodies[number % len(bodies)])


def openai_response(number: int) -> dict[str, Any]:
    bodies: tuple[dict[str, Any], ...] = (
        {"input": question(number)},
        {"input": user(number), "instructions": "Answer."},
        {"input": question(number), "max_output_tokens": 2},
        {"input": question(number), "text": {"format": {"type": "json_schema", "name": "w", "schema": WEATHER}}},
        {"input": question(number), "chat_template_kwargs": {"enable_thinking": True}},
    )
    return openai_row(number, "responses", max_tokens=None, **bodies[number % len(bodies)])


def copied(number: int) -> str:
    """A row with keys of its own, which are copied byte for byte."""
    keys = (
        '"expected": 12345678901234567890, "b":true',
        '"kept" : [ 1E+2,{"x":null} ] , "text": "caf\\u00e9, \\"quoted\\"\\nline"',
        '"index": "mine", "error": false, "input": {"deep": true}',
        '"choices": [], "ü": "ß 你好", "tab": "a\\tb"',
    )
    return f'{{"id": {number + 7000}, "prompt": {json.dumps(question(number) + chr(10))}, {keys[number % len(keys)]}}}'


def repeated(number: int) -> dict[str, Any]:
    """One of few questions, so that rows get the answers of equal ones."""
    return plain(300 + number % 4)


FAULTS: list[str | dict[str, Any]] = [
    "not json",
    "[1]",
    '{"prompt": "cut',
    {"prompt": 5},
    {"promt": "x"},
    {"prompt": ""},
    {"prompt": "x", "messages": []},
    {"messages": []},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
    {"prompt_token_ids": [1, 100_000]},
    {"prompt_token_ids": [40] * 3000},
    {"prompt": "x", "id": 1.5},
    {"prompt": "x", "id": 7000},
    {"prompt": "x", "sampling": {"top_p": 7}},
    {"prompt": "x", "sampling": {"unknown": 1}},
    {"prompt": "x", "sampling": {"max_tokens": 100_000}},
    {"prompt": "x", "sampling": {"structured": {"regex": "a", "choice": ["b"]}}},
    {"prompt": "x", "sampling": {"stop_token_ids": [9999]}},
    {"prompt": "x", "sampling": {"logit_bias": {"many tokens": 1}}},
    {"prompt": "x", "sampling": {"thinking_budget": 3}},
    {"messages": [{"role": "user", "content": "x"}], "documents": [{"title": "a"}]},
    {"messages": [{"role": "user", "content": "x"}], "tool_choice": "required"},
]
OPENAI_FAULTS: list[dict[str, Any]] = [
    {"custom_id": "bad url", "url": "/v1/images", "body": {}},
    {"custom_id": "bad key", "url": "/v1/completions", "body": {"prompt": "x", "suffix": "y"}},
    {"custom_id": "bad value", "url": "/v1/chat/completions", "body": {"messages": [], "temperature": "hot"}},
    {"custom_id": "bad input", "url": "/v1/responses", "body": {"input": "x", "tools": TOOLS}},
    {"custom_id": 5, "url": "/v1/completions", "body": {"prompt": "x"}},
]


def fault(number: int) -> str | dict[str, Any]:
    return FAULTS[number % len(FAULTS)]


def openai_fault(number: int) -> dict[str, Any]:
    return OPENAI_FAULTS[number % len(OPENAI_FAULTS)]


Groups = dict[str, tuple[int, Callable[[int], str | dict[str, Any]]]]
NATIVE: Groups = {
    "plain": (60, plain),
    "conversation": (60, conversation),
    "token_ids": (30, token_ids),
    "sampled": (50, sampled),
    "stopped": (45, stopped),
    "changed_logits": (35, changed_logits),
    "logprobs": (24, with_logprobs),
    "structured": (30, structured),
    "tools": (16, tools),
    "copied": (20, copied),
    "repeated": (20, repeated),
    "fault": (33, fault),
}
"""The number of rows of each kind, and how one is made."""
OPENAI: Groups = {
    "chat": (35, openai_chat),
    "completion": (20, openai_completion),
    "response": (15, openai_response),
    "openai_fault": (7, openai_fault),
}
JOBS = {"native": NATIVE, "openai": OPENAI}


def rows_of_groups(groups: Groups) -> Iterator[tuple[str, str]]:
    """Yield the group and the line of each row of a job."""
    for group, (count, make) in groups.items():
        for number in range(count):
            row = make(number)
            if isinstance(row, dict) and "id" not in row and number % 9 == 4 and "fault" not in group:
                row = {"id": f"{group}-{number}", **row}
            yield group, row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)
