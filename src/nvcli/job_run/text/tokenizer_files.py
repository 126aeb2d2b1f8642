"""The files of a checkpoint that make its tokenizer: looked at before a library reads them, and blamed when it fails.

No code of a checkpoint is ever run: `Tokenizer.load` asks the libraries for their own classes alone.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from nvcli.chat_template import MAX_TEMPLATE_BYTES
from nvcli.errors import LoadError
from nvcli.models.json_file import JsonFile, read_json
from nvcli.regular_file import check_regular
from nvcli.validation import show

_VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "tekken.json",
    "*.tiktoken",
)
"""A folder with none of these files has no tokenizer."""
_READ = (*_VOCABULARIES, "*.json", "*.jinja", "*.model", "*.spm", "merges.txt")
"""The files that libraries may open to load a tokenizer."""
_TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_MOST_BYTES = {".jinja": MAX_TEMPLATE_BYTES, "": 250_000_000}
"""The largest file that is read, by its suffix; `""`: with any other. They are read whole."""
_PLAIN_CLASSES = {"TokenizersBackend", "PreTrainedTokenizerFast", "Qwen2Tokenizer", "Qwen2TokenizerFast"}


def check_tokenizer_files(model_path: Path) -> None:
    """Raise LoadError where there is no tokenizer, or a file of it is too large or no regular file.

    Nothing is opened. Without a tokenizer, transformers would make an empty one for some families.
    """
    names = _names(model_path)
    if not any(fnmatch(name, pattern) for name in names for pattern in _VOCABULARIES):
        raise LoadError(f"{model_path}: no tokenizer (such as tokenizer.json); copy the model's tokenizer files there")
    for name in names:
        file = model_path / name
        try:
            check_regular(file)
            size, most = file.stat().st_size, _MOST_BYTES.get(file.suffix, _MOST_BYTES[""])
        except OSError as error:
            if not file.is_dir() or name in (_TOKENIZER, _CONFIG):
                raise LoadError(f"{file}: cannot be read: {error.strerror}; download the file again") from None
            continue
        if size > most:
            raise LoadError(
                f"{file}: {size:,} bytes, more than the {most:,} that such a file may have; download the file again"
            )


def is_plain(model_path: Path) -> bool:
    """Tell whether the checkpoint's tokenizer is what its tokenizer.json describes and nothing else.

    AutoTokenizer gives the same ids, but its import brings torch into this process, which takes seconds. Raises
    LoadError for a tokenizer_config.json that is no JSON.
    """
    config = _read_config(model_path)
    named = config.get("tokenizer_class")
    is_plain_class = isinstance(named, str) and named in _PLAIN_CLASSES and "auto_map" not in config
    return is_plain_class and (model_path / _TOKENIZER).is_file()


def has_chat_template(model_path: Path) -> bool:
    """Tell whether the tokenizer of a checkpoint will have a chat template, without loading it. Raises LoadError.

    As transformers does it, templates in files of their own take the place of the one in tokenizer_config.json.
    """
    files = [model_path / "chat_template.jinja", *(model_path / "additional_chat_templates").glob("*.jinja")]
    sizes = [file.stat().st_size for file in files if file.is_file()]
    return bool(max(sizes)) if sizes else bool(_read_config(model_path).get("chat_template"))


def load_error(model_path: Path, error: BaseException) -> LoadError:
    """Return the error of a tokenizer that a library could not load for `error`; it names the file where that is known.

    It reads the files again, which takes a moment.
    """
    for name in _names(model_path):
        if name.endswith(".json"):
            try:
                read_json(model_path / name)
            except LoadError as cause:
                return cause
            except FileNotFoundError:
                continue
    if (model_path / _TOKENIZER).is_file():
        from tokenizers import Tokenizer as Backend

        try:
            Backend.from_file(str(model_path / _TOKENIZER))
        except BaseException as cause:
            if not is_library_failure(cause):
                raise
            reason = f"cannot load the tokenizer: {_reason(cause)}"
            return LoadError(f"{model_path / _TOKENIZER}: {reason}; download the file again")
    config = _read_config(model_path)
    if "auto_map" in config:
        return LoadError(
            f"{model_path / _CONFIG}: `auto_map` is {show(config['auto_map'])}: the tokenizer is code that comes with "
            "the checkpoint, which nvcli never runs; copy a tokenizer.json of the model there and take the key out"
        )
    place = model_path / _CONFIG if config else model_path
    return LoadError(
        f"{place}: cannot load the tokenizer: {_reason(error)}; download the model's tokenizer files again"
    )


def is_library_failure(error: BaseException) -> bool:
    """Tell whether an exception is a library's failure: any Exception, or a panic of tokenizers' Rust code."""
    return isinstance(error, Exception) or type(error).__module__ == "pyo3_runtime"


def check_token_ids(model_path: Path, vocab: dict[str, int], largest: int) -> None:
    """Raise LoadError where a token's id is above `largest`, so that no model can have it."""
    token, token_id = max(vocab.items(), key=lambda entry: entry[1], default=("", 0))
    if token_id > largest:
        file = model_path / (_TOKENIZER if (model_path / _TOKENIZER).is_file() else _CONFIG)
        raise LoadError(
            f"{file}: token {show(token)} has the id {token_id:,}, above the largest possible ({largest:,}); download "
            "the file again"
        )


def _names(model_path: Path) -> list[str]:
    """The names in the folder that libraries may open, sorted. Raises LoadError."""
    try:
        return sorted(name for name in os.listdir(model_path) if any(fnmatch(name, pattern) for pattern in _READ))
    except OSError as error:
        raise LoadError(f"{model_path}: cannot be read: {error.strerror}") from None


def _read_config(model_path: Path) -> Mapping[str, Any]:
    """Return the object in tokenizer_config.json; empty where there is no such file. Raises LoadError."""
    return JsonFile.read_if_present(model_path / _CONFIG).values


def _reason(error: BaseException) -> str:
    """The first line of what a library said."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
