"""Refuses an input whose first rows all fail alike, before all of its rows become errors: its prompts are in other
columns, the model has no chat template, or the file is not text."""

from __future__ import annotations

import codecs
import difflib
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from nvcli.errors import ConfigError, RowError
from nvcli.job.file_formats import is_pdf, plain_name
from nvcli.job.job import Job, JobResult, RowForm
from nvcli.job.line_splitter import DroppedLine, Line
from nvcli.job.rows.native_row import RowKeys
from nvcli.job.rows.parser import Row, RowParser
from nvcli.job.rows.prompt_rules import PromptRules, shown_columns

MAX_HELD_ROWS = 100
"""How many of an input's first rows must share a fault (all rows of a shorter input)."""
_PROMPT_NAMES = (
    *("prompt", "prompts", "question", "instruction", "input", "inputs", "query", "problem", "text", "text_input"),
    "content",
)
_MESSAGES_NAMES = ("messages", "conversation", "conversations", "chat", "dialog", "dialogue")
"""Common names of columns with prompts and conversations, the likeliest first."""


class ColumnsError(ConfigError):
    """No row of an input can be answered, judging by its first rows or header: for example, its columns differ."""

    def in_settings(self) -> ColumnsError:
        """Return the error for a command without options for columns: with `--set`, which every command has."""

        def setting(option: re.Match[str]) -> str:
            return f"--set job.{option[1].replace('-', '_')}{option[2] and '='}"

        return ColumnsError(_OPTIONS.sub(setting, str(self)))


Fault = Literal["no prompt", "two prompts", "no chat template", "no JSON", "no text", "bad id"]
"""A fault that all rows of an input are likely to share. A row with a bad id has no prompt either where the job looks
for one; nothing else of it was looked at, so it may have any other fault too."""

_FAULTS: dict[str, Fault] = {
    **dict.fromkeys(("missing_prompt", "missing_column"), "no prompt"),
    "conflicting_prompts": "two prompts",
    **dict.fromkeys(("duplicate_id", "invalid_id"), "bad id"),
    **dict.fromkeys(("invalid_json", "not_an_object", "line_too_long"), "no JSON"),
}
_OPTIONS = re.compile(r"--((?:prompt|messages)-field|(?:prompt|chat)-template)((?: (?!or ))?)")
"""The options that messages name, and the blank before a value."""
_OF_JSON = (b"", b"{", b"[", b'"')
"""How lines begin that are meant as JSON, or are too long to tell."""
_WIDE_LETTERS = {
    **dict.fromkeys(("x0", "x0x0"), "UTF-16LE"),
    **dict.fromkeys(("0x", "0x0x"), "UTF-16BE"),
    "x000": "UTF-32LE",
    "000x": "UTF-32BE",
}
"""Encodings by the bytes of plain letters: 0 or not."""
_CONTROLS = bytes({*range(32)} - {*b"\t\n\r\f"})


class ReadRow(NamedTuple):
    """A row that was read, with its fault if faults are looked for."""

    row: Job | JobResult
    num_bytes: int
    fault: Fault | None = None
    start: bytes = b""
    """The first bytes of a line that is not JSON; empty for other faults."""
    is_binary: bool = False

    @property
    def begins_array(self) -> bool:
        """Whether the row is the first line of a JSON array, the last of whose items stands on a line like a row."""
        return self.start.strip() == b"["


def with_fault(row: Job | JobResult, line: Row, num_bytes: int, parser: RowParser) -> ReadRow:
    """Return a row with its fault. `line` is what was read, and takes `num_bytes`."""
    fault: Fault | None = None
    if isinstance(row, Job):
        if isinstance(line, str) and _is_row(line, parser):
            fault = "no text"
        elif row.messages is not None and not parser.rules.has_chat_template:
            fault = "no chat template"
    elif row.error is not None:
        fault = _FAULTS.get(row.error.type)
        if fault == "bad id" and parser.finds_prompt(line):
            fault = None
    if fault == "no JSON" and isinstance(line, bytes):
        return ReadRow(row, num_bytes, fault, line[:8], len(line) != len(line.translate(None, _CONTROLS)))
    return ReadRow(row, num_bytes, fault if fault != "no JSON" or isinstance(line, DroppedLine) else None)


def refusal(name: str, held: Sequence[ReadRow], parser: RowParser) -> ColumnsError | None:
    """Return the error of the input `name`, whose rows share the fault of the first; None: they may just be bad."""
    rows = [each.row for each in held]
    match held[0].fault:
        case "no prompt":
            failed = [row for row in rows if isinstance(row, JobResult)]
            return wrong_columns(name, failed, parser.keys, parser.rules)
        case "two prompts":
            return _two_prompts(name, rows, parser)
        case "no text":
            return ColumnsError(
                f"{name}: {_all_of(rows)} JSON with a prompt on its line, and a line of text is a prompt itself\n"
                f"  {_renamed(name, '.jsonl')}\n  or send each line as it is: --set job.check_columns=false"
            )
        case "no chat template":
            forms = {row.context.form for row in rows}
            key = {RowForm.CHAT: "body.messages", RowForm.RESPONSE: "body.input"}.get(forms.pop(), "messages")
            return ColumnsError(
                f"{name}: {_all_of(rows)} a conversation (`{key}`), and the model has no chat template\n"
                "  name one: --chat-template FILE\n"
                "  or make an error row of each conversation: --set job.check_columns=false"
            )
        case _:
            return _not_text(name, held)


def _is_row(line: str, parser: RowParser) -> bool:
    """Tell whether a line of text is a row of JSONL."""
    try:
        return line.startswith("{") and parser.finds_prompt(line.encode())
    except RowError:
        return False


def _two_prompts(name: str, rows: Sequence[Job | JobResult], parser: RowParser) -> ColumnsError:
    error = rows[0].error if isinstance(rows[0], JobResult) else None
    assert error is not None
    keys, way_out = parser.keys, ""
    if f"`{keys.prompt}` and `{keys.messages}`" in error.message and keys.are_defaults:
        way_out = (
            f"\n  take the conversations: --messages-field {keys.messages}\n  take the prompts: --messages-field none"
        )
    return ColumnsError(
        f"{name}: {_all_of(rows)} more than one prompt, so none of them can be answered: {error.message}{way_out}\n"
        "  or make an error row of each: --set job.check_columns=false"
    )


def _not_text(name: str, held: Sequence[ReadRow]) -> ColumnsError | None:
    """Return the error of an input whose first lines are not JSON; None if they may be rows that are damaged."""
    if (encoding := _wide_encoding(held[0].start)) is not None:
        what, way_out = f"it is {encoding[:6]} text", _convert(name, encoding)
    elif 2 * sum(each.is_binary for each in held) > len(held):
        what = "it is binary data"
        way_out = "name a file of rows" if Path(name).exists() else "name the file of rows: a pipe is read as JSONL"
    elif (form := _form_of([each.start.strip() for each in held])) is not None:
        what, command, suffix = form
        way_out = command if suffix is None or not Path(name).exists() else _renamed(name, suffix)
        way_out += "\n  or make an error row of each line: --set job.check_columns=false"
    else:
        return None
    which = "its only line is" if len(held) == 1 else f"none of its first {len(held)} lines is"
    none = " no" if len(held) == 1 else ""
    return ColumnsError(f"{name}: {which}{none} JSON: {what}\n  {way_out}")


def _form_of(starts: Sequence[bytes]) -> tuple[str, str, str | None] | None:
    """Return what lines that begin so are, how to make rows of them, and the suffix of such files if they are read."""
    first, second = starts[0], starts[1] if len(starts) > 1 else b""
    if first.startswith(b"[") and not second.startswith(b"["):
        return "it is a JSON array", "write its items on lines of their own: jq -c '.[]'", ".json"
    if first == b"{" != second:
        return "its objects go over several lines", "write each on a line of its own: jq -c .", None
    if len(starts) > 1 and not any(start[:1] in _OF_JSON for start in starts):
        return "it is text", "write each prompt as a row: jq -cR '{prompt: .}'", ".txt"
    return None


def _renamed(name: str, suffix: str) -> str:
    """Say how to name a file that is read by another suffix, or if it is text, as a table."""
    plain = plain_name(name)
    new = f"{plain.removesuffix(Path(plain).suffix).removesuffix(suffix)}{suffix}{name.removeprefix(plain)}"
    why = "name it so" if suffix != ".txt" else "name it so, if each line is a prompt (.csv or .tsv: a table)"
    return f"{why}: mv {shlex.quote(name)} {shlex.quote(new)}"


def _wide_encoding(line: bytes) -> str | None:
    """Return the encoding of text whose characters have at least two bytes, as `iconv` names it, judging by the first
    line; None: it does not look like such text."""
    start = line[:8]
    if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "UTF-32"
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "UTF-16"
    of_letters = "".join("x" if any(start[place::4]) else "0" for place in range(min(4, len(start))))
    return _WIDE_LETTERS.get(of_letters)


def _convert(name: str, encoding: str) -> str:
    """Return how to convert the input `name` from an encoding."""
    command = f"iconv -f {encoding} -t UTF-8"
    if not Path(name).exists():
        return f"convert it: {command}, before the pipe to nvcli"
    plain = plain_name(name)
    unpack = "" if plain == name else "unpack it, and "
    return f"{unpack}convert it: {command} {shlex.quote(plain)} > utf8{Path(plain).suffix}"


def check_no_wide_text(name: str, line: Line) -> None:
    """Raise ColumnsError if the input `name` is UTF-16 or UTF-32 text, judging by its first line."""
    if isinstance(line, bytes) and (encoding := _wide_encoding(line)) is not None:
        told = f"its first line is {encoding[:6]} text, not UTF-8"
        raise ColumnsError(f"{name}: {told}\n  {_convert(name, encoding)}")


def _all_of(rows: Sequence[Job | JobResult]) -> str:
    return "its only row has" if len(rows) == 1 else f"all of its first {len(rows)} rows have"


def wrong_columns(name: str, rows: Sequence[JobResult], keys: RowKeys, rules: PromptRules) -> ColumnsError:
    """Return the error of the input `name`, whose first `rows` all lack a prompt."""
    which = "its only row has no prompt" if len(rows) == 1 else f"none of its first {len(rows)} rows has a prompt"
    if error := next((row.error for row in rows if row.context.form.is_openai), None):
        way_out = "mend the rows, or make an error row of each: --set job.check_columns=false"
        return ColumnsError(f"{name}: {which}: {error.message}\n  {way_out}")
    columns = list(dict.fromkeys(column for row in rows for column in row.context.extra))
    there = f"its columns are {shown_columns(columns)}" if columns else "it has no columns beside `id` and `sampling`"
    if is_pdf(name):
        read = "a PDF file has none"
        way_out = "say what to do with each page: --prompt-template 'Transcribe this page.'"
    elif rules.has_template:
        read = f"the template reads {shown_columns(sorted(rules.columns))}"
        way_out = "name columns of the input in the template"
    else:
        read = f"a prompt is read from {shown_columns(keys.prompts)}"
        way_out = _flag(columns, keys.prompt if keys.names_prompt else None)
    return ColumnsError(
        f"{name}: {which}: {there}, and {read}\n  {way_out}\n"
        "  or make an error row of each row without a prompt: --set job.check_columns=false"
    )


def _flag(columns: Sequence[str], named: str | None) -> str:
    """Say how to name the column of the prompts. `named` is the name that the job has for it."""
    by_name = {column.strip().casefold(): column for column in reversed(columns)}
    if named is not None and (near := difflib.get_close_matches(named.casefold(), by_name, n=1)):
        return f"name the column of the prompts: --prompt-field {shlex.quote(by_name[near[0]])}"
    for flag, known in (("--messages-field", _MESSAGES_NAMES), ("--prompt-field", _PROMPT_NAMES)):
        found = next((by_name[name] for name in known if name in by_name), None)
        if found is not None:
            return f"name the column of the prompts: {flag} {shlex.quote(found)}"
    return "name the column of the prompts with --prompt-field or --messages-field, or columns with --prompt-template"
