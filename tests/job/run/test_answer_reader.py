"""Answers to conversations are taken apart into thought, text and tool calls, by the marks of the model's template."""

from __future__ import annotations

import json
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from nvcli.core.messages import pack
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.structured import Structured
from nvcli.engine.request import RequestOutput
from nvcli.errors import RowError
from nvcli.job.job import Choice, Job, JobResult, RowContext, RowForm
from nvcli.job.rows.output_row import OutputForm, output_row
from nvcli.job.run.open_rows import OpenRow, results_of
from nvcli.job.text.grammar_maker import Grammar
from nvcli.job.text.model_limits import ModelLimits
from nvcli.job.text.prepare import PreparedRow, Preparer
from nvcli.job.text.tokenizer import Tokenizer

HARMONY = [f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call")]
SPECIAL = ["<|im_end|>", *HARMONY, "[THINK]", "[/THINK]", "[TOOL_CALLS]", "<|channel>", "<channel|>"]
ADDED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
WORDS = ["analysis", "final", "commentary", "thought", " to=functions.look", "so", "{", '{"name": "look"}', "[ARGS]{}"]
TEMPLATES = {
    "think": "{{ tools }}{{ messages }}<think></think><tool_call>",
    "harmony": "{{ tools }}{{ messages }}<|channel|>analysis<|message|>",
    "mistral": "{{ tools }}{{ messages }}[THINK][/THINK][TOOL_CALLS]",
    "gemma4": "{{ messages }}<|channel>thought<channel|>",
    "text": "{{ messages }}<seed:think></seed:think>",  # no tokens of this vocabulary
    "plain": "{{ messages }}",
}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def backend() -> Backend:
    """Each byte is a token, and so is each mark."""
    vocab = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens(ADDED)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return backend


class Model:
    """A model with a chat template, and what becomes of its answers."""

    def __init__(self, backend: Backend, template: str, *, grammars: Any = None, **limits: Any) -> None:
        self.grammars = grammars
        self.tokenizer = Tokenizer(
            PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=TEMPLATES[template])
        )
        self.limits = ModelLimits(max_model_len=4096, vocab_size=300, eos_token_ids=(), **limits)

    def prepare(self, prompt: str = "user: x", **fields: Any) -> PreparedRow | JobResult:
        """A row whose conversation is rendered as `prompt`, or with `raw` has it as its prompt. The other `fields` are
        those of the job and of its sampling."""
        own = {key: fields.pop(key) for key in ("tools", "template_arguments", "messages") if key in fields}
        form = fields.pop("form", RowForm.NATIVE)
        context = RowContext(id=0, index=0, line="line 1", form=form)
        given: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
        values = {"prompt": prompt} if fields.pop("raw", False) else {**given, **own}
        job = Job(context=context, sampling=SamplingParams(**fields), **values)
        (row,) = Preparer(self.tokenizer, self.limits, lambda them: [prompt] * len(them), self.grammars).prepare([job])
        return row

    def ids(self, text: str) -> array[int]:
        (ids,) = self.tokenizer.encode([text], add_special_tokens=False)
        assert not isinstance(ids, RowError)
        return array("i", ids)

    def result(self, answer: str, prompt: str = "user: x", *, reason: Any = "stop", **fields: Any) -> JobResult:
        row = self.prepare(prompt, **fields)
        assert isinstance(row, PreparedRow)
        opened = OpenRow(row, 0)
        ids = [*self.ids(answer), *(self.ids("<|im_end|>") if reason == "stop" else [])]
        output = RequestOutput(request_id=0, token_ids=pack(ids), finish_reason=reason, stopped_by_id=reason == "stop")
        opened.take(output, self.tokenizer)
        (result,) = results_of([opened], self.tokenizer)
        return result

    def answer(self, answer: str, prompt: str = "user: x", **fields: Any) -> Choice:
        (choice,) = self.result(answer, prompt, **fields).choices
        return choice


def test_thoughts_stand_beside_the_text(backend: Backend) -> None:
    model = Model(backend, "think")
    for answer, prompt in (
        ("<think>\nso ü?\n</think>\n\nYes.", "user: x"),
        ("so ü?</think>Yes.", "user: x<think>\n"),
        ("so ü?\n</think>\n\nYes.", "user: x"),  # some models leave the first mark out
    ):
        result = model.result(answer, prompt)
        (choice,) = result.choices
        assert (choice.reasoning_content, choice.text, choice.finish_reason) == ("so ü?", "Yes.", "stop")
        marked = answer.partition("</think>")[0] + "</think>"
        assert result.usage.reasoning_tokens == len(model.ids(marked))
        assert result.usage.completion_tokens == len(model.ids(answer)) + 1


def test_an_unfinished_thought_is_all_thought(backend: Backend) -> None:
    model = Model(backend, "think")
    for answer, prompt in (("<think>\nand the", "user: x"), ("and the", "user: x<think>\n")):
        choice = model.answer(answer, prompt, reason="length")
        assert (choice.reasoning_content, choice.text, choice.finish_reason) == ("and the", "", "length")


def test_a_thought_that_the_template_closes_is_none(backend: Backend) -> None:
    """Then the marks may stand in the text, and a row's own text opens no thought."""
    model = Model(backend, "think")
    quoted = "The mark is </think>."
    assert model.answer(quoted, "user: x<think>\n\n</think>\n\n").text == quoted
    choice = model.answer("Yes.", "user: what is <think>?<|im_end|>assistant: ")
    assert (choice.reasoning_content, choice.text) == (None, "Yes.")


def test_a_conversation_that_goes_on_in_a_thought(backend: Backend) -> None:
    model = Model(backend, "think")
    for content, thought, text in (
        ("<think>\nI was", " here.", "Yes."),
        ("<think>I was</think>Well, ", None, " here.</think>Yes."),
        ("Well, ", " here.", "Yes."),
    ):
        fields = {
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": content}],
            "template_arguments": {"continue_final_message": True},
        }
        choice = model.answer(" here.</think>Yes.", f"user: x assistant: {content}", **fields)
        assert (choice.reasoning_content, choice.text) == (thought and thought.strip(), text)


@pytest.mark.parametrize(
    ("template", "answer"),
    [
        ("mistral", "[THINK]so?[/THINK]Yes."),
        ("gemma4", "<|channel>thought\nso?<channel|>Yes."),
        ("text", "<seed:think>so?</seed:think>Yes."),
        ("harmony", "<|channel|>analysis<|message|>so?<|end|><|start|>assistant<|channel|>final<|message|>Yes."),
    ],
)
def test_other_families_mark_thoughts_in_their_way(backend: Backend, template: str, answer: str) -> None:
    model = Model(backend, template)
    result = model.result(answer)
    (choice,) = result.choices
    assert (choice.reasoning_content, choice.text) == ("so?", "Yes.")
    marked = model.ids(answer.partition("Yes.")[0].partition("<|start|>")[0])
    assert result.usage.reasoning_tokens == len(marked)
    unfinished = model.answer(answer.partition("?")[0], reason="length")
    assert (unfinished.reasoning_content, unfinished.text) == ("so", "")
    plain = Model(backend, template, reasoning_parser="none", tool_parser="none").result(answer)
    assert plain.choices[0].reasoning_content is None
    assert "so?" in plain.choices[0].text
    assert plain.usage.reasoning_tokens is msgspec.UNSET


def test_stop_strings_cut_the_text_and_the_thought(backend: Backend) -> None:
    model = Model(backend, "think")
    answer = "<think>one two</think>three four"
    assert model.answer(answer, stop="ee f").text == "thr"
    cut = model.answer(answer, stop="e t")
    assert (cut.reasoning_content, cut.text, cut.finish_reason) == ("on", "", "stop")
    harmony = Model(backend, "harmony").answer(
        "<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>final<|message|>two three", stop=" thr"
    )
    assert (harmony.reasoning_content, harmony.text) == ("one", "two")


def test_prompts_that_are_no_conversations_get_texts(backend: Backend) -> None:
    answer = "<think>so</think>Yes."
    choice = Model(backend, "think").answer(answer, raw=True)
    assert (choice.text, choice.reasoning_content) == (answer, None)


def test_tool_calls_stand_beside_the_text(backend: Backend) -> None:
    model = Model(backend, "think")
    answer = 'so</think>I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "ü"}}\n</tool_call>'
    choice = model.answer(answer, "x<think>", tools=[TOOL])
    assert (choice.reasoning_content, choice.text, choice.finish_reason) == ("so", "I look.", "tool_calls")
    assert choice.tool_calls is not None
    (call,) = choice.tool_calls
    assert (call.type, call.function.name, call.function.arguments) == ("function", "look", '{"at": "ü"}')
    assert len(call.id) == 9
    assert call.id == model.answer(answer, "x<think>", tools=[TOOL]).tool_calls[0].id  # type: ignore[index]
    assert call.id != model.answer(answer, "y<think>", tools=[TOOL]).tool_calls[0].id  # type: ignore[index]
    untold = model.answer(answer, "x<think>")  # the row has no tools
    assert (untold.tool_calls, untold.finish_reason) == (None, "stop")
    mistral = Model(backend, "mistral").answer('[TOOL_CALLS]look[ARGS]{"at": 1}', tools=[TOOL])
    assert mistral.tool_calls is not None
    assert (mistral.text, mistral.tool_calls[0].function.arguments) == ("", '{"at": 1}')


def test_a_call_that_cannot_be_read_stays_text_and_says_so(backend: Backend) -> None:
    answer = '<tool_call>{"name": "look", "argum'
    choice = Model(backend, "think").answer(answer, tools=[TOOL], reason="length")
    assert (choice.text, choice.tool_calls, choice.finish_reason) == (answer, None, "length")
    assert choice.tool_call_error is not None
    assert "does not end" in choice.tool_call_error


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("parser", "answer"),
    [
        ("hermes", f'<tool_call>{{"name": "look", "arguments": {DEEP}'),
        ("qwen3_coder", f"<tool_call><function=look><parameter=at>{DEEP}</parameter></function></tool_call>"),
        ("glm", f"<tool_call>look<arg_key>at</arg_key><arg_value>{DEEP}</arg_value></tool_call>"),
        ("seed_oss", f"<seed:tool_call><function=look><parameter=at>{DEEP}</parameter></function></seed:tool_call>"),
        ("llama", f'{{"name":{DEEP}'),
        ("mistral", f"[TOOL_CALLS]{DEEP}"),
        ("pythonic", f"[look(at={DEEP}"),
        ("harmony", f"<|channel|>commentary to=functions.look<|message|>{DEEP}"),
    ],
)
def test_a_call_that_is_nested_too_deep_stays_text(backend: Backend, parser: str, answer: str) -> None:
    """And the line of the output can be written."""
    model = Model(backend, "think", tool_parser=parser)
    result = model.result(answer, "x", tools=[TOOL], reason="length")
    (choice,) = result.choices
    assert (choice.tool_calls, choice.finish_reason) == (None, "length")
    assert choice.tool_call_error
    assert DEEP in choice.text
    msgspec.json.encode(output_row(result, OutputForm()))


def test_calls_of_gpt_oss_are_messages_to_functions(backend: Backend) -> None:
    model = Model(backend, "harmony")
    answer = (
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        '<|start|>assistant<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"at": 1}'
    )
    choice = model.answer(answer, tools=[TOOL])
    assert (choice.reasoning_content, choice.text, choice.finish_reason) == ("so", "I look.", "tool_calls")
    assert choice.tool_calls is not None
    assert (choice.tool_calls[0].function.name, choice.tool_calls[0].function.arguments) == ("look", '{"at": 1}')
    named_first = "<|start|>assistant to=functions.look<|channel|>commentary json<|message|>{"
    broken = model.answer("<|channel|>analysis<|message|>so<|end|>" + named_first, tools=[TOOL], reason="length")
    assert (broken.text, broken.tool_calls) == ("{", None)
    assert broken.tool_call_error is not None


def test_openai_rows_have_them_in_the_message(backend: Backend) -> None:
    model = Model(backend, "think")

    def body(answer: str, **fields: Any) -> dict[str, Any]:
        row = output_row(model.result(answer, form=RowForm.CHAT, **fields), OutputForm())
        found: dict[str, Any] = json.loads(json.dumps(row, default=as_json))["response"]["body"]
        return found

    thought = body("<think>so", reason="length")
    assert thought["choices"][0]["message"] == {
        "role": "assistant", "content": None, "refusal": None, "reasoning_content": "so"
    }  # fmt: skip
    assert thought["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}
    call = body('<tool_call>{"name": "look", "arguments": {}}</tool_call>', tools=[TOOL])
    message = call["choices"][0]["message"]
    assert (message["content"], call["choices"][0]["finish_reason"]) == (None, "tool_calls")
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": "{}"}
    plain = body("Yes.")
    assert plain["choices"][0]["message"] == {"role": "assistant", "content": "Yes.", "refusal": None}


def as_json(value: Any) -> Any:
    return msgspec.to_builtins(value)


def test_a_budget_becomes_a_limit_of_tokens(backend: Backend) -> None:
    model = Model(backend, "think")

    def limit(prompt: str, model: Model = model, **fields: Any) -> Any:
        row = model.prepare(prompt, thinking_budget=7, **fields)
        assert isinstance(row, PreparedRow), row.error
        return OpenRow(row, 0).request(0).thought_limit

    (start,), (end,) = model.ids("<think>"), model.ids("</think>")
    free, opened = limit("x"), limit("x<think>\n")
    assert (free.budget, free.start_ids, free.ends, free.forced_ids) == (7, [start], [[end]], [end])
    assert (opened.start_ids, opened.ends) == ([], [[end]])
    assert limit("x<think>\n\n</think>\n\n") is None
    assert limit("x<think>\n", raw=True) == opened  # it is tokens that are counted, whoever reads them
    harmony = Model(backend, "harmony")
    forced = "<|end|><|start|>assistant<|channel|>final<|message|>"
    assert limit("x", harmony).forced_ids == list(harmony.ids(forced))
    assert limit("x", harmony).ends[0] == list(harmony.ids("<|channel|>final"))


@pytest.mark.parametrize(
    ("template", "message"),
    [("plain", "how this model marks its thoughts is not known"), ("text", "</seed:think>, which ends")],
)
def test_a_budget_without_marks_that_are_tokens_is_an_error(backend: Backend, template: str, message: str) -> None:
    row = Model(backend, template).prepare(thinking_budget=7)
    assert isinstance(row, JobResult)
    assert row.error is not None
    assert row.error.type == "unsupported_parameter"
    assert message in row.error.message


class OneGrammar:
    """Makes the same grammar of everything."""

    def grammar(self, wanted: Structured, *, name: str) -> Grammar:
        return Grammar(text="start: /a/", wanted=wanted)


def test_a_constraint_begins_behind_the_thought(backend: Backend) -> None:
    def marks(template: str, prompt: str, **fields: Any) -> tuple[array[int], array[int]]:
        row = Model(backend, template, grammars=OneGrammar()).prepare(
            prompt, structured=Structured(regex="a"), **fields
        )
        assert isinstance(row, PreparedRow)
        assert row.constraint is not None
        return array("i", row.constraint.opens_with), array("i", row.constraint.starts_after)

    none = array("i")
    ids = Model(backend, "think").ids
    assert marks("think", "user: x") == (ids("<think>"), ids("</think>")), "the answer may begin a thought"
    assert marks("think", "user: x<think>\n") == (none, ids("</think>"))
    assert marks("think", "user: x<think>\n\n</think>\n\n") == (none, none)
    assert marks("think", "user: x", raw=True) == (none, none), "only conversations have thoughts"
    assert marks("harmony", "user: x") == (none, ids("<|channel|>final<|message|>"))
    assert marks("plain", "user: x") == (none, none)
    assert marks("text", "user: x") == (none, none), "its end could not be seen, so there is no thought"


def test_a_constraint_behind_a_thought_whose_end_cannot_be_seen_is_an_error(backend: Backend) -> None:
    model = Model(backend, "text", grammars=OneGrammar())
    row = model.prepare("user: x<seed:think>", structured=Structured(choice=["a"]))
    assert isinstance(row, JobResult)
    assert row.error is not None
    assert "`sampling.structured.choice` is for what follows the thought, and </seed:think>, w" in row.error.message


def test_rows_that_are_read_in_other_ways_have_other_answers(backend: Backend) -> None:
    def key(**fields: Any) -> bytes | None:
        row = Model(backend, "think").prepare(temperature=0, **fields)
        assert isinstance(row, PreparedRow)
        return row.answer_key

    other = {**TOOL, "function": {**TOOL["function"], "parameters": {}}}  # type: ignore[dict-item]
    assert key(tools=[TOOL]) == key(tools=[TOOL])
    assert len({key(), key(tools=[TOOL]), key(tools=[other]), key(thinking_budget=3)}) == 4


@given(
    template=st.sampled_from(sorted(TEMPLATES)),
    parts=st.lists(st.sampled_from([*SPECIAL, *ADDED, *WORDS]) | st.text(max_size=3), max_size=12),
    state=st.sampled_from(["x", "x<think>\n", "x<think></think>"]),
    stop=st.sampled_from([None, "o", "so", "{"]),
    reason=st.sampled_from(["stop", "length", "repetition"]),
)
def test_whatever_a_model_writes_is_an_answer(
    backend: Backend, template: str, parts: list[str], state: str, stop: str | None, reason: str
) -> None:
    model = Model(backend, template)
    result = model.result(
        "".join(parts), state, reason=reason, tools=[TOOL], **({} if stop is None else {"stop": stop})
    )
    for form in (RowForm.NATIVE, RowForm.CHAT):
        context = msgspec.structs.replace(result.context, form=form)
        msgspec.json.encode(output_row(msgspec.structs.replace(result, context=context), OutputForm()))
    (choice,) = result.choices
    assert (choice.finish_reason == "tool_calls") <= bool(choice.tool_calls)
    assert result.usage.reasoning_tokens in (msgspec.UNSET, *range(result.usage.completion_tokens + 1))
