"""RopeConfig: the settings of rotary position embeddings, and how config.json spells them. Torch-free."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from nvcli.core.validation import show
from nvcli.models.json_file import JsonFile

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional"]

LEARNED_FREQUENCIES = "model.rotary_emb.alpha"
"""The name of the numbers that change frequencies (`RopeConfig.is_learned`)."""
_ALIASES = {"su": "longrope", "mrope": "default"}
"""Older names. For text, the three positions of multimodal rope are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding. Fields that a rope type does not use keep their defaults."""

    rope_type: RopeType
    theta: float
    partial_rotary_factor: float = 1.0
    """The fraction of each head that is rotated; for type `proportional`, the fraction of its frequencies that are not
    0."""
    is_interleaved: bool = False
    """Whether neighbouring dimensions of a head are rotated as pairs; otherwise dimension i is paired with i + half the
    number of rotated dimensions."""
    is_learned: bool = False
    """Whether each frequency is multiplied by e to the power of a number in the checkpoint."""
    turns_back: bool = False
    """Whether heads are turned the other way: by the negative of each angle."""
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """The context length before llama3, yarn or longrope stretched it."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    """For longrope, the divisor of each frequency in runs of up to `original_max_position_embeddings` tokens."""
    long_factors: tuple[float, ...] = ()
    """The same for runs of longer sequences."""
    attention_factor: float = 1.0
    """The factor on cosines and sines of yarn and longrope; derived by transformers' rule if the file does not give
    it."""
    long_attention_factor: float = 1.0
    """For longrope, that factor in runs of longer sequences."""

    def rotary_dim(self, head_dim: int) -> int:
        """Return the number of a head's dimensions that are rotated, which is even."""
        return head_dim if self.rope_type == "proportional" else int(head_dim * self.partial_rotary_factor)

    def for_head(self, turned: int, head_dim: int) -> RopeConfig:
        """Return the same rotation of `turned` dimensions, of a head that has `head_dim`."""
        part = turned / head_dim
        part = part if int(head_dim * part) == turned else math.nextafter(part, math.inf)
        return replace(self, partial_rotary_factor=part)

    def row_order(self, head_dim: int) -> tuple[int, ...] | None:
        """Return the order of a head's dimensions in which dimension i is paired with i + head_dim / 2; None: as they
        are.

        Scores do not change when the dimensions of queries and keys are permuted alike, so ranks keep their projections
        in this order, and one rotation serves all.
        """
        half, turned = head_dim // 2, self.rotary_dim(head_dim)
        if not self.is_interleaved and not self.turns_back and turned == head_dim:
            return None
        if self.is_interleaved:
            first, second = range(0, turned, 2), range(1, turned, 2)
        else:
            first, second = range(turned // 2), range(turned // 2, turned)
        if self.turns_back:  # (a, b) turned back is (b, a) turned
            first, second = second, first
        middle = turned + half - turned // 2
        return *first, *range(turned, middle), *second, *range(middle, head_dim)


def read_rope(
    config: JsonFile,
    *,
    head_dim: int,
    default_theta: float | None,
    layer_type: str = "full_attention",
    is_interleaved: bool = False,
    default_partial: float = 1.0,
) -> RopeConfig:
    """Read the rope settings of config.json, as old and new versions of transformers write them.

    transformers 5 has everything in `rope_parameters`, for some families by layer type. Before, `rope_theta` was at the
    top level, and the rest, if any, in `rope_scaling`. `default_theta` is used if the file has no theta; if it is None,
    a missing theta is a LoadError. `default_partial` is the default of `partial_rotary_factor`.
    """
    rope = rope_section(config, layer_type)
    rope_type = rope.get("rope_type", str, rope.get("type", str, "default"))
    rope_type = _ALIASES.get(rope_type, rope_type)
    settings: dict[str, Any] = {
        "theta": rope.positive_number("rope_theta", default_theta),
        "partial_rotary_factor": _partial(rope, config, default_partial, head_dim),
        "is_interleaved": is_interleaved,
    }
    if rope_type == "proportional":
        return RopeConfig(rope_type="proportional", factor=rope.positive_number("factor", 1.0), **settings)
    _check_even(rope, int(head_dim * settings["partial_rotary_factor"]))
    if rope_type == "default":
        return RopeConfig(rope_type="default", **settings)
    if rope_type in ("linear", "dynamic"):
        return RopeConfig(rope_type=rope_type, factor=rope.positive_number("factor"), **settings)  # type: ignore[arg-type]
    if rope_type not in ("llama3", "yarn", "longrope"):
        raise rope.error("rope_type", f"{show(rope_type)} is not supported; supported: {', '.join(get_args(RopeType))}")

    max_positions = config.positive("max_position_embeddings")
    top_level = config.values.get("original_max_position_embeddings")
    found = top_level if top_level is not None else rope.values.get("original_max_position_embeddings", max_positions)
    rope = rope.replacing(original_max_position_embeddings=found)
    original = rope.positive("original_max_position_embeddings")
    settings["original_max_position_embeddings"] = original
    if rope_type == "llama3":
        return RopeConfig(rope_type="llama3", **settings, **_llama3_settings(rope))
    if rope_type == "longrope":
        rotary_dim = int(head_dim * settings["partial_rotary_factor"])
        return RopeConfig(rope_type="longrope", **settings, **_longrope_settings(rope, rotary_dim, max_positions))
    if settings["theta"] == 1.0:
        raise rope.error("rope_theta", f"{show(settings['theta'])} is no base for YaRN, which divides by its logarithm")
    factor = rope.positive_number("factor", max_positions / original)
    return RopeConfig(
        rope_type="yarn",
        factor=factor,
        beta_fast=_beta(rope, "beta_fast", 32.0),
        beta_slow=_beta(rope, "beta_slow", 1.0),
        truncate=rope.get("truncate", bool, True),
        attention_factor=_yarn_attention_factor(rope, factor),
        **settings,
    )


def rope_section(config: JsonFile, layer_type: str = "full_attention") -> JsonFile:
    """Return the settings of a layer type, including `rope_theta`, wherever the file has it."""
    key = "rope_scaling" if config.values.get("rope_scaling") else "rope_parameters"
    found = config.values.get(key) or {}
    if not isinstance(found, dict):
        raise config.error(key, f"{show(found)} is not an object")
    section = f"{config.section}{key}."
    if any(isinstance(value, dict) for value in found.values()):  # by layer type
        section += f"{layer_type}." if isinstance(found.get(layer_type), dict) else ""
        nested = found.get(layer_type)
        found = nested if isinstance(nested, dict) else {}
    values = {name: value for name, value in found.items() if value is not None}
    if "rope_theta" in config.values:
        values.setdefault("rope_theta", config.values["rope_theta"])
    return config.with_values(values, section)


def _partial(rope: JsonFile, config: JsonFile, default: float, head_dim: int) -> float:
    key = "partial_rotary_factor"
    file = rope if rope.has(key) else config
    partial = file.positive_number(key, default)
    if partial > 1.0 or int(head_dim * partial) < 2:
        raise file.error(key, f"{show(partial)} of {head_dim} dimensions cannot be rotated; allowed: up to 1.0")
    return partial


def _check_even(rope: JsonFile, rotary_dim: int) -> None:
    if rotary_dim % 2:
        raise rope.error("partial_rotary_factor", f"{rotary_dim} dimensions of a head are rotated, an odd number")


def _llama3_settings(rope: JsonFile) -> dict[str, Any]:
    low, high = rope.positive_number("low_freq_factor"), rope.positive_number("high_freq_factor")
    if low > high:
        raise rope.error("high_freq_factor", f"{high:g} is below `low_freq_factor`, which is {low:g}")
    return {"factor": rope.positive_number("factor"), "low_freq_factor": low, "high_freq_factor": high}


def _longrope_settings(rope: JsonFile, rotary_dim: int, max_positions: int) -> dict[str, Any]:
    original = rope.positive("original_max_position_embeddings", least=2)
    factor = rope.positive_number("factor", max_positions / original)
    derived = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    attention_factor = rope.positive_number("attention_factor", derived)
    return {
        "factor": factor,
        "short_factors": _factors(rope, "short_factor", rotary_dim // 2),
        "long_factors": _factors(rope, "long_factor", rotary_dim // 2),
        "attention_factor": rope.positive_number("short_mscale", attention_factor),
        "long_attention_factor": rope.positive_number("long_mscale", attention_factor),
    }


def _factors(rope: JsonFile, key: str, count: int) -> tuple[float, ...]:
    values = rope.values.get(key)
    if not isinstance(values, list):
        raise rope.error(key, "missing" if values is None else f"{show(values)} is not a list of numbers")
    if len(values) != count:
        raise rope.error(key, f"has {len(values)} numbers, but {count} frequencies are rotated")
    numbers = rope.with_values({str(i): value for i, value in enumerate(values)}, f"{rope.section}{key}.")
    return tuple(numbers.positive_number(str(i)) for i in range(count))


def _beta(rope: JsonFile, key: str, default: float) -> float:
    """Return the value of `key`, which must be above zero, or `default` if it is absent or 0, as in transformers."""
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
