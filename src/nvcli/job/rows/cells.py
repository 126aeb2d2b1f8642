"""Rows of a CSV file, whose cells are all texts."""

from __future__ import annotations

from typing import Any

import msgspec

from nvcli.core.validation import show
from nvcli.errors import RowError
from nvcli.job.rows.conversation import CONVERSATION_KEYS
from nvcli.job.rows.native_row import RowKeys
from nvcli.job.rows.openai_row import looks_like_openai
from nvcli.job.rows.raw_values import NestedTooDeep, check_json, decode_within


class Cells(dict[str, str]):
    """The cells of one row by the names of their columns, without the empty ones."""


def values_of_cells(cells: Cells, keys: RowKeys) -> dict[str, Any]:
    """Return the values of a row: JSON where nvcli's own keys hold lists and objects, and texts elsewhere.

    Raises RowError for a cell that should hold JSON and does not.
    """
    values: dict[str, Any] = dict(cells)
    json_keys = [keys.messages, keys.prompt_token_ids, keys.sampling, keys.chat_template_kwargs]
    if keys.messages in cells:
        json_keys += CONVERSATION_KEYS
    for key in ["body"] if looks_like_openai(cells) else json_keys:
        if key in cells:
            values[key] = _json_of(cells[key], key)
    return values


def _json_of(text: str, key: str) -> msgspec.Raw:
    try:
        return decode_within(text.strip().encode(), check_json)
    except NestedTooDeep as error:
        raise RowError("invalid_json", f"`{key}` is {error}") from None
    except msgspec.DecodeError:
        raise RowError(
            "invalid_json", f"the cell of `{key}` is {show(text)}, which is not JSON, as this column must be"
        ) from None
