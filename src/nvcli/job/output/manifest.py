"""`<output>.manifest.json` says what an output was made from, so that only the same job continues it."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from msgspec import structs

from nvcli.core.sampling_params import SamplingParams
from nvcli.core.system.regular_file import create_anew, read_regular
from nvcli.errors import ConfigError
from nvcli.job.own_files import manifest_draft_path, manifest_path

VERSION = 2
MERGED_FACT = "lora.merged"
"""The fact that names the LoRA adapters that are merged into the weights in turn (`merged_fact`)."""
CHAT_FACT = "job.chat"
"""The fact that says which texts become user messages (`job.run.chat_choice`)."""

Fact = str | int | float | bool | None


def as_fact(value: Any) -> Fact:
    """Convert a value to a fact: lists and mappings become JSON.

    YAML has keys that are numbers (`logit_bias: {5: 1}`); they mean the same as in quotes.
    """
    if isinstance(value, str | int | float | bool | None):
        return value
    if isinstance(value, dict):
        value = {str(key): inner for key, inner in value.items()}
    return msgspec.json.encode(value, order="deterministic").decode()


_SAMPLING_DEFAULTS = {f"sampling.{key}": as_fact(value) for key, value in structs.asdict(SamplingParams()).items()}
"""Values that missing facts stand for, by name."""


def merged_fact(names: Iterable[str]) -> str:
    """Return the names of adapters as one text, from which ", " separates them whatever the names are."""
    return ", ".join(name.replace("%", "%25").replace(",", "%2C") for name in names)


class Finished(msgspec.Struct, frozen=True, kw_only=True):
    """The output as it was when the job finished."""

    rows: int
    errors: dict[str, int]
    """Failed rows by error type."""
    all_read: bool
    """Whether the inputs were read to their end, and not just to `--limit`."""
    output_bytes: int
    rows_read: int = 0
    """Rows of the inputs from this number on may be unanswered, unless all were read."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """The sources of an output. Facts, hub ids and descriptions of inputs are compared.

    Names of folders and files are for messages: they may be moved and copied.
    """

    version: int = VERSION
    created: int
    """When the job began, in seconds since 1970."""
    model: str
    """The model as it was named."""
    hub_id: str | None = None
    """Its id on the Hugging Face hub, if it was named by that."""
    facts: dict[str, Fact]
    """Everything about the model and the configuration that answers depend on."""
    inputs: list[tuple[str, str]]
    """The name and the description of each input."""
    num_input_rows: int | None = None
    """Number of rows of the inputs, once read to their end."""
    is_updating: bool = False
    """Whether new versions of the output's rows and digests lie beside them, to replace them (`changed_input`)."""
    finished: Finished | None = None

    def differences(self, other: Manifest) -> list[str]:
        """Return a line for each difference from `other`."""
        return [*self.setting_differences(other), *self.input_differences(other)]

    def setting_differences(self, other: Manifest) -> list[str]:
        """Return a line for each difference from `other` in model and configuration."""
        has_ids = self.hub_id is not None and other.hub_id is not None
        lines = [f"model: {self.hub_id} → {other.hub_id}"] if has_ids and self.hub_id != other.hub_id else []
        lines += [
            f"{name}: {_show(self.facts, name)} → {_show(other.facts, name)}{self._way_back(name, other)}"
            for name in [*self.facts, *(name for name in other.facts if name not in self.facts)]
            if self._value(name) != other._value(name)
        ]
        return lines

    def _value(self, name: str) -> Fact | msgspec.UnsetType:
        """Return a fact; where it is missing, what that means."""
        return self.facts.get(name, _SAMPLING_DEFAULTS.get(name, msgspec.UNSET))

    def _way_back(self, name: str, other: Manifest) -> str:
        """Return the hint on how to undo a difference, where a flag does it."""
        if name in _SAMPLING_DEFAULTS and name not in self.facts:  # the checkpoint may have set the new one
            setting = shlex.quote(f"{name}={_show(_SAMPLING_DEFAULTS, name)}")
            return f" (to continue as it began: --set {setting}, and no flag for it)"
        if name != CHAT_FACT:
            return ""
        old, new = str(self.facts.get(name)), str(other.facts.get(name))
        flag = "with --chat" if old.startswith("user") else "with --no-chat"
        if not old.startswith("user") and new.startswith("prompts"):
            flag = "without --no-chat"
        return f" (to continue as it began: {flag})"

    def input_differences(self, other: Manifest) -> list[str]:
        """Return a line for each input that differs from those of `other`."""
        if len(self.inputs) != len(other.inputs):
            return [f"inputs: {_names(self.inputs)} → {_names(other.inputs)}"]
        return list(_input_differences(self.inputs, other.inputs))


def _show(facts: dict[str, Fact], name: str) -> str:
    """Return a fact on one line. Lists and mappings are JSON texts already."""
    if name not in facts:
        return "not set"
    text = msgspec.json.encode(facts[name]).decode()
    return text[1:-1].replace('\\"', '"') if isinstance(facts[name], str) else text


def _names(inputs: Sequence[tuple[str, str]]) -> str:
    names = [name for name, _ in inputs]
    return ", ".join(names) if len(names) <= 3 else f"{names[0]} and {len(names) - 1} others"


def _input_differences(old: Sequence[tuple[str, str]], new: Sequence[tuple[str, str]]) -> Iterator[str]:
    for (old_name, old_text), (new_name, new_text) in zip(old, new, strict=True):
        if old_text != new_text:
            old_label = "" if old_name == new_name else f"{old_name}, "
            yield f"input {new_name}: {old_label}{old_text} → {new_text}"


def load_manifest(output: Path) -> Manifest | None:
    """Read the manifest of an output; None if there is none. Raises ConfigError if it cannot be read."""
    path = manifest_path(output)
    way_out = f"start over with --overwrite, or name another output than {output} with -o"
    try:
        data = read_regular(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; {way_out}") from None
    try:
        manifest = msgspec.json.decode(data, type=Manifest)
    except RecursionError:
        raise ConfigError(f"{path} is damaged (nested too deeply); {way_out}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is damaged ({error}); {way_out}") from None
    if manifest.version != VERSION:
        raise ConfigError(f"{path} was written by another version of nvcli (format {manifest.version}); {way_out}")
    return manifest


def readable_manifest(output: Path) -> Manifest | None:
    """Return the manifest of an output; None if there is none, or it cannot be read."""
    try:
        return load_manifest(output)
    except ConfigError:
        return None


def save_manifest(output: Path, manifest: Manifest) -> None:
    """Write the manifest of an output. After a power loss there is the old or the new one. Raises OSError."""
    data = msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n"
    path = manifest_path(output)
    temporary = manifest_draft_path(output)
    with new_file(temporary) as file:
        file.write(data)
    temporary.replace(path)
    sync_folder(path.parent)


@contextlib.contextmanager
def new_file(path: Path, *, mode: int = 0o666) -> Iterator[BinaryIO]:
    """Create a file that is on disk when the `with` ends, and removed if an error comes. Raises OSError."""
    with create_anew(path, mode=mode) as file:
        try:
            yield file
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that new and renamed files in it outlast a power loss. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
