"""RopeConfig: the settings of rotary position embeddings, and how config.json spells them. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from nvcli.models.json_file import JsonFile
from nvcli.validation import show

RopeType = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Fields that a rope type does not use keep their defaults."""

    rope_type: RopeType
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """The context length before llama3 or yarn stretched it."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    yarn_attention_factor: float = 1.0
    """The factor on cosines and sines; transformers' rule derives it where the file does not give it."""


def read_rope(config: JsonFile, *, default_theta: float | None) -> RopeConfig:
    """Read the rope settings of config.json, as old and new versions of transformers write them.

    transformers 5 has everything in `rope_parameters`, for some families by layer type. Before, `rope_theta` was at the
    top level, and the rest, if any, in `rope_scaling`. `default_theta` stands for a theta that the file does not give;
    where it is None too, that is a LoadError.
    """
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    found = config.values.get(key) or {}
    if not isinstance(found, dict):
        raise config.error(key, f"{show(found)} is not an object")
    if isinstance(found.get("full_attention"), dict):
        found = found["full_attention"]
    values = {name: value for name, value in found.items() if value is not None}
    values.setdefault("rope_theta", config.values.get("rope_theta"))
    rope = JsonFile(config.path, values, section=f"{key}.")

    partial = values.get("partial_rotary_factor", config.values.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise rope.error("partial_rotary_factor", f"{show(partial)} is not supported; supported: 1.0")
    rope_type = rope.get("rope_type", str, rope.get("type", str, "default"))
    theta = rope.positive_number("rope_theta", default_theta)
    if rope_type == "default":
        return RopeConfig(rope_type="default", theta=theta)
    if rope_type == "linear":
        return RopeConfig(rope_type="linear", theta=theta, factor=rope.positive_number("factor"))
    if rope_type not in ("llama3", "yarn"):
        raise rope.error("rope_type", f"{show(rope_type)} is not supported; supported: {', '.join(get_args(RopeType))}")

    max_positions = config.positive("max_position_embeddings")
    top_level = config.values.get("original_max_position_embeddings")
    if top_level is not None:
        values["original_max_position_embeddings"] = top_level
    values.setdefault("original_max_position_embeddings", max_positions)
    original = rope.positive("original_max_position_embeddings")
    if rope_type == "llama3":
        low, high = rope.positive_number("low_freq_factor"), rope.positive_number("high_freq_factor")
        if low >= high:
            raise rope.error("high_freq_factor", f"{high:g} is not above `low_freq_factor`, which is {low:g}")
        return RopeConfig(
            rope_type="llama3",
            theta=theta,
            factor=rope.positive_number("factor"),
            original_max_position_embeddings=original,
            low_freq_factor=low,
            high_freq_factor=high,
        )
    if theta == 1.0:
        raise rope.error("rope_theta", f"{show(theta)} is no base for YaRN, which divides by its logarithm")
    factor = rope.positive_number("factor", max_positions / original)
    return RopeConfig(
        rope_type="yarn",
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        beta_fast=_beta(rope, "beta_fast", 32.0),
        beta_slow=_beta(rope, "beta_slow", 1.0),
        truncate=rope.get("truncate", bool, True),
        yarn_attention_factor=_yarn_attention_factor(rope, factor),
    )


def _beta(rope: JsonFile, key: str, default: float) -> float:
    """The value of `key`, which must be above zero. Absent or 0, it is `default`, as in transformers."""
    return default if rope.get(key, float, default) == 0.0 else rope.positive_number(key, default)


def _yarn_attention_factor(rope: JsonFile, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if "attention_factor" in rope.values:
        return rope.positive_number("attention_factor")
    numerator, denominator = rope.get("mscale", float, 0.0), rope.get("mscale_all_dim", float, 0.0)
    if not numerator or not denominator:
        return mscale(1.0)
    if mscale(denominator) == 0.0:
        raise rope.error("mscale_all_dim", f"{show(denominator)} gives a factor of 0, by which YaRN divides")
    return mscale(numerator) / mscale(denominator)
