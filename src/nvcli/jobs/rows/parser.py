"""Makes a `Job` of each row of the input, or the typed error of that row. Never raises for what a row holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from nvcli.errors import RowError
from nvcli.jobs.job import Job, JobId, JobResult, Place, RowForm, failed
from nvcli.jobs.line_splitter import MAX_LINE_BYTES, Line, OversizedLine
from nvcli.jobs.rows.bad_json import explain_bad_json, explain_bad_utf8
from nvcli.jobs.rows.native_row import RowDefaults, RowKeys, native_id, native_job
from nvcli.jobs.rows.openai_row import OWN_KEYS as OPENAI_KEYS
from nvcli.jobs.rows.openai_row import looks_like_openai, openai_form, openai_id, openai_job, openai_model
from nvcli.jobs.rows.seen_ids import SeenIds
from nvcli.validation import show

Row = Line | dict[str, Any]
"""A row as it is read: a line of JSON, or the values of a table's row."""

MAX_LEVELS = 400
"""The most levels of objects and lists in a row, so that whoever handles it later does not run out of stack."""


class RowParser:
    """Parses rows. It holds the keys of rows, the defaults of `sampling`, and the ids that were seen."""

    def __init__(self, sampling_defaults: Mapping[str, Any], keys: RowKeys | None = None) -> None:
        """`sampling_defaults` are valid as SamplingParams; a row's own keys go over them."""
        self._keys = keys or RowKeys()
        self._own_keys = self._keys.all
        self._defaults = RowDefaults(sampling_defaults)
        self._seen = SeenIds()
        self._decode = msgspec.json.Decoder().decode
        self._decode_id: Callable[[bytes], Any] = msgspec.json.Decoder(
            msgspec.defstruct("IdOnly", [("id", Any, msgspec.UNSET)], rename={"id": self._keys.id})
        ).decode

    def parse(self, row: Row, *, index: int, line_id: int, where: str) -> Job | JobResult:
        """Parse one row. `line_id` is the id of a row without one, and `where` names the line in messages."""
        row_id: JobId = line_id
        form = RowForm.NATIVE
        model = None
        extra: dict[str, Any] = {}
        try:
            values = row if isinstance(row, dict) else self._decode_line(row)
            is_native = not looks_like_openai(values) or any(key in values for key in self._keys.prompts)
            own_keys = self._own_keys if is_native else OPENAI_KEYS
            if not values.keys() <= own_keys:
                extra = {key: value for key, value in values.items() if key not in own_keys}
            if is_native:
                is_given = self._keys.id in values
                row_id = native_id(values, self._keys, line_id)
            else:
                is_given, form, model = True, openai_form(values), openai_model(values)
                row_id = openai_id(values)
            if not self._seen.add(row_id, given=is_given):
                what = "the id" if is_given else f"no `{self._keys.id}` is given, and its line number"
                raise RowError("duplicate_id", f"{what} {show(row_id)} is the id of an earlier row; ids must differ")
            place = Place(id=row_id, index=index, line=where, extra=extra, form=form, model=model)
            if is_native:
                return native_job(values, place, self._keys, self._defaults)
            return openai_job(values, place, self._defaults)
        except RowError as error:
            if row_id == line_id:
                self._seen.add(line_id, given=False)
            place = Place(id=row_id, index=index, line=where, extra=extra, form=form, model=model)
            return failed(place, error)

    def skip(self, row: Row, *, line_id: int, is_good: bool) -> None:
        """Take note of the id of a row that is answered already. `is_good` says that its answer was no error."""
        if is_good and isinstance(row, bytes) and b'"custom_id"' not in row:
            try:
                row_id = self._decode_id(row).id
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                row_id = None  # another row than the one that was answered
            if row_id is msgspec.UNSET:
                self._seen.add(line_id, given=False)
            elif isinstance(row_id, str | int):
                self._seen.add(row_id, given=True)
            return
        self.parse(row, index=0, line_id=line_id, where="")

    def _decode_line(self, line: Line) -> dict[str, Any]:
        if isinstance(line, OversizedLine):
            raise RowError("line_too_long", f"longer than {MAX_LINE_BYTES >> 20} MiB, the most that a row may have")
        try:
            row = self._decode(line)
        except UnicodeDecodeError as error:
            raise RowError("invalid_json", explain_bad_utf8(line, error.reason)) from None
        except RecursionError:
            raise _nested_too_deep() from None
        except msgspec.DecodeError as error:
            raise RowError("invalid_json", explain_bad_json(line, str(error))) from None
        if line.count(b"{") + line.count(b"[") > MAX_LEVELS and _is_deeper(row, MAX_LEVELS):
            raise _nested_too_deep()
        if not isinstance(row, dict):
            raise RowError("not_an_object", f'expected an object with keys, such as {{"prompt": …}}, got {show(row)}')
        return row


def _nested_too_deep() -> RowError:
    return RowError("invalid_json", f"nested too deep; allowed: {MAX_LEVELS} levels of objects and lists")


def _is_deeper(value: Any, levels: int) -> bool:
    """Tell whether there are more than `levels` levels of objects and lists. Does not recurse."""
    level = [value]
    for _ in range(levels + 1):
        level = [inner for inner in level if isinstance(inner, dict | list)]
        if not level:
            return False
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)]
    return True
