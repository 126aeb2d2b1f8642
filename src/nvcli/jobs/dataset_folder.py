"""The data files of a folder: a dataset that `datasets` saved to disk, or a folder of files of one format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nvcli.errors import ConfigError
from nvcli.jobs.file_formats import data_format

_STATE_FILE = "state.json"
_SPLITS_FILE = "dataset_dict.json"
_SIDE_FORMATS = ("json", "text")
"""Formats in which folders of data also hold descriptions and licences; they count where there is nothing else."""


def folder_files(folder: Path) -> list[Path]:
    """Return the data files of a folder in the order of its rows; none where there are none.

    Raises ConfigError where it holds several splits or files of several formats, so that one has to be named.
    """
    if (splits := _read_json(folder / _SPLITS_FILE)) is not None:
        names = [str(folder / name) for name in _names(splits, "splits")]
        raise ConfigError(f"the input {folder} is a dataset of several splits; name one of them: {', '.join(names)}")
    if (state := _read_json(folder / _STATE_FILE)) is not None and state.get("_data_files"):
        if state.get("_indices_data_files"):
            raise ConfigError(
                f"the input {folder} is a dataset with a selection of its rows; make them rows of their own: "
                "dataset.flatten_indices().save_to_disk(…)"
            )
        return [folder / name for name in _names(state, "_data_files")]
    by_format: dict[str, list[Path]] = {}
    for file in sorted(folder.iterdir()):
        format = data_format(file.name)
        if format is not None and file.is_file() and not file.name.startswith((".", "_")):
            by_format.setdefault(format, []).append(file)
    formats = [format for format in by_format if format not in _SIDE_FORMATS] or list(by_format)
    if len(formats) > 1:
        first = [str(by_format[format][0].name) for format in formats]
        raise ConfigError(
            f"the input {folder} is a folder with files of several formats ({', '.join(first)}); name files of one, "
            f"such as '{folder / f'*{by_format[formats[0]][0].suffix}'}'"
        )
    return by_format[formats[0]] if formats else []


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return the object in a file of `datasets`; None where there is no such file. Raises ConfigError."""
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    return found if isinstance(found, dict) else {}


def _names(values: dict[str, Any], key: str) -> list[str]:
    """Return the names of files or folders under a key, which are texts or objects with a `filename`."""
    found = values.get(key)
    names = (
        [each.get("filename") if isinstance(each, dict) else each for each in found] if isinstance(found, list) else []
    )
    return [name for name in names if isinstance(name, str)]
