"""Quantisation: what config.json says of a quantised checkpoint, whatever tool made it. Torch-free.

Which tensors are quantised, and how large their groups are, is told by the tensors themselves (`stored_weights.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from nvcli.core.validation import show
from nvcli.models.json_file import JsonFile

_KEYS = ("quantization_config", "compression_config")
_FORMATS = "fp8, fbgemm_fp8, compressed-tensors, modelopt (FP8), awq and gptq"
_WORD_SIZES = (2, 4, 8)
"""Sizes of codes of which a word of 32 bits holds a whole number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How the linear layers of a checkpoint are stored."""

    method: str
    """`quant_method` of config.json."""
    numbers: Literal["fp8", "integer", "mxfp4"]
    bits: int
    weight_block: tuple[int, int] | None = None
    """(rows, columns) of a weight that share a scale, where config.json says it."""
    group_size: int | None = None
    """How many columns of a row share a scale, where integers have one for less than a row."""
    words: Literal["gptq", "awq", "compressed"] = "compressed"
    """How codes are packed into words, where they are."""
    zero_offset: int = 0
    """What is added to the zeros of words."""
    needed: tuple[str, ...] = ()
    """The tensors that each weight's integers have beside them as config.json says, by the ends of their names: without
    them the codes stand for other numbers."""
    left_alone: tuple[str, ...] = ()
    """Patterns of the layers that are not quantised (`module_names.py`)."""

    @property
    def has_column_order(self) -> bool:
        """Whether the columns of a group do not follow each other (act-order)."""
        return any(name.endswith("g_idx") for name in self.needed)

    @property
    def name(self) -> str:
        """The name of the format, for people."""
        if self.numbers == "mxfp4":
            return "MXFP4"
        if self.numbers == "fp8":
            rows, columns = self.weight_block or (0, 0)
            return f"FP8, a scale for each {rows}×{columns} weights" if rows else "FP8"
        return f"{self.method}, {self.bits} bits"


def read_quantisation(config: JsonFile, text: JsonFile, methods: tuple[str, ...] = ()) -> Quantisation | None:
    """Read how a checkpoint is quantised, from config.json or its section for text; None: not at all.

    `methods` are those that the model's family decodes by itself, and the only ones that it has: MXFP4. Raises
    LoadError that names the method, for those that are not supported.
    """
    file, key = next(
        ((file, key) for file in (config, text) for key in _KEYS if file.values.get(key)), (config, _KEYS[0])
    )
    found = file.values.get(key)
    if not found:
        return None
    method = found.get("quant_method") if isinstance(found, dict) else found
    if method in methods:
        return Quantisation(method="mxfp4", numbers="mxfp4", bits=4)
    reader = _READERS.get(method) if isinstance(method, str) and not methods else None
    if reader is None:
        raise file.error(key, f"quantised weights ({show(method)}) are not supported{_instead(method)}")
    assert isinstance(found, dict)
    return reader(file.with_values(found, f"{file.section}{key}."))


def _instead(method: object) -> str:
    """Return the way out for a method that is not supported."""
    plain = "use the model's bfloat16 or float16 checkpoint"
    if method == "bitsandbytes":
        return f": they are made when a model is loaded; {plain}, with `quantization: fp8` for half the memory"
    return f"; {plain}, or one quantised with {_FORMATS}"


def _read_fp8(config: JsonFile) -> Quantisation:
    """Read transformers' FP8: DeepSeek's and Qwen's blocks, or one scale for each tensor or row."""
    found = config.values.get("weight_block_size")
    block = None if found is None else _read_block(config, "weight_block_size")
    fmt = config.get("fmt", str, "e4m3")
    if fmt != "e4m3":
        raise config.error("fmt", f"{show(fmt)} is not supported, only e4m3")
    return Quantisation(
        method="fp8",
        numbers="fp8",
        bits=8,
        weight_block=block,
        left_alone=_read_names(config, "modules_to_not_convert"),
    )


def _read_fbgemm(config: JsonFile) -> Quantisation:
    names = _read_names(config, "modules_to_not_convert")
    return Quantisation(method="fbgemm_fp8", numbers="fp8", bits=8, left_alone=names)


def _read_modelopt(config: JsonFile) -> Quantisation:
    algorithm = config.get("quant_algo", str)
    if algorithm != "FP8":
        raise config.error("quant_algo", f"{show(algorithm)} is not supported, only FP8; {_instead(algorithm)[2:]}")
    names = (*_read_names(config, "ignore"), *_read_names(config, "exclude_modules"))
    return Quantisation(method="modelopt", numbers="fp8", bits=8, left_alone=names)


def _read_awq(config: JsonFile) -> Quantisation:
    key = next((key for key in ("version", "format") if config.values.get(key) is not None), "version")
    version = config.get(key, str, "gemm").lower()
    if version != "gemm":
        raise config.error(key, f"{show(version)} is not supported, only gemm")
    bits = _read_bits(config, "bits", (4,))
    names = _read_names(config, "modules_to_not_convert")
    return Quantisation(
        method="awq",
        numbers="integer",
        bits=bits,
        group_size=_read_group_size(config, 128),
        words="awq",
        needed=("qzeros",) if config.get("zero_point", bool, True) else (),
        left_alone=names,
    )


def _read_gptq(config: JsonFile) -> Quantisation:
    """Read GPTQ. The first version of its files holds zeros less one."""
    version = config.get("checkpoint_format", str, "gptq").lower()
    if version not in ("gptq", "gptq_v2"):
        raise config.error("checkpoint_format", f"{show(version)} is not supported, only gptq and gptq_v2")
    group_size = _read_group_size(config, 128)
    needed = () if config.get("sym", bool, True) else ("qzeros",)
    if config.get("desc_act", bool, False) and group_size is not None:
        needed = (*needed, "g_idx")
    return Quantisation(
        method="gptq",
        numbers="integer",
        bits=_read_bits(config, "bits", _WORD_SIZES),
        group_size=group_size,
        words="gptq",
        needed=needed,
        zero_offset=1 if version == "gptq" else 0,
        left_alone=(*_read_names(config, "modules_to_not_convert"), *_read_passed_over(config)),
    )


def _read_passed_over(config: JsonFile) -> tuple[str, ...]:
    """Read the patterns of layers that GPTQModel was told to pass over: those behind `-:` in `dynamic`."""
    found = config.values.get("dynamic") or {}
    if not isinstance(found, dict):
        raise config.error("dynamic", f"{show(found)} is not an object")
    return tuple(f"re:{name[2:]}" for name in found if name.startswith("-:"))


def _read_compressed(config: JsonFile) -> Quantisation:
    """Read compressed-tensors. All groups of layers must have weights of one kind; those of activations may differ, and
    do not matter."""
    groups = config.values.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise config.error("config_groups", f"{show(groups)} describes no weights")
    kinds = {
        _read_group(config.with_values(group, f"{config.section}config_groups.{name}."))
        for name, group in groups.items()
        if isinstance(group, dict)
    }
    if len(kinds) != 1:
        raise config.error("config_groups", f"{len(kinds)} kinds of weights; supported: one")
    return replace(kinds.pop(), left_alone=_read_names(config, "ignore"))


def _read_group(group: JsonFile) -> Quantisation:
    """Read how the weights of one group of layers are stored."""
    found = group.values.get("weights")
    if not isinstance(found, dict):
        raise group.error("weights", f"{show(found)} does not describe weights")
    weights = group.with_values(found, f"{group.section}weights.")
    kind = weights.get("type", str, "int")
    if kind not in ("float", "int"):
        raise weights.error("type", f"{show(kind)} is not supported, only float and int")
    bits = _read_bits(weights, "num_bits", (8,) if kind == "float" else _WORD_SIZES)
    block = _read_block(weights, "block_structure") if found.get("strategy") == "block" else None
    group_size = _read_group_size(weights, None)
    needed: tuple[str, ...] = ()
    if kind == "int":
        needed = () if weights.get("symmetric", bool, True) else ("weight_zero_point",)
        if found.get("actorder") in ("group", "dynamic", True):
            needed = (*needed, "weight_g_idx")
    return Quantisation(
        method="compressed-tensors",
        numbers="fp8" if kind == "float" else "integer",
        bits=bits,
        weight_block=block,
        group_size=group_size,
        needed=needed,
    )


def _read_group_size(config: JsonFile, default: int | None) -> int | None:
    """Read `group_size`; None, or -1 in the files, stands for whole rows."""
    if config.values.get("group_size") is None:
        return default
    return None if config.values["group_size"] == -1 else config.positive("group_size")


def _read_block(config: JsonFile, key: str) -> tuple[int, int]:
    found: Any = config.values.get(key)
    if isinstance(found, str):  # as older files spell it: 128x128
        found = [int(size) if size.isdecimal() and len(size) < 9 else None for size in found.split("x")]
    if not (isinstance(found, list) and len(found) == 2 and all(type(size) is int and size > 0 for size in found)):
        raise config.error(key, f"{show(config.values.get(key))} is not a pair of sizes such as [128, 128]")
    return found[0], found[1]


def _read_bits(config: JsonFile, key: str, allowed: tuple[int, ...]) -> int:
    bits = config.positive(key)
    if bits not in allowed:
        raise config.error(key, f"{bits} bits are not supported here, only {' and '.join(map(str, allowed))}")
    return bits


def _read_names(config: JsonFile, key: str) -> tuple[str, ...]:
    names = config.values.get(key)
    if names is None:
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise config.error(key, f"{show(names)} is not a list of names")
    return tuple(names)


_READERS: Mapping[str, Callable[[JsonFile], Quantisation]] = {
    "fp8": _read_fp8,
    "fbgemm_fp8": _read_fbgemm,
    "modelopt": _read_modelopt,
    "awq": _read_awq,
    "gptq": _read_gptq,
    "compressed-tensors": _read_compressed,
}
