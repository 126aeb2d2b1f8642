"""Mutations of a checkpoint folder: each changes one thing of it at random, as damage, a mistake or malice might.

A mutation is given the folder and a random number generator, and says in a few words what it did. All know the files'
structure: they change keys, tensors and entries rather than random bytes, though some do that too.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzzing import load_data

Mutation = Callable[[Path, random.Random], str]

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
JSON_FILES = (CONFIG, GENERATION, TOKENIZER, TOKENIZER_CONFIG, INDEX, ADAPTER)
CANARY = "canary"
"""Code of the checkpoint that is run leaves a file of this name in its folder."""

_DATA = load_data("checkpoints")
_OTHER_KEYS: dict[str, list[str]] = _DATA["keys"]
"""Keys that a file may have too."""
_ROPES: list[dict[str, Any]] = _DATA["ropes"]
_ENTRY = {"dtype", "shape", "data_offsets"}
_EVIL = "import pathlib\npathlib.Path({canary!r}).touch()\nclass Evil:\n    pass\n"


def hostile_value(rng: random.Random) -> Any:
    """A value that a key was not made for."""
    depth = rng.choice([2, 200, 900])
    nested: Any = 0
    for _ in range(depth):
        nested = [nested]
    values: list[Any] = [
        *(None, True, False, 0, 1, -1, 2, 3, 7, 64, 1000, 2**31 - 1, 2**31, 2**32, 2**63, 2**64, 2**70, -(2**70)),
        *(4_000_000_000, 10**400, 0.5, -1.5, 1e-300, 1e308, float("nan"), float("inf"), float("-inf")),
        *("", "x", "32", "auto", "../../etc/passwd", "\ud800", "a\0b", "é" * 100_000, "Evil", "evil.Evil"),
        *([], [1], ["x", 1, None], [2**70], list(range(2000)), {}, {"a": 1}, {"": {}}, nested),
    ]
    return rng.choice(values)


def mutate_json(folder: Path, rng: random.Random) -> str:
    """Change a value, or add or remove a key, at any depth of one of the JSON files."""
    file, data = _read_some_json(folder, rng)
    if not isinstance(data, (dict, list)):
        return f"{file.name} left as it is"
    place, key = data, None
    trail: list[str] = []
    while isinstance(place, (dict, list)) and place:
        key = rng.choice(list(place)) if isinstance(place, dict) else rng.randrange(len(place))
        trail.append(str(key))
        inner = place[key]  # type: ignore[index]
        if not isinstance(inner, (dict, list)) or not inner or rng.random() < 0.4:
            break
        place = inner
    if key is None or rng.random() < 0.25:
        key = rng.choice([*_OTHER_KEYS[file.name], "x"])
        place, trail = data, [key]
    if not isinstance(place, dict) and isinstance(key, str):
        return f"{file.name} left as it is"
    if rng.random() < 0.15 and (isinstance(place, list) or key in place):
        del place[key]  # type: ignore[arg-type]
        what = "removed"
    else:
        value = rng.choice(_ROPES) if key in ("rope_scaling", "rope_parameters") else hostile_value(rng)
        if isinstance(value, dict) and value in _ROPES and rng.random() < 0.8:
            value = {**value, rng.choice(list(value)): hostile_value(rng)}
        place[key] = value  # type: ignore[index,call-overload]
        what = f"= {str(value)[:60]}"
    _write(file, json.dumps(data).encode())
    return f"{file.name}: {'.'.join(trail)[:80]} {what}"


def mutate_config(folder: Path, rng: random.Random) -> str:
    """Give a top-level key of config.json a hostile value: the file that most depends on."""
    file = folder / CONFIG
    data = _load(file)
    if not isinstance(data, dict):
        return f"{file.name} left as it is"
    key = rng.choice([*data, *_OTHER_KEYS[CONFIG], "architectures", "eos_token_id", "rope_parameters"])
    value = hostile_value(rng)
    if key == "architectures" and rng.random() < 0.7:
        value = rng.choice([[value], ["LlamaForCausalLM"], ["MistralForCausalLM"], ["Qwen2ForCausalLM"]])
    elif key in ("rope_parameters", "rope_scaling") and rng.random() < 0.8:
        rope = dict(rng.choice(_ROPES))
        value = {**rope, rng.choice(list(rope)): value}
    _write(file, json.dumps({**data, key: value}).encode())
    return f"config.json: {key} = {str(value)[:60]}"


def mutate_text(folder: Path, rng: random.Random) -> str:
    """Damage the text of a small file."""
    file = rng.choice([path for path in sorted(folder.iterdir()) if path.suffix in (".json", ".jinja")])
    text = _bytes_of(file)
    at = rng.randrange(len(text) + 1)
    texts = {
        "emptied": b"",
        "cut": text[:at],
        "doubled": text + text,
        "with garbage": text[:at] + rng.randbytes(20) + text[at:],
        "as UTF-16": text.decode(errors="replace").encode("utf-16"),
        "with a byte order mark": b"\xef\xbb\xbf" + text,
        "nested": rng.choice([b"[", b'{"a":']) * 100_000,
        "null": b"null",
        "a list": b"[" + text + b"]",
        "with a key twice": b'{"vocab_size": 7, ' + text.lstrip()[1:],
        "with long numbers": b'{"vocab_size": ' + b"9" * 5000 + b"}",
        "another file": _bytes_of(rng.choice(sorted(folder.iterdir())))[:100_000],
    }
    what = rng.choice(list(texts))
    _write(file, texts[what])
    return f"{file.name} {what}"


def _make_socket(path: Path) -> None:
    """Make a socket at a path of any length: `bind` itself takes no name of more than 107 bytes."""
    folder = os.open(path.parent, os.O_PATH)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def mutate_kind(folder: Path, rng: random.Random) -> str:
    """Take a file away, or put something else in its place that is no file."""
    file = rng.choice(sorted(path for path in folder.iterdir() if path.suffix != ".py"))
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink()
    kinds = ("absent", "a FIFO", "a socket", "a folder", "a dangling link", "a loop of links", "a device", "huge")
    kind = rng.choice(kinds)
    if kind == "a FIFO":
        os.mkfifo(file)
    elif kind == "a socket":
        _make_socket(file)
    elif kind == "a folder":
        file.mkdir()
    elif kind == "a dangling link":
        file.symlink_to("no-such-file")
    elif kind == "a loop of links":
        file.symlink_to(file.name)
    elif kind == "a device":
        file.symlink_to("/dev/zero")
    elif kind == "huge":
        with file.open("wb") as stream:
            stream.truncate(3 << 30)  # takes no room on the disk
    return f"{file.name}: {kind}"


def mutate_header(folder: Path, rng: random.Random) -> str:
    """Change the header of a safetensors file: an entry, a name, or the whole."""
    file = rng.choice(sorted(folder.glob("*.safetensors")) or [folder / "model.safetensors"])
    data = _bytes_of(file)
    length = int.from_bytes(data[:8], "little")
    header, body = _parse(data[8 : 8 + length]), data[8 + length :]
    entries = [name for name, entry in _items(header) if isinstance(entry, dict) and entry.keys() >= _ENTRY]
    if not entries:
        return f"{file.name} left as it is"
    name = rng.choice(entries)
    entry = header[name]
    kinds = ("key", "shape", "offsets", "dtype", "removed", "renamed", "surplus", "metadata", "deep", "not finite")
    kind = rng.choice(kinds)
    if kind == "key":
        entry[rng.choice(["dtype", "shape", "data_offsets", "x"])] = hostile_value(rng)
    elif kind == "shape":
        shape = entry["shape"]
        entry["shape"] = rng.choice([[], [0], shape[::-1], [*shape, 1], [2**70, 1], [-1], [1.5], ["3"]])
    elif kind == "offsets":
        begin, end = entry["data_offsets"]
        entry["data_offsets"] = rng.choice([[end, begin], [begin, end + 2], [begin + 1, end + 1], [0, 2**63], [0]])
    elif kind == "dtype":
        entry["dtype"] = rng.choice(["F16", "F32", "I16", "U8", "BOOL", "F8_E4M3", "bf16", "Z", "", 5])
    elif kind == "removed":
        del header[name]
    elif kind == "renamed":
        header[rng.choice(["", "x", "é" * 1000, name + " ", "lm_head.weight"])] = header.pop(name)
    elif kind == "surplus":
        header["x.weight"] = dict(entry)
    elif kind == "metadata":
        header["__metadata__"] = hostile_value(rng)
    text = json.dumps(header).encode()
    if kind == "deep":
        text = b'{"a":' * 50_000
    elif kind == "not finite":
        text = text.replace(str(entry["shape"][0]).encode(), b"NaN", 1) if entry["shape"] else text
    _write(file, struct.pack("<Q", len(text)) + text + body)
    return f"{file.name}: header of {name}: {kind}"


def mutate_body(folder: Path, rng: random.Random) -> str:
    """Damage a safetensors file without regard to its header."""
    file = rng.choice(sorted(folder.glob("*.safetensors")) or [folder / "model.safetensors"])
    data = bytearray(_bytes_of(file))
    kind = rng.choice(["cut", "cut in the header", "extended", "header length", "noise", "not finite", "emptied"])
    if kind == "cut":
        data = data[: rng.randrange(len(data) + 1)]
    elif kind == "cut in the header":
        data = data[: rng.randrange(100)]
    elif kind == "extended":
        data += bytes(rng.randrange(1, 1000))
    elif kind == "header length":
        length = rng.choice([0, 1, 2**64 - 1, 2**63, max(len(data) - 8, 0), len(data), 100_000_001, 7])
        data[:8] = struct.pack("<Q", length)
    elif kind in ("noise", "not finite") and len(data) > 40_000:
        at = rng.randrange(20_000, len(data) - 4000) & ~1
        data[at : at + 4000] = rng.randbytes(4000) if kind == "noise" else b"\xc0\x7f" * 2000
    elif kind == "emptied":
        data = bytearray()
    _write(file, bytes(data))
    return f"{file.name}: body {kind}"


def mutate_index(folder: Path, rng: random.Random) -> str:
    """Have the index say something else of a tensor."""
    index = _load(folder / INDEX)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        return "no index"
    name = rng.choice(list(weight_map))
    others = ("model-7.safetensors", "../x.safetensors", "/etc/passwd", "", ".", TOKENIZER, "a\0.safetensors", 5, None)
    file = rng.choice([*others, *weight_map.values()])
    if rng.random() < 0.2:
        weight_map["x.weight"] = file
    elif rng.random() < 0.2:
        del weight_map[name]
    else:
        weight_map[name] = file
    _write(folder / INDEX, json.dumps(index).encode())
    return f"index: {name} in {file!r}"


def mutate_template(folder: Path, rng: random.Random) -> str:
    """Write a chat template that reaches for what is not its own, or fails."""
    _write(folder / TEMPLATE, rng.choice(_DATA["templates"]).encode())
    return "chat template"


def plant_code(folder: Path, rng: random.Random) -> str:
    """Ask for code that comes with the checkpoint, in every way that libraries know."""
    _write(folder / "evil.py", _EVIL.format(canary=str(folder / CANARY)).encode())
    pickle = f"cposix\nsystem\n(S'touch {folder / CANARY}'\ntR.".encode()
    for name in ("pytorch_model.bin", "vocab.pkl"):
        _write(folder / name, pickle)
    maps = {"AutoTokenizer": ["evil.Evil", "evil.Evil"], "AutoConfig": "evil.Evil", "AutoModel": "evil.Evil"}
    classes = ("Evil", "EvilTokenizer", "LlamaTokenizer", "TransfoXLTokenizer")
    for name in (CONFIG, TOKENIZER_CONFIG):
        values = _load(folder / name)
        if not isinstance(values, dict):
            continue
        values.update(auto_map=maps, custom_generate="evil.py")
        if rng.random() < 0.7:
            values["tokenizer_class"] = rng.choice(classes)
        if name == CONFIG and rng.random() < 0.5:
            values["model_type"] = "evil"
        _write(folder / name, json.dumps(values).encode())
    return "code planted"


MUTATIONS: tuple[tuple[Mutation, int], ...] = (
    (mutate_json, 6),
    (mutate_config, 6),
    (mutate_text, 3),
    (mutate_kind, 3),
    (mutate_header, 4),
    (mutate_body, 2),
    (mutate_index, 2),
    (mutate_template, 1),
    (plant_code, 1),
)
"""Each mutation with how often it is drawn."""
OF_ADAPTERS: tuple[tuple[Mutation, int], ...] = (
    (mutate_json, 10),
    (mutate_text, 1),
    (mutate_kind, 2),
    (mutate_header, 4),
    (mutate_body, 2),
)
"""The mutations that there are of a LoRA adapter's folder."""


def mutate(folder: Path, rng: random.Random, mutations_of: tuple[tuple[Mutation, int], ...] = MUTATIONS) -> list[str]:
    """Mutate a checkpoint, or with `OF_ADAPTERS` an adapter, once to three times, and say how."""
    mutations, weights = zip(*mutations_of, strict=True)
    count = rng.choice([1, 1, 1, 2, 3])
    return [mutation(folder, rng) for mutation in rng.choices(mutations, weights, k=count)]


def _read_some_json(folder: Path, rng: random.Random) -> tuple[Path, Any]:
    file = rng.choice([folder / name for name in JSON_FILES if (folder / name).is_file()] or [folder / CONFIG])
    return file, _load(file)


def _items(value: Any) -> list[tuple[str, Any]]:
    return [*value.items()] if isinstance(value, dict) else []


def _load(file: Path) -> Any:
    """The value in a JSON file; None where it is none."""
    return _parse(_bytes_of(file))


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _bytes_of(file: Path) -> bytes:
    """The first bytes of a regular file; none of anything else."""
    if not file.is_file():
        return b""
    with file.open("rb") as stream:
        return stream.read(64 << 20)


def _write(file: Path, data: bytes) -> None:
    """Write a file anew, in the place of whatever is there."""
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    elif os.path.lexists(file):
        file.unlink()
    file.write_bytes(data)
