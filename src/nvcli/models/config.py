"""ModelConfig: what nvcli needs to know of a checkpoint, read from config.json and generation_config.json.

The one place that knows how transformers' versions spell these files. Torch-free and cheap to import. Everything that
cannot be served is refused here, by name, before any process is started or weight is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from nvcli.errors import ConfigError, LoadError
from nvcli.models.registry import ARCHITECTURES

RopeType = Literal["default", "linear", "llama3", "yarn"]
CheckpointDtype = Literal["float32", "bfloat16", "float16"]

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
_QWEN3_WINDOW, _QWEN3_MAX_WINDOW_LAYERS = 4096, 28
"""What transformers takes for `sliding_window` and `max_window_layers` where they are absent."""
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")

T = TypeVar("T", int, float, bool, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Fields that a rope type does not use keep their defaults."""

    rope_type: RopeType
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """llama3, yarn: the context length before it was stretched."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    yarn_attention_factor: float = 1.0
    """On cosines and sines, as transformers derives it where the file does not give it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shapes and settings of a decoder-only model, of the whole model, not of one rank."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    rope: RopeConfig
    max_position_embeddings: int
    dtype: CheckpointDtype
    """What the weights are stored in, or meant to be used in."""
    eos_token_ids: tuple[int, ...]
    """Of both files, each once."""
    generation_defaults: Mapping[str, Any]
    """Sampling defaults of generation_config.json, under `SamplingParams`' names; see `_generation_defaults`. Not
    checked: a run may do without them (`generation_config: none`)."""

    def check_tensor_parallel(self, size: int) -> None:
        """Raise ConfigError where the model cannot be cut over `size` ranks."""
        problems = []
        if self.num_heads % size:
            problems.append(f"{self.num_heads} attention heads do not divide by {size}")
        if self.num_kv_heads % size and size % self.num_kv_heads:
            problems.append(f"{self.num_kv_heads} KV heads neither divide by {size} nor divide it")
        if self.intermediate_size % size:
            problems.append(f"intermediate size {self.intermediate_size} does not divide by {size}")
        if problems:
            possible = [n for n in range(1, 17) if self.divides_by(n)]
            raise ConfigError(
                f"tensor_parallel_size {size} does not fit this model: {'; '.join(problems)}. "
                f"Possible: {', '.join(map(str, possible))}"
            )

    def check_pipeline_parallel(self, size: int) -> None:
        """Raise ConfigError where the model has fewer layers than stages."""
        if size > self.num_layers:
            raise ConfigError(
                f"pipeline_parallel_size (--pp) is {size}, and this model has {self.num_layers} layers, of which each "
                f"stage needs one: lower it to {self.num_layers} or less"
            )

    def divides_by(self, size: int) -> bool:
        """Whether the model can be cut over `size` ranks."""
        kv_fits = self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0
        return kv_fits and self.num_heads % size == 0 and self.intermediate_size % size == 0


def load_model_config(path: Path) -> ModelConfig:
    """Read the config files of a checkpoint folder. Raises LoadError that names the file and the key."""
    config = _JsonFile.read(path / CONFIG_FILE)
    generation = _JsonFile.read_if_present(path / GENERATION_CONFIG_FILE)
    architecture = _architecture(config)
    _refuse_unsupported(config)
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        num_layers=config.positive("num_hidden_layers"),
        num_heads=config.positive("num_attention_heads"),
        num_kv_heads=_num_kv_heads(config),
        head_dim=_head_dim(config),
        intermediate_size=config.positive("intermediate_size"),
        rms_norm_eps=config.get("rms_norm_eps", float),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        attention_bias=config.get("attention_bias", bool, False),
        rope=_rope(config),
        max_position_embeddings=config.positive("max_position_embeddings"),
        dtype=_dtype(config),
        eos_token_ids=_eos_token_ids(generation, config),
        generation_defaults=_generation_defaults(generation),
    )


class _JsonFile:
    """A JSON object that remembers where it came from, for messages."""

    def __init__(self, path: Path, values: Mapping[str, Any], section: str = "") -> None:
        self.path = path
        self.values = values
        self.section = section

    @classmethod
    def read(cls, path: Path) -> _JsonFile:
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise LoadError(
                f"{path}: no such file; a model is a folder in Hugging Face layout (config.json, weights, tokenizer)"
            ) from None
        except OSError as error:
            raise LoadError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:  # bad JSON or bad UTF-8
            raise LoadError(f"{path}: not valid JSON ({error}); download the file again") from None
        if not isinstance(values, dict):
            raise LoadError(f"{path}: holds a {type(values).__name__} where a JSON object belongs")
        return cls(path, values)

    @classmethod
    def read_if_present(cls, path: Path) -> _JsonFile:
        return cls.read(path) if path.exists() else cls(path, {})

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of `key`; where it is absent or null, `default`, or an error without one."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise self.error(key, "missing")
            return default
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if kind is float and is_number:
            value = float(value)
        if not isinstance(value, kind) or (kind is int and not is_number):
            raise self.error(key, f"{value!r} is not of type {kind.__name__}")
        return value

    def positive(self, key: str) -> int:
        value = self.get(key, int)
        if value <= 0:
            raise self.error(key, f"{value} is not positive")
        return value

    def error(self, key: str, problem: str) -> LoadError:
        return LoadError(f"{self.path}: `{self.section}{key}`: {problem}")


def _architecture(config: _JsonFile) -> str:
    names = config.values.get("architectures") or []
    if not isinstance(names, list) or not names:
        raise config.error("architectures", f"{names!r} names no architecture")
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    raise config.error("architectures", f"{names[0]} is not supported; supported: {', '.join(sorted(ARCHITECTURES))}")


def _refuse_unsupported(config: _JsonFile) -> None:
    values = config.values
    quantization = values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise config.error(
            "quantization_config",
            f"quantised weights ({method}) are not supported; use the model's bfloat16 or float16 checkpoint",
        )
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise config.error("hidden_act", f"{activation!r} is not supported; supported: silu")
    layer_types = values.get("layer_types")
    if isinstance(layer_types, list):
        if others := sorted({str(t) for t in layer_types} - {"full_attention"}):
            raise config.error("layer_types", f"{', '.join(others)} is not supported, only full attention")
    elif values.get("use_sliding_window"):
        window = values.get("sliding_window", _QWEN3_WINDOW)
        first = values.get("max_window_layers", _QWEN3_MAX_WINDOW_LAYERS)
        has_window_layers = not isinstance(first, int) or first < config.positive("num_hidden_layers")
        if window is not None and has_window_layers:
            raise config.error(
                "use_sliding_window",
                f"sliding-window attention (window {window}) is not supported, only full attention",
            )


def _num_kv_heads(config: _JsonFile) -> int:
    num_heads = config.positive("num_attention_heads")
    if config.values.get("num_key_value_heads") is None:
        return num_heads
    num_kv_heads = config.positive("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} attention heads")
    return num_kv_heads


def _head_dim(config: _JsonFile) -> int:
    head_dim = config.positive("head_dim")  # not hidden_size / heads: Qwen3's differs, and its default is no guess
    if head_dim % 2:
        raise config.error("head_dim", f"{head_dim} is odd; rotary embedding pairs dimensions")
    return head_dim


def _dtype(config: _JsonFile) -> CheckpointDtype:
    key = "dtype" if config.values.get("dtype") is not None else "torch_dtype"  # the older name
    name = config.get(key, str, "float32").removeprefix("torch.")
    for dtype in get_args(CheckpointDtype):
        if name == dtype:
            return dtype  # type: ignore[no-any-return]
    raise config.error(key, f"{name!r} is not supported; supported: {', '.join(get_args(CheckpointDtype))}")


def _rope(config: _JsonFile) -> RopeConfig:
    """transformers 5 has everything in `rope_parameters`, for some families by layer type; before, `rope_theta` was at
    the top level and the rest, if any, in `rope_scaling`."""
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    found = config.values.get(key) or {}
    if not isinstance(found, dict):
        raise config.error(key, f"{found!r} is not an object")
    if isinstance(found.get("full_attention"), dict):
        found = found["full_attention"]
    values = {name: value for name, value in found.items() if value is not None}
    values.setdefault("rope_theta", config.values.get("rope_theta"))
    rope = _JsonFile(config.path, values, section=f"{key}.")

    partial = values.get("partial_rotary_factor", config.values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise rope.error("partial_rotary_factor", f"{partial} is not supported; supported: 1.0")
    rope_type = rope.get("rope_type", str, rope.get("type", str, "default"))
    theta = rope.get("rope_theta", float)
    if rope_type == "default":
        return RopeConfig(rope_type="default", theta=theta)
    if rope_type == "linear":
        return RopeConfig(rope_type="linear", theta=theta, factor=rope.get("factor", float))
    if rope_type not in ("llama3", "yarn"):
        raise rope.error("rope_type", f"{rope_type!r} is not supported; supported: {', '.join(get_args(RopeType))}")

    max_positions = config.positive("max_position_embeddings")
    top_level = config.values.get("original_max_position_embeddings")
    if top_level is not None:
        values["original_max_position_embeddings"] = top_level
    original = rope.get("original_max_position_embeddings", int, max_positions)
    if rope_type == "llama3":
        return RopeConfig(
            rope_type="llama3",
            theta=theta,
            factor=rope.get("factor", float),
            original_max_position_embeddings=original,
            low_freq_factor=rope.get("low_freq_factor", float),
            high_freq_factor=rope.get("high_freq_factor", float),
        )
    factor = rope.get("factor", float, max_positions / original)
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=rope.get("beta_fast", float, 32.0) or 32.0,
        beta_slow=rope.get("beta_slow", float, 1.0) or 1.0,
        truncate=rope.get("truncate", bool, True),
        yarn_attention_factor=_yarn_attention_factor(rope, factor),
    )


def _yarn_attention_factor(rope: _JsonFile, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in rope.values:
        return rope.get("attention_factor", float)
    numerator, denominator = rope.get("mscale", float, 0.0), rope.get("mscale_all_dim", float, 0.0)
    return mscale(numerator) / mscale(denominator) if numerator and denominator else mscale(1.0)


def _eos_token_ids(*files: _JsonFile) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for file in files:
        value = file.values.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise file.error("eos_token_id", f"{value!r} is not a token id or a list of them")
            ids[token] = None
    return tuple(ids)


def _generation_defaults(generation: _JsonFile) -> dict[str, Any]:
    """`do_sample: false` is a checkpoint's word that it wants greedy decoding, and its temperature is then moot. Where
    `do_sample` is absent, the keys that are present count, and nothing is said by those that are not: nvcli's own
    defaults apply, as in vLLM, and not transformers' (greedy, or top_k 50)."""
    values = generation.values
    greedy = values.get("do_sample") is False
    keys = ("repetition_penalty",) if greedy else _SAMPLING_KEYS
    defaults: dict[str, Any] = {"temperature": 0.0} if greedy else {}
    defaults.update({key: values[key] for key in keys if values.get(key) is not None})
    return defaults
