"""The formats of tool calls, and the grammars of answers that call tools. `tool_calls.py` reads such answers.

A grammar says which functions may be called, with which arguments, and how many calls there may be. Where calls are
left to the model, an answer may be any text, and what begins as a call goes on as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nvcli.core.grammars import JSON_WHITESPACE, SHARED_KEYWORDS, without_other_formats
from nvcli.core.structured import Structured
from nvcli.errors import RowError
from nvcli.job.job import CallRule, Job, RowForm
from nvcli.job.rows.conversation import TOOL_CHOICE, TOOLS
from nvcli.job.text.grammar_maker import Grammar, GrammarMaker
from nvcli.job.text.lark import GemmaNotation, LarkWriter, PythonNotation
from nvcli.job.text.tokenizer import Tokenizer
from nvcli.job.text.tool_calls import (
    FindCalls,
    find_function_calls,
    find_gemma4,
    find_json_after,
    find_llama,
    find_pythonic,
    find_tagged,
)


@dataclass(frozen=True, slots=True)
class CallableTool:
    """A function that an answer may call."""

    name: str
    arguments: Mapping[str, Any]
    """The schema of its arguments, of the type `object`."""
    is_strict: bool
    """Whether keywords of the schema that llguidance does not know are errors; otherwise they are ignored."""

    def json_schema(self, part: Any = None) -> dict[str, Any]:
        """Return the schema of the arguments, or of a part of them, for llguidance."""
        options = {"x-guidance": {"whitespace_pattern": JSON_WHITESPACE, "lenient": not self.is_strict}}
        if part is None:
            return {**options, **self.arguments}
        shared = {key: self.arguments[key] for key in SHARED_KEYWORDS if key in self.arguments}
        return {**options, **shared, **(part if isinstance(part, dict) else {})}


def callable_tools(tools: Sequence[Mapping[str, Any]], rule: CallRule) -> list[CallableTool]:
    """Return the functions that an answer may call, from a row's tools in OpenAI's form.

    Where calls are left to the model, the arguments of functions that are not `strict` may be any object.
    """
    allowed = []
    for tool in tools:
        function = tool["function"]
        if rule.function in (None, function["name"]):
            is_strict = function.get("strict") is True
            arguments = function.get("parameters") or {"properties": {}, "additionalProperties": False}
            if not (rule.is_required or is_strict):
                arguments = {}
            schema = {**without_other_formats(arguments), "type": "object"}
            allowed.append(CallableTool(function["name"], schema, is_strict))
    return allowed


WriteCall = Callable[[LarkWriter, CallableTool], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """How a format writes calls. All but `mark` are pieces of a grammar, which may be empty."""

    mark: str
    """The mark before the first call; empty: none."""
    first: str = ""
    """Characters with which calls without a mark begin, as in a regex class."""
    head: str = ""
    """The piece between the mark and the first call."""
    call: WriteCall
    between: str
    tail: str = ""


WriteForm = Callable[[LarkWriter, str], _Form]
"""Returns the form of a format, which may depend on the text of the chat template."""


def write_call_grammar(
    name: str,
    tools: Sequence[CallableTool],
    rule: CallRule,
    *,
    chat_template: str,
    token_id: Callable[[str], int | None],
) -> str:
    """Return the grammar of an answer in the format of this name, in llguidance's notation.

    `tools`, at least one, are those that may be called; `chat_template` is the model's; `token_id` is that of a
    LarkWriter. The answer begins after its thought, except in the harmony format, where thoughts are messages of the
    answer.
    """
    lark = LarkWriter(token_id)
    if name == HARMONY:
        return lark.finish(_harmony(lark, tools, rule))
    form = TOOL_FORMATS[name].write(lark, chat_template)
    call = lark.one_of([form.call(lark, tool) for tool in tools])
    more = "" if rule.is_single else f"({form.between} {call})*"
    calls = lark.rule(" ".join(filter(None, (form.head, call, more, form.tail))))
    if rule.is_required:
        return lark.finish(f'("\\n" | "\\n\\n")? {lark.mark(form.mark) if form.mark else ""} {calls}')
    if form.mark:
        return lark.finish(f"{lark.text_until(form.mark)} {calls} | {lark.any_text()}")
    other = lark.terminal(rf"[^{form.first}](.|\n)*")
    return lark.finish(f"{other}? | {calls}")


def _json_call(*, name_key: str = "name", arguments_key: str = "arguments", before: str = "") -> WriteCall:
    """Return how to write a call as a JSON object; `before` is a piece before the name in it."""

    def write(lark: LarkWriter, tool: CallableTool) -> str:
        name = lark.text(tool.name)[1:-1]
        opening = f'"{name_key}": "{name}", "{arguments_key}": '
        return lark.rule(f'"{{" {before} {lark.text(opening)} {lark.json(tool.json_schema())} "}}"')

    return write


def _between_tags(lark: LarkWriter, tag: str, call: WriteCall) -> _Form:
    """Return the form of calls between tags on lines of their own."""
    opening, closing = lark.mark(f"<{tag}>"), lark.mark(f"</{tag}>")
    between = f'"\\n" {closing} "\\n" {opening} "\\n"'
    return _Form(mark=f"<{tag}>", head='"\\n"', call=call, between=between, tail=f'"\\n" {closing}')


def _hermes(lark: LarkWriter, template: str) -> _Form:
    return _between_tags(lark, "tool_call", _json_call())


def _function_tags(tag: str, *, line_end: str) -> WriteForm:
    """Return the form of functions and parameters between tags; `line_end` stands on both sides of a value."""

    def call(lark: LarkWriter, tool: CallableTool) -> str:
        end, tags = "</parameter>", ("<parameter=", "<function=", "</function>", f"<{tag}>", f"</{tag}>")
        parameters = _parameters(
            lark,
            tool,
            lambda key, value: f'"<parameter=" {key} {lark.text(">" + line_end)} {value} "\\n"',
            any_text=lambda: lark.text_until(end, without=tags),
            end=lark.text(line_end + end),
        )
        return lark.rule(f'{lark.text(f"<function={tool.name}>")} "\\n" {parameters} "</function>"')

    return lambda lark, template: _between_tags(lark, tag, call)


def _glm(lark: LarkWriter, template: str) -> _Form:
    opening, closing = lark.mark("<tool_call>"), lark.mark("</tool_call>")

    def call(lark: LarkWriter, tool: CallableTool) -> str:
        key_begin, key_end, begin = (lark.mark(mark) for mark in ("<arg_key>", "</arg_key>", "<arg_value>"))
        parameters = _parameters(
            lark,
            tool,
            lambda key, value: f'{key_begin} {key} {key_end} "\\n"? {begin} {value} "\\n"?',
            any_text=lambda: lark.text_until("</arg_value>", without=("<arg_", "<tool_call>", "</tool_call>")),
            end=lark.mark("</arg_value>"),
        )
        return lark.rule(f'{lark.text(tool.name)} "\\n"? {parameters}')

    return _Form(mark="<tool_call>", call=call, between=f'{closing} "\\n"? {opening}', tail=closing)


def _parameters(
    lark: LarkWriter,
    tool: CallableTool,
    write: Callable[[str, str], str],
    *,
    any_text: Callable[[], str],
    end: str,
) -> str:
    """Return the piece for parameters one by one, texts without quotes and everything else as JSON.

    `write` puts a key and a value, with the end of the value, between tags. `any_text` returns the piece for a text
    with its end.
    """
    properties, required = tool.arguments.get("properties"), tool.arguments.get("required")
    if not isinstance(properties, dict) or not properties:
        if tool.arguments.get("additionalProperties") is False:
            return ""
        return f"({lark.rule(write(lark.terminal('[A-Za-z_][A-Za-z0-9_.-]{0,60}'), any_text()))})*"
    pieces = []
    for name, schema in properties.items():
        if not _is_text(schema):
            value = f"{lark.json(tool.json_schema(schema))} {end}"
        elif texts := _texts_of(schema):
            value = f"{lark.one_of([lark.text(each) for each in texts])} {end}"
        else:
            value = any_text()
        piece = lark.rule(write(lark.text(name), value))
        pieces.append(piece if isinstance(required, list) and name in required else f"{piece}?")
    return " ".join(pieces)


def _is_text(schema: Any) -> bool:
    kinds = schema.get("type") if isinstance(schema, dict) else None
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def _texts_of(schema: Mapping[str, Any]) -> list[str]:
    """Return the texts that a schema enumerates, if any."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return [each for each in listed if isinstance(each, str)] if isinstance(listed, list) else []


def _mistral(lark: LarkWriter, template: str) -> _Form:
    """Return the form of a list of JSON, or, since the eleventh version of Mistral's tokenizer, of names with JSON."""
    mark = "[TOOL_CALLS]"
    if "[ARGS]" not in template:
        return _Form(mark=mark, head='" "? "["', call=_json_call(), between='", "', tail='"]"')
    number = f"{lark.mark('[CALL_ID]')} {lark.terminal('[A-Za-z0-9]{9}')}" if "[CALL_ID]" in template else ""

    def call(lark: LarkWriter, tool: CallableTool) -> str:
        return lark.rule(f"{lark.text(tool.name)} {number} {lark.mark('[ARGS]')} {lark.json(tool.json_schema())}")

    return _Form(mark=mark, call=call, between=lark.mark(mark))


def _granite(lark: LarkWriter, template: str) -> _Form:
    return _Form(mark="<|tool_call|>", head='" "? "["', call=_json_call(), between='", "', tail='"]"')


def _cohere(lark: LarkWriter, template: str) -> _Form:
    number = f'"\\"tool_call_id\\": \\"" {lark.terminal("[0-9]{1,3}")} "\\", "'
    return _Form(
        mark="<|START_ACTION|>",
        head='"[\\n    "',
        call=_json_call(name_key="tool_name", arguments_key="parameters", before=number),
        between='",\\n    "',
        tail=f'"\\n]" {lark.mark("<|END_ACTION|>")}',
    )


def _gemma4(lark: LarkWriter, template: str) -> _Form:
    opening, closing = lark.mark("<|tool_call>"), lark.mark("<tool_call|>")

    def call(lark: LarkWriter, tool: CallableTool) -> str:
        values = GemmaNotation(lark, tool.arguments)
        return lark.rule(f'{lark.text(f"call:{tool.name}")} "{{" {values.members(tool.arguments)} "}}"')

    return _Form(mark="<|tool_call>", call=call, between=f"{closing} {opening}", tail=closing)


def _python_call(lark: LarkWriter, tool: CallableTool) -> str:
    arguments = PythonNotation(lark, tool.arguments).keyword_arguments(tool.arguments)
    return lark.rule(f'{lark.text(f"{tool.name}(")} {arguments} ")"')


def _olmo3(lark: LarkWriter, template: str) -> _Form:
    tail = f'"\\n"? {lark.mark("</function_calls>")}'
    return _Form(mark="<function_calls>", head='"\\n"?', call=_python_call, between='"\\n"', tail=tail)


def _pythonic(lark: LarkWriter, template: str) -> _Form:
    return _Form(mark="", first=r"\[", head='"["', call=_python_call, between='", "', tail='"]"')


def _llama(lark: LarkWriter, template: str) -> _Form:
    return _Form(mark="", first=r"\{", call=_json_call(arguments_key="parameters"), between='"; "')


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One format of tool calls."""

    find: FindCalls
    write: WriteForm
    marks: tuple[str, ...] = ()
    """Marks that chat templates write around calls, or texts about them; a template with one of them has the format."""
    inside: str = ""
    """A text that the chat template must hold too; empty: none."""

    def is_of(self, chat_template: str) -> bool:
        """Tell whether a chat template writes this format."""
        return any(mark in chat_template for mark in self.marks) and self.inside in chat_template


TOOL_FORMATS = {
    "gemma4": ToolFormat(find=find_gemma4, write=_gemma4, marks=("<|tool_call>",)),
    "mistral": ToolFormat(find=find_json_after("[TOOL_CALLS]"), write=_mistral, marks=("[TOOL_CALLS]",)),
    "cohere": ToolFormat(
        find=find_json_after("<|START_ACTION|>", end="<|END_ACTION|>"), write=_cohere, marks=("<|START_ACTION|>",)
    ),
    "granite": ToolFormat(find=find_json_after("<|tool_call|>"), write=_granite, marks=("<|tool_call|>",)),
    "seed_oss": ToolFormat(
        find=find_tagged("seed:tool_call"),
        write=_function_tags("seed:tool_call", line_end=""),
        marks=("<seed:tool_call>",),
    ),
    "olmo3": ToolFormat(find=find_function_calls, write=_olmo3, marks=("<function_calls>",)),
    "glm": ToolFormat(find=find_tagged("tool_call"), write=_glm, marks=("<tool_call>",), inside="<arg_key>"),
    "qwen3_coder": ToolFormat(
        find=find_tagged("tool_call"),
        write=_function_tags("tool_call", line_end="\n"),
        marks=("<tool_call>",),
        inside="<function=",
    ),
    "hermes": ToolFormat(find=find_tagged("tool_call"), write=_hermes, marks=("<tool_call>",)),
    "llama": ToolFormat(
        find=find_llama,
        write=_llama,
        marks=("<|python_tag|>", "<|python_start|>", '"parameters": dictionary of argument name'),
    ),
    "pythonic": ToolFormat(find=find_pythonic, write=_pythonic),
}
"""The formats by their names in `job.tool_parser`, in the order in which chat templates are searched.
That of gpt-oss is not among them, because its calls are messages and no part of a text."""
HARMONY = "harmony"
"""The name of gpt-oss's format."""


def tool_format_name(name: str, chat_template: str) -> str | None:
    """Return the name of a format; `auto` stands for the one that the chat template writes. None: there is none."""
    if name != "auto":
        return name if name in TOOL_FORMATS else None
    return next((each for each, form in TOOL_FORMATS.items() if form.is_of(chat_template)), None)


def _harmony(lark: LarkWriter, tools: Sequence[CallableTool], rule: CallRule) -> str:
    """Return the piece for an answer of gpt-oss, which begins after the role of its first message.

    Thoughts and messages to the user go before. A call ends the answer with an end-of-sequence token of its own, so
    there is one of them.
    """
    channel, message, start = (lark.mark(f"<|{name}|>") for name in ("channel", "message", "start"))
    text = lark.text_until("<|end|>")
    before = lark.rule(f'{channel} ("analysis" | "commentary") {message} {text} {start} "assistant"')
    kind = f'({lark.text(" ")}? {lark.mark("<|constrain|>")} "json" | " json")?'
    calls = []
    for tool in tools:
        to = lark.text(f" to=functions.{tool.name}")
        header = lark.rule(f'{channel} "commentary" {to} {kind} | {to} {channel} "commentary" {kind}')
        calls.append(lark.rule(f"{header} {message} {lark.json(tool.json_schema())}"))
    call = lark.one_of(calls)
    if rule.is_required:
        return f"{before}* {call}"
    final = f'{channel} "final" {message} {lark.any_text()}'
    return f"{before}* ({call} | {final})"


def call_grammar(
    job: Job, rule: CallRule, tokenizer: Tokenizer, form: str | None, grammars: GrammarMaker | None
) -> Grammar | None:
    """Return the grammar of a row's answer; None: it is free. Raises RowError.

    An answer that need not call is free where calls are not looked for, where it has a form already
    (`sampling.structured`), and where no end-of-sequence token ends it. `form` is the name of the model's format of
    tool calls; None: it has none.
    """
    under = "" if job.context.form is RowForm.NATIVE else "body."
    name, sampling = f"`{under}{TOOL_CHOICE}`", job.sampling
    if not rule.is_required and (form is None or sampling.structured is not None or sampling.ignore_eos):
        return None
    if form is None:
        raise RowError(
            "unsupported_parameter",
            f'{name} asks for a call, and how this model writes calls is not known; give "auto", or set '
            "`job.tool_parser`",
        )
    if sampling.structured is not None:
        raise RowError(
            "invalid_structured",
            f"{name} asks for a call, and the row for an answer of another form ({sampling.structured.form}); "
            "leave one of the two out",
        )
    if sampling.ignore_eos:
        raise RowError(
            "invalid_sampling",
            f"`ignore_eos` is true, and {name} asks for a call, which ends with an end-of-sequence token; leave "
            "one of the two out",
        )
    if grammars is None:
        raise RowError("unsupported_parameter", f"{name} is not supported here; leave it out")
    tools = callable_tools(job.tools, rule)
    try:
        text = write_call_grammar(form, tools, rule, chat_template=tokenizer.chat_template, token_id=tokenizer.token_id)
    except RecursionError:
        raise RowError("invalid_structured", f"`{under}{TOOLS}` are nested too deep for a grammar") from None
    try:
        return grammars.grammar(Structured(grammar=text), name=f"the grammar of `{under}{TOOLS}`")
    except RowError:
        _find_fault(grammars, job, tools, f"{under}{TOOLS}")
        raise


def _find_fault(grammars: GrammarMaker, job: Job, tools: list[CallableTool], name: str) -> None:
    """Raise the RowError of the first function whose schema alone cannot be used."""
    numbers = {tool["function"]["name"]: number for number, tool in enumerate(job.tools)}
    for tool in tools:
        where = f"`{name}[{numbers[tool.name]}].function.parameters`"
        grammars.grammar(Structured(json_schema=tool.json_schema()), name=where)
