"""Reads what config.json says of vision towers in many families: sizes, lists and axes, with errors that name keys."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import Any

from nvcli.core.validation import show
from nvcli.models.json_file import JsonFile
from nvcli.models.rope_config import rope_section
from nvcli.models.vision.vision_config import CHANNELS, TOWER

PREFIXES = (("vision_tower.", f"{TOWER}."), ("multi_modal_projector.", f"{TOWER}.merger."))
"""`TowerNames.prefixes` of many families."""
MLP_NAMES = (("linear_1.", "linear_fc1."), ("linear_2.", "linear_fc2."))
"""The names of a merger's MLP in many families' files, and in the model."""

NO_BIASES: dict[str, Any] = dict.fromkeys(("has_patch_bias", "qkv_bias", "out_bias", "mlp_bias"), False)
"""The fields of towers without biases."""


def vision_section(config: JsonFile) -> JsonFile:
    """Return the section of the tower."""
    vision = config.object("vision_config")
    channels = vision.get("in_channels", int, vision.get("in_chans", int, vision.get("num_channels", int, CHANNELS)))
    if channels != CHANNELS:
        raise vision.error("in_channels", f"{channels} is not supported; supported: {CHANNELS}")
    return vision


def read_sizes(
    vision: JsonFile, text: JsonFile, *, depth: str = "num_hidden_layers", heads: str = "num_attention_heads"
) -> dict[str, Any]:
    """Read the fields of `VisionConfig` that are sizes in all towers: `depth` and `heads` are keys. The sizes of heads
    must be multiples of 4."""
    hidden, num_heads, out = vision.positive("hidden_size"), vision.positive(heads), text.positive("hidden_size")
    if hidden % (4 * num_heads):
        raise vision.error("hidden_size", f"{hidden} is not a multiple of 4 × {num_heads} heads")
    if vision.positive("out_hidden_size", out) != out:
        raise vision.error("out_hidden_size", f"is not the decoder's hidden size, {out}")
    return {
        "depth": vision.positive(depth),
        "hidden_size": hidden,
        "intermediate_size": vision.positive("intermediate_size"),
        "num_heads": num_heads,
        "patch_size": side_of(vision, "patch_size", 14),
        "out_size": out,
    }


def image_token(config: JsonFile, default: int) -> int:
    """Read the id that stands in the prompt for each token of an image, which older files have under another key."""
    return config.get("image_token_id" if config.has("image_token_id") else "image_token_index", int, default)


def side_of(vision: JsonFile, key: str, default: int) -> int:
    """Read the side of a square in pixels: a number, or a list of two equal ones. It may be absent."""
    value = vision.values.get(key)
    if isinstance(value, list):
        if len(value) != 2 or value[0] != value[1]:
            raise vision.error(key, f"{show(value)} is not a square")
        vision = vision.replacing(**{key: value[0]})
    return vision.positive(key, default)


def read_tiles(vision: JsonFile, patch: int, merge: int = 1, *, default: int) -> dict[str, Any]:
    """Read the fields of towers whose images are squares of one size, with a learned position for each patch. `patch`:
    pixels of its side; `merge`: patches of a token's side; `default`: pixels of an image's side. Raises LoadError if
    tokens do not fill the patches."""
    image = side_of(vision, "image_size", default)
    side = image // patch
    if not side or side % merge:
        raise vision.error("image_size", f"{image} has {side} × {side} patches, which {merge} × {merge} do not divide")
    return {"merge_size": merge, "tile_tokens": side // merge, "num_positions": side**2}


def rope_theta(vision: JsonFile, default: float = 10_000.0) -> float:
    """Read the base of the tower's rotary positions."""
    rope = vision.values.get("rope_parameters")
    found = vision.with_values(rope, f"{vision.section}rope_parameters.") if isinstance(rope, dict) else vision
    return found.positive_number("rope_theta", default)


def layer_kinds(vision: JsonFile, kinds: tuple[str, str], default: Sequence[str]) -> Sequence[str]:
    """Read `layer_types`, which of two kinds each layer is, or `default` if it is absent."""
    found, count = vision.values.get("layer_types"), len(default)
    if found is None:
        return default
    if not isinstance(found, list) or len(found) != count or any(kind not in kinds for kind in found):
        raise vision.error("layer_types", f"{show(found)} is not a list of {' and '.join(kinds)} for {count} layers")
    return found


def square(file: JsonFile, key: str, value: int) -> int:
    """Return the side of a square with this area. Raises LoadError if it is none."""
    side = isqrt(value)
    if side**2 != value:
        raise file.error(key, f"{value:,} is not the area of a square")
    return side


def layer_list(vision: JsonFile, key: str, default: tuple[int, ...], *, depth: str = "depth") -> tuple[int, ...]:
    """Read a list of different layer numbers. `depth`: the key of the number of layers."""
    count, value = vision.positive(depth), vision.values.get(key)
    found = list(default) if value is None else value
    whole = isinstance(found, list) and all(type(n) is int and 0 <= n < count for n in found)
    if not whole or len({*found}) != len(found):
        given = "missing, and its default " if value is None else ""
        raise vision.error(key, f"{given}{show(found)} is not a list of different layers of {count}")
    return tuple(found)


def read_axes(
    text: JsonFile, default: tuple[int, ...], *, is_interleaved: bool = False, order: tuple[int, ...] = (0, 1, 2)
) -> tuple[int, ...]:
    """Read `mrope_section`, the numbers of frequencies for each axis of `order`: one after the other, or those of
    height and width at every third place (`recomposition_frequencies` in transformers)."""
    rope = rope_section(text)
    key = "xdrope_section" if rope.has("xdrope_section") else "mrope_section"
    sections, num_axes = rope.values.get(key, list(default)), len(order)
    whole = isinstance(sections, list) and len(sections) == num_axes
    if not whole or not all(isinstance(n, int) and n >= 0 for n in sections):
        raise rope.error(key, f"{show(sections)} is not a list of {num_axes} numbers of frequencies")
    if not is_interleaved:
        return tuple(axis for axis, count in zip(order, sections, strict=True) for _ in range(count))
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for place in range(axis, min(sections[axis] * num_axes, len(axes)), num_axes):
            axes[place] = axis
    return tuple(axes)
