"""The prompts of an output's rows: from the row itself if it has one, else from the job's inputs.

The manifest next to an output names its inputs. Those that are plain, unchanged files are read forward up to the row;
positions along the way are remembered, so that a page of rows costs one pass.
"""

from __future__ import annotations

import codecs
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from nvcli.job.compression import compression_of
from nvcli.job.file_formats import input_format
from nvcli.job.input.known_input import describe_input
from nvcli.job.output.manifest import Manifest, readable_manifest
from nvcli.tools.show.answers import ShownRow
from nvcli.tools.show.image_names import image_name, part_name, without_base64

_MARK_ROWS = 256
"""Rows between two remembered positions."""
_MOST_BYTES = 1 << 30
"""Prompts further into the inputs than this are not looked up, because that would take long."""
_PROMPT_KEYS = ("prompt", "messages")

Values = Mapping[str, msgspec.Raw]


class Prompts:
    """Finds prompts. A context manager, because it keeps the inputs open."""

    def __init__(self, output: Path) -> None:
        self._rows = _InputRows([])
        self.keys: tuple[str, ...] = _PROMPT_KEYS
        """The keys of prompts in input rows."""
        self._id_key, self._image_key = "id", ""
        if (manifest := readable_manifest(output)) is not None:
            self._rows = _InputRows(_inputs_that_are_there(manifest, output.parent))
            self.keys = tuple(str(manifest.facts.get(f"job.{key}_field", key)) for key in _PROMPT_KEYS)
            self._id_key = str(manifest.facts.get("job.id_field", "id"))
            self._image_key = str(manifest.facts.get("job.image_field") or "")

    def __enter__(self) -> Prompts:
        return self

    def __exit__(self, *_: object) -> None:
        self._rows.close()

    def of(self, row: ShownRow) -> str | None:
        """Return a row's prompt as text; None if it cannot be found.

        For a failed row whose input has no prompt or is not JSON, this is the input's line.
        """
        kept = _prompt_text(row.others, self.keys)
        if kept is not None:
            return kept
        line = self._rows.line(row.index)
        if line is None:
            return None
        whole = None if row.error is None else without_base64(line.decode(errors="replace").strip())
        try:
            given = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return whole
        own_id = next((_decoded(given[key]) for key in ("custom_id", self._id_key) if key in given), None)
        if own_id is not None and own_id != row.id:
            return None  # a row of another input
        text = _prompt_text(given, self.keys)
        if text is None:
            return whole
        images = _decoded(given[self._image_key]) if self._image_key in given else None
        return "\n".join(
            [*map(image_name, images if isinstance(images, list) else [images]), text] if images else [text]
        )


def _inputs_that_are_there(manifest: Manifest, folder: Path) -> list[Path]:
    """Return a job's inputs up to the first that is missing, has changed, or does not consist of plain lines."""
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
        return path.is_file() and describe_input(str(path)) == description
    except OSError:
        return False


class _InputRows:
    """Input lines by row number; blank lines do not count."""

    def __init__(self, paths: list[Path]) -> None:
        self._files: list[BinaryIO] = [path.open("rb") for path in paths]
        self._marks: list[tuple[int, int]] = [(0, 0)]
        """(input number, position in it) of every `_MARK_ROWS`-th row, as far as read."""

    def close(self) -> None:
        for file in self._files:
            file.close()

    def line(self, index: int) -> bytes | None:
        """Return a row's line; None if these inputs do not have it, or it is too far into them."""
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
                        return line.removeprefix(codecs.BOM_UTF8)
                    at += 1
                place += len(line)
            before, place = before + place, 0
        return None


def _prompt_text(values: Values, keys: tuple[str, ...]) -> str | None:
    """Return the prompt in a row, native or in OpenAI's format, as text; None if there is none."""
    for key in keys:
        if key in values and (text := _as_text(_decoded(values[key]))) is not None:
            return text
    for inner, names in (("input", keys), ("body", (*keys, "input"))):  # embedding requests use "input"
        held = _decoded(values[inner]) if inner in values else None
        if isinstance(held, dict):
            for key in names:
                if (text := _as_text(held.get(key))) is not None:
                    return text
    return None


def _decoded(raw: msgspec.Raw) -> Any:
    """Decode a value; None if it contains a number that is too large."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return None


def _as_text(value: Any) -> str | None:
    """Return a prompt as text: as it is, or a conversation's messages with their roles."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value) or not value:
        return None
    return "\n".join(f"{message.get('role', '')}: {_content(message.get('content'))}" for message in value)


def _content(content: Any) -> str:
    if isinstance(content, list):
        return "\n".join(part_name(part) for part in content if isinstance(part, dict))
    return "" if content is None else str(content)
