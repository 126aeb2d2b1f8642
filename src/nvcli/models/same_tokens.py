"""The check that two checkpoints have the same tokens, so that one can draft for the other. Torch-free."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from nvcli.core.validation import show
from nvcli.errors import ConfigError, LoadError

_TOKENIZER = "tokenizer.json"


def check_same_tokens(target: Path, drafting: Path) -> None:
    """Raise ConfigError if ids stand for other tokens in the folder `drafting` than in `target`, and LoadError for a
    file that cannot be read. A folder without a tokenizer.json is not compared."""
    files = target / _TOKENIZER, drafting / _TOKENIZER
    if not all(file.is_file() for file in files):
        return
    contents = [file.read_bytes() for file in files]
    if contents[0] == contents[1]:
        return
    ours, theirs = (_tokens(file, content) for file, content in zip(files, contents, strict=True))
    other = next((number for number, token in ours.items() if theirs.get(number, token) != token), None)
    if other is not None:
        raise ConfigError(
            f"`speculation.method` (--speculate): token {other} is {show(theirs[other])} in {files[1]}, and "
            f"{show(ours[other])} in {files[0]}: a model can draft only for one with the same tokens"
        )


def _tokens(file: Path, content: bytes) -> dict[int, str]:
    """Return the token of each id."""
    try:
        values: Any = json.loads(content)
        vocabulary, added = values["model"]["vocab"], values.get("added_tokens") or []
        pairs = (
            vocabulary.items() if isinstance(vocabulary, dict) else ((one[0], n) for n, one in enumerate(vocabulary))
        )
        return {number: token for token, number in pairs} | {one["id"]: one["content"] for one in added}
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise LoadError(f"{file}: cannot be read as a tokenizer ({error!r}); download it again") from None
