"""Probe: loads and tries the tokenizer, and compares the weights with config.json.

It runs as `nvcli.tools.doctor.model_probe:main` and imports transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from nvcli.errors import ConfigError, LoadError, RowError
from nvcli.job.text.tokenizer import Tokenizer, check_tokenizer_files
from nvcli.models import checkpoint_check
from nvcli.models.config import load_model_config
from nvcli.models.config_overrides import NO_OVERRIDES
from nvcli.tools.doctor.findings import Finding, note, ok, problem, warning

_TEXT = "What is 17 times 7? It is 119."
_COPY_ADVICE = "copy the model's tokenizer files (tokenizer.json, tokenizer_config.json) into its folder"


class ModelTask(msgspec.Struct, frozen=True, kw_only=True):
    """The probe's argument; the parent decides which checks make sense."""

    path: str
    hf_overrides: dict[str, Any]
    vocab_size: int | None
    """Vocabulary size in config.json; None: it cannot be read."""
    has_weights: bool
    """Whether config.json and the weights' headers can be read."""


def main(task: ModelTask, control: Connection) -> None:
    path = Path(task.path)
    findings = check_tokenizer(path, task.vocab_size)
    if task.has_weights:
        findings.append(check_tensors(path, task.hf_overrides))
    control.send(findings)


def check_tokenizer(path: Path, vocab_size: int | None) -> list[Finding]:
    """Check that the tokenizer exists, loads, gives ids within the vocabulary, and renders conversations."""
    try:
        check_tokenizer_files(path)
        tokenizer = Tokenizer.load(path)
    except LoadError as error:
        return [problem("tokenizer", str(error), _COPY_ADVICE)]
    (ids,) = tokenizer.encode([_TEXT], add_special_tokens=False)
    if isinstance(ids, RowError):
        return [problem("tokenizer", ids.message, _COPY_ADVICE)]
    if vocab_size is not None and ids and max(ids) >= vocab_size:
        found = f"gives the id {max(ids)}, but the model has {vocab_size}"
        return [problem("tokenizer", found, f"it belongs to another model: {_COPY_ADVICE}")]
    copy = tokenizer.decode([ids])[0]
    if copy.strip() != _TEXT:
        note_of_copy = note("tokenizer", f"loads; {_TEXT!r} comes back as {copy!r}")
        return [note_of_copy, check_chat_template(tokenizer)]
    return [ok("tokenizer", f"loads; {len(_TEXT)} characters are {len(ids)} tokens"), check_chat_template(tokenizer)]


def check_chat_template(tokenizer: Tokenizer) -> Finding:
    name = "chat template"
    user = {"role": "user", "content": _TEXT}
    try:
        text = tokenizer.render([user])
    except RowError as error:
        advice = "give rows `prompt` instead, or copy the model's chat_template.jinja into its folder"
        return warning(name, f"rows with `messages` become errors: {error.message}", advice)
    if _TEXT not in text:
        return warning(
            name, "renders, but leaves the message out", "copy the model's own chat_template.jinja into its folder"
        )
    try:
        tokenizer.render([{"role": "system", "content": "Be brief."}, user])
    except RowError:
        return note(name, "renders; does not accept system messages")
    return ok(name, "renders user and system messages")


def check_tensors(path: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> Finding:
    """Check that the checkpoint holds exactly the model's tensors, each in the right shape."""
    try:
        config = load_model_config(path, overrides=overrides)
        located = checkpoint_check.read_model_tensors(config, path)
        checkpoint_check.check_tensors(config, located.tensors, path)
    except (ConfigError, LoadError) as error:
        return problem("tensors", str(error), "config.json and weights must be of one model: download both again")
    found = "names and shapes match config.json"
    return ok("tensors", found if located.note is None else f"{found}; {located.note}")
