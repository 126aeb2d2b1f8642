"""Says that an input has its prompts in other columns than those that the job reads, before all rows become errors."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from nvcli.errors import ConfigError
from nvcli.jobs.job import JobResult
from nvcli.jobs.rows.native_row import RowKeys
from nvcli.jobs.rows.prompt_rules import PromptRules
from nvcli.validation import shorten

MAX_HELD_ROWS = 100
"""So many rows at the beginning of an input must all lack a prompt, or all rows of a shorter one."""
_SHOWN_COLUMNS = 12
_PROMPT_NAMES = ("prompt", "prompts", "question", "instruction", "input", "query", "problem", "text", "content")
_MESSAGES_NAMES = ("messages", "conversation", "conversations", "chat", "dialog", "dialogue")
"""What the columns of prompts and conversations are often called, the likeliest first."""


class ColumnsError(ConfigError):
    """The columns of an input are not those that the job reads, or its header does not name them."""


def lacks_prompt(row: JobResult) -> bool:
    """Tell whether a row is an error because the columns are missing that make its prompt."""
    return row.error is not None and row.error.type in ("missing_prompt", "missing_column")


def wrong_columns(name: str, rows: Sequence[JobResult], keys: RowKeys, rules: PromptRules) -> ColumnsError:
    """Return the error of the input `name`, whose first `rows` all lack a prompt."""
    columns = list(dict.fromkeys(column for row in rows for column in row.place.extra))
    which = "its only row has no prompt" if len(rows) == 1 else f"none of its first {len(rows)} rows has a prompt"
    there = f"its columns are {shown_columns(columns)}" if columns else "it has no columns beside `id` and `sampling`"
    if rules.has_template:
        read = f"the template reads {shown_columns(sorted(rules.columns))}"
        way_out = "name columns of the input in the template"
    else:
        read = f"a prompt is read from {shown_columns(keys.prompts)}"
        way_out = _flag(columns)
    return ColumnsError(
        f"{name}: {which}: {there}, and {read}\n  {way_out}\n"
        "  or make an error row of each row without a prompt: --set job.check_columns=false"
    )


def _flag(columns: Sequence[str]) -> str:
    """Say how to name the column of the prompts."""
    by_name = {column.strip().casefold(): column for column in reversed(columns)}
    for flag, known in (("--messages-field", _MESSAGES_NAMES), ("--prompt-field", _PROMPT_NAMES)):
        found = next((by_name[name] for name in known if name in by_name), None)
        if found is not None:
            return f"name the column of the prompts: {flag} {shlex.quote(found)}"
    return "name the column of the prompts with --prompt-field or --messages-field, or columns with --prompt-template"


def shown_columns(columns: Sequence[str]) -> str:
    """Return the names of columns, the first ones of very many."""
    shown = ", ".join(f"`{shorten(column)}`" for column in columns[:_SHOWN_COLUMNS])
    return f"{shown} and {len(columns) - _SHOWN_COLUMNS:,} more" if len(columns) > _SHOWN_COLUMNS else shown
