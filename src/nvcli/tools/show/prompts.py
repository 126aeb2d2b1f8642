"""The prompts of an output's rows: from the row itself where it keeps them, else from the inputs of the job.

The manifest beside an output names its inputs. A plain file among them that is still the same is read forward as far as
the row, and remembered by places, so that the rows of a page cost one pass.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from nvcli.errors import ConfigError
from nvcli.job.compression import compression_of
from nvcli.job.file_formats import input_format
from nvcli.job.input.known_input import describe_inputs
from nvcli.job.output.manifest import Manifest, load_manifest
from nvcli.tools.show.answers import ShownRow

_MARK_ROWS = 256
"""The place of each so many rows is remembered."""
_MOST_BYTES = 1 << 30
"""Prompts that lie further behind in the inputs are not looked up: that would take long."""
_PROMPT_KEYS = ("prompt", "messages")

Values = Mapping[str, msgspec.Raw]


class Prompts:
    """Finds prompts. A context manager: it keeps inputs open."""

    def __init__(self, output: Path) -> None:
        self._rows = _InputRows([])
        self.keys: tuple[str, ...] = _PROMPT_KEYS
        """The keys under which a row of the input has its prompt."""
        self._id_key = "id"
        try:
            manifest = load_manifest(output)
        except ConfigError:
            return
        if manifest is not None:
            self._rows = _InputRows(_inputs_that_are_there(manifest, output.parent))
            self.keys = tuple(str(manifest.facts.get(f"job.{key}_field", key)) for key in _PROMPT_KEYS)
            self._id_key = str(manifest.facts.get("job.id_field", "id"))

    def __enter__(self) -> Prompts:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()

    def of(self, row: ShownRow) -> str | None:
        """Return the prompt of a row as text; None where it is not found.

        For a failed row whose input has no prompt, or is no JSON, it is the line of the input.
        """
        kept = _prompt_text(row.others, self.keys)
        if kept is not None:
            return kept
        line = self._rows.line(row.index)
        if line is None:
            return None
        whole = None if row.error is None else line.decode(errors="replace").strip()
        try:
            given = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return whole
        own_id = next((_decoded(given[key]) for key in ("custom_id", self._id_key) if key in given), None)
        if own_id is not None and own_id != row.id:
            return None  # the row of another input
        return _prompt_text(given, self.keys) or whole


def _inputs_that_are_there(manifest: Manifest, folder: Path) -> list[Path]:
    """Return the inputs of a job up to the first one that is not there any more, or whose rows are not plain lines."""
    found = []
    for name, description in manifest.inputs:
        if input_format(name) != "jsonl" or compression_of(name):
            break
        path = next((path for path in (Path(name), folder / Path(name).name) if _is(path, description)), None)
        if path is None:
            break
        found.append(path)
    return found


def _is(path: Path, description: str) -> bool:
    try:
        return path.is_file() and describe_inputs([str(path)]) == [description]
    except ConfigError:
        return False


class _InputRows:
    """The lines of inputs by the number of their row: blank lines are no rows."""

    def __init__(self, paths: list[Path]) -> None:
        self._files: list[BinaryIO] = [path.open("rb") for path in paths]
        self._marks: list[tuple[int, int]] = [(0, 0)]
        """The input's number and the place in it of the rows 0, 256, 512 and so on, as far as they were read."""

    def close(self) -> None:
        for file in self._files:
            file.close()

    def line(self, index: int) -> bytes | None:
        """Return the line of a row; None where it is not in these inputs, or too far behind."""
        mark = min(index // _MARK_ROWS, len(self._marks) - 1)
        number, place = self._marks[mark]
        at = mark * _MARK_ROWS
        before = sum(os.fstat(file.fileno()).st_size for file in self._files[:number])
        for at_file in range(number, len(self._files)):
            file = self._files[at_file]
            file.seek(place)
            while before + place < _MOST_BYTES:
                line = file.readline()
                if not line:
                    break
                if not line.isspace():
                    if at % _MARK_ROWS == 0 and at // _MARK_ROWS == len(self._marks):
                        self._marks.append((at_file, place))
                    if at == index:
                        return line.removeprefix(b"\xef\xbb\xbf")
                    at += 1
                place += len(line)
            before, place = before + place, 0
        return None


def _prompt_text(values: Values, keys: tuple[str, ...]) -> str | None:
    """Return the prompt that a row holds, native or of an OpenAI file, as text; None: it holds none."""
    for key in keys:
        if key in values and (text := _as_text(_decoded(values[key]))) is not None:
            return text
    for inner, names in (("input", keys), ("body", (*keys, "input"))):  # the last is that of requests for embeddings
        held = _decoded(values[inner]) if inner in values else None
        if isinstance(held, dict):
            for key in names:
                if (text := _as_text(held.get(key))) is not None:
                    return text
    return None


def _decoded(raw: msgspec.Raw) -> Any:
    """Decode a value; None for one with a number that is too large."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return None


def _as_text(value: Any) -> str | None:
    """Return a prompt, or the messages of a conversation with their roles, as text."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value) or not value:
        return None
    return "\n".join(f"{message.get('role', '')}: {_content(message.get('content'))}" for message in value)


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
