"""Sources of the configuration: a YAML file, `--set key=value` and flags, where later ones take precedence.

A source collects plain values and remembers which file and line, or which flag, set each key. It does not know
what keys mean; `config.py` gives the values their types and looks up here where a wrong one came from.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import yaml

from nvcli.core.system.regular_file import read_regular
from nvcli.core.validation import Path as KeyPath
from nvcli.core.validation import is_text, join_path, shorten, show
from nvcli.errors import ConfigError

_SECTIONS = ("sampling", "speculation", "job", "score", "embed")
"""Keys that hold keys."""


class ConfigSource:
    """Values by key, with the origin of each."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._origins: dict[KeyPath, str] = {}
        self._flags: dict[KeyPath, str] = {}
        """Key → flag, without the value, for keys that a flag set."""

    def add_file(self, path: Path) -> None:
        """Add a file. Raises ConfigError if it cannot be read, is not YAML, repeats a key or is not a mapping."""
        try:
            text = _read(path).decode("utf-8-sig")
        except OSError as error:
            raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from None
        self._origins[()] = str(path)
        try:
            loader = _Loader(text)
        except yaml.YAMLError as error:  # control characters
            raise ConfigError(f"{path}: not valid YAML: {error}") from None
        try:
            root = loader.get_single_node()
            if root is None:
                return  # empty, or nothing but comments
            if not isinstance(root, yaml.MappingNode):
                raise ConfigError(f"{path}:{_line(root)}: expected keys with values, such as `max_num_seqs: 64`")
            for key_path, line in _walk(root, path):
                self._origins[key_path] = f"{path}:{line}"
            values = loader.construct_document(root)
            # A section may be empty, such as one whose keys are all comments.
            self.values = {key: value for key, value in values.items() if value is not None or key not in _SECTIONS}
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = f"{path}:{mark.line + 1}" if mark else str(path)
            problem = " ".join(part for part in (error.context, error.problem) if part)
            raise ConfigError(f"{place}: not valid YAML: {problem}") from None
        except _MISREAD as error:
            raise ConfigError(f"{path}: not valid YAML: {error}") from None
        finally:
            loader.dispose()

    def add_override(self, text: str, option: str = "--set") -> None:
        """Add one `key=value` of an option; a dot leads into a section, and the value is parsed as YAML."""
        key, equals, value_text = text.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            raise ConfigError(f"{option} {text}: expected key=value, such as `{option} sampling.temperature=0`")
        try:
            value = yaml.load(value_text, _Loader)
        except _MISREAD:
            raise ConfigError(f"{option} {text}: the value is not valid YAML; quote text: '{key}=\"…\"'") from None
        self._put(path, value, f"{option} {text}", flag=option)

    def add_flag(self, flag: str, key: str, value: Any) -> None:
        """Add a flag that is short for a key, as in `add_flag("--tp", "tensor_parallel_size", 2)`.

        A flag that may be repeated has a list for its value.
        """
        items = value if isinstance(value, list) else [value]
        origin = " ".join(f"{flag} {item if isinstance(item, str) else show(item)}" for item in items)
        if not is_text(origin):
            raise ConfigError(f"{origin}: not UTF-8 text")
        path = tuple(key.split("."))
        lost = next((old for old in self._flags if old[: len(path)] == path != old), None)
        if lost is not None:
            raise ConfigError(
                f"{origin}: sets `{key}` as a whole, and {self._origins[lost]} would be lost; set its parts alone "
                f"(--set {key}.…), or leave one of the two out"
            )
        self._put(path, value, origin, flag=flag)

    def add_setting(self, key: str, value: Any) -> None:
        """Add a setting of a Python program, as in `add_setting("block_size", 128)`.

        A mapping for a section overrides its keys one by one.
        """
        origin = f"{key}={show(value)}"
        if isinstance(value, Mapping) and key in _SECTIONS:
            for name, inner in value.items():
                self._put((key, str(name)), inner, origin, flag=key)
        else:
            self._put((key,), value, origin, flag=key)

    def origin(self, path: KeyPath) -> str:
        """Return the file and line, or the flag with its value, that set a value, a part of it or its section.

        Empty for a default.
        """
        around = self._set_path(path)
        parts = [] if around == path else [key for key in self._origins if key[: len(path)] == path]
        return self._origins.get(parts[-1] if parts else around, "")  # () is the whole file, if there is one

    def setter(self, path: KeyPath) -> str | None:
        """Return the file and line, or the flag without its value, that set a key; None for a default."""
        values: Any = self.values
        for step in path:
            if not isinstance(values, dict) or step not in values:
                return None
            values = values[step]
        return self._flags.get(self._set_path(path)) or self.origin(path)

    def _set_path(self, path: KeyPath) -> KeyPath:
        """Return the path of the value that was set, which may be the section around the value at `path`."""
        while path and path not in self._origins:
            path = path[:-1]
        return path

    def _put(self, path: tuple[str, ...], value: Any, origin: str, *, flag: str) -> None:
        section = self.values
        for depth, name in enumerate(path[:-1], 1):
            inner = section.get(name)
            if inner is None:
                inner = {}
            elif not isinstance(inner, dict):
                outer = ".".join(path[:depth])
                raise ConfigError(f"{origin}: `{outer}` is {show(inner)}, not a section with keys of its own")
            section[name] = dict(inner)
            section = section[name]
        section[path[-1]] = value
        self._origins = {old: text for old, text in self._origins.items() if old[: len(path)] != path}
        self._flags = {old: text for old, text in self._flags.items() if old[: len(path)] != path}
        self._origins[path] = origin
        self._flags[path] = flag


def json_object(flag: str, text: str, *, example: str) -> dict[str, Any]:
    """Parse a flag's JSON object. Raises ConfigError for any other text."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        raise ConfigError(
            f"{flag} {shorten(text)}: expected a JSON object in quotes, such as {flag} '{example}'"
        ) from None


_MAX_FILE_BYTES = 4 << 20
_MAX_VALUES = 100_000
"""Maximum values in a configuration, with aliases expanded: nested aliases let a short text stand for more values than
any memory holds."""
_STREAMS = (Path("/dev/fd"), Path("/proc/self/fd"))
"""Folders of files that are open already, such as the pipe of `--config <(command)`."""


def _read(path: Path) -> bytes:
    """Read a configuration file, a pipe that the shell has opened, or /dev/null. Raises OSError for anything else."""
    if path == Path(os.devnull):
        return b""
    if (path.parent in _STREAMS or path == Path("/dev/stdin")) and path.is_fifo():
        with path.open("rb") as pipe:
            text = pipe.read(_MAX_FILE_BYTES + 1)
        if len(text) > _MAX_FILE_BYTES:
            raise OSError(errno.EFBIG, f"more than {_MAX_FILE_BYTES:,} bytes")
        return text
    return read_regular(path, most_bytes=_MAX_FILE_BYTES)


_MISREAD = (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError)
"""Errors of PyYAML for text that is not YAML, or whose tag (`!!bool x`) does not fit its value."""
_INTEGER = "tag:yaml.org,2002:int"
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
"""An integer in base 8, as YAML 1.1 reads it."""


class _Loader(yaml.SafeLoader):
    """Loader of YAML's safe subset, with numbers, true and false as in YAML 1.2 and JSON, and no key but texts and
    integers.

    Without sets, dates and lone surrogates.
    """

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _count_values(node, {}) > _MAX_VALUES:
            problem = f"more than {_MAX_VALUES:,} values, counting what each alias stands for"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return node

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _INTEGER:
                key.tag = self.DEFAULT_SCALAR_TAG

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and not is_text(value):
            raise yaml.constructor.ConstructorError(None, None, "half of a surrogate pair", node.start_mark)
        return value


def _refuse_set(loader: _Loader, node: yaml.Node) -> NoReturn:
    raise yaml.constructor.ConstructorError(None, None, "a set, which no key accepts", node.start_mark)


def _read_number(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """Leave `010` and `1:30`, which are 8 and 90 in YAML 1.1 alone, as text, as `08` is.

    Keys for numbers then refuse them.
    """
    if ":" in node.value or _OCTAL.fullmatch(node.value):
        return node.value
    return yaml.SafeLoader.yaml_constructors[node.tag](loader, node)


def _read_boolean(loader: _Loader, node: yaml.ScalarNode) -> Any:
    """Leave yes, no, on and off, which are true and false in YAML 1.1 alone, as text: a schema's `enum: [yes, no]` and
    answers to choose from mean these words. Keys for true and false then refuse them."""
    if node.value.lower() in ("yes", "no", "on", "off"):
        return node.value
    return yaml.SafeLoader.yaml_constructors[node.tag](loader, node)


def _read_date(loader: _Loader, node: yaml.ScalarNode) -> Any:
    return loader.construct_scalar(node)


_Loader.add_constructor("tag:yaml.org,2002:set", _refuse_set)
_Loader.add_constructor(_INTEGER, _read_number)
_Loader.add_constructor("tag:yaml.org,2002:float", _read_number)
_Loader.add_constructor("tag:yaml.org,2002:bool", _read_boolean)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _read_date)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def _count_values(node: yaml.Node, counted: dict[int, int]) -> int:
    """Count a node and all below it, with aliases expanded. `counted`: the counts so far, by `id` of the node."""
    if id(node) not in counted:
        counted[id(node)] = 0  # a recursive alias counts nothing
        inner: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            inner = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            inner = node.value
        counted[id(node)] = 1 + sum(_count_values(part, counted) for part in inner)
    return counted[id(node)]


def _walk(
    node: yaml.Node, file: Path, under: KeyPath = (), seen: frozenset[int] = frozenset()
) -> Iterator[tuple[KeyPath, int]]:
    """Yield the path and line of each key and of each item of a list. Raises ConfigError for a duplicate key."""
    lines: dict[str, int] = {}
    seen |= {id(node)}
    if isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield (*under, number), _line(item)
            if id(item) in seen:
                raise ConfigError(f"{file}:{_line(item)}: the alias leads back to a list that holds it")
            yield from _walk(item, file, (*under, number), seen)
    for key_node, value_node in node.value if isinstance(node, yaml.MappingNode) else ():
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{file}:{_line(key_node)}: a key must be a plain word")
        key = key_node.value
        path = (*under, key)
        if key in lines:
            raise ConfigError(
                f"{file}:{_line(key_node)}: the key `{join_path(path)}` is given twice, "
                f"first in line {lines[key]}; remove one"
            )
        lines[key] = _line(key_node)
        yield path, lines[key]
        if id(value_node) in seen:
            raise ConfigError(f"{file}:{lines[key]}: the alias of `{key}` leads back to a mapping that holds it")
        yield from _walk(value_node, file, path, seen)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
