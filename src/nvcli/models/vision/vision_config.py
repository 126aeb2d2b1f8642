"""VisionConfig: the description of a vision tower, its tensors, and how config.json spells it. Torch-free.

One description serves the towers of Qwen2.5-VL (https://arxiv.org/abs/2502.13923), Qwen3-VL
(https://arxiv.org/abs/2511.21631) and Qwen 3.5. `tower.py` computes what it says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from nvcli.core.validation import show
from nvcli.models.json_file import JsonFile
from nvcli.models.rope_config import rope_section
from nvcli.models.tensor_spec import Sharding, StoredDtype, TensorSpec

TOWER = "visual"
"""The first part of the names of a tower's tensors."""
TOWER_PREFIXES = ("model.visual.", "visual.")
"""Prefixes of these names in newer and older files."""
_CHANNELS = 3
_SECTION = "vision_config"
_AXES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A tower of attention layers over the patches of an image, and the way of its results into the decoder."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int
    """Pixels of a patch's side."""
    temporal_patch_size: int
    """Frames of a patch; an image is repeated in all of them."""
    merge_size: int
    """Patches of the side of the square that becomes one token."""
    out_size: int
    """The hidden size of the decoder."""
    norm: Literal["rms", "layer"]
    activation: Literal["silu", "gelu_tanh"]
    is_gated: bool
    """Whether the MLP multiplies an activated gate with a second projection."""
    has_patch_bias: bool
    window_tokens: int = 0
    """Tokens of the side of the windows to which attention is limited; 0: there are none."""
    full_layers: tuple[int, ...] = ()
    """The layers that attend to the whole image where others have windows."""
    num_positions: int = 0
    """Entries of the table of learned positions, a square that is interpolated to the image's grid; 0: there is
    none."""
    deepstack_layers: tuple[int, ...] = ()
    """The layers whose results are merged, too, and added to the residual stream after the decoder's first layers."""
    axes: tuple[int, ...]
    """For each of the decoder's rotary frequencies, which of a token's positions turns it: 0 (time), 1 (height) or 2
    (width). Frequencies behind the last entry are turned by time."""
    image_token_id: int
    """The id that stands in the prompt for each token of an image."""

    @property
    def patch_values(self) -> int:
        """The numbers of a patch."""
        return _CHANNELS * self.temporal_patch_size * self.patch_size**2

    @property
    def token_pixels(self) -> int:
        """Pixels of the side of the square that becomes one token."""
        return self.patch_size * self.merge_size

    @property
    def num_outputs(self) -> int:
        """Vectors of `out_size` that a token gets: its embedding, and those of deepstack layers."""
        return 1 + len(self.deepstack_layers)

    def tensors(self, dtype: StoredDtype) -> Iterator[TensorSpec]:
        """Yield the tensors, which every rank holds whole."""

        def tensor(name: str, *shape: int) -> TensorSpec:
            name = f"{TOWER}.{name}"
            return TensorSpec(name=name, shape=shape, sharding=Sharding.REPLICATED, dtype=dtype, part="vision")

        def linear(name: str, out: int, columns: int) -> Iterator[TensorSpec]:
            yield tensor(f"{name}.weight", out, columns)
            yield tensor(f"{name}.bias", out)

        def norm(name: str, size: int) -> Iterator[TensorSpec]:
            yield tensor(f"{name}.weight", size)
            if self.norm == "layer":
                yield tensor(f"{name}.bias", size)

        hidden, inner, merged = self.hidden_size, self.intermediate_size, self.hidden_size * self.merge_size**2
        patch = _CHANNELS, self.temporal_patch_size, self.patch_size, self.patch_size
        yield tensor("patch_embed.proj.weight", hidden, *patch)
        if self.has_patch_bias:
            yield tensor("patch_embed.proj.bias", hidden)
        if self.num_positions:
            yield tensor("pos_embed.weight", self.num_positions, hidden)
        up, down = self.mlp_names
        for number in range(self.depth):
            block = f"blocks.{number}"
            yield from norm(f"{block}.norm1", hidden)
            yield from norm(f"{block}.norm2", hidden)
            yield from linear(f"{block}.attn.qkv", 3 * hidden, hidden)
            yield from linear(f"{block}.attn.proj", hidden, hidden)
            for name in up:
                yield from linear(f"{block}.mlp.{name}", inner, hidden)
            yield from linear(f"{block}.mlp.{down}", hidden, inner)
        mergers = ["merger", *(f"deepstack_merger_list.{number}" for number in range(len(self.deepstack_layers)))]
        norm_name, first, second = self.merger_names
        for number, merger in enumerate(mergers):
            yield from norm(f"{merger}.{norm_name}", merged if number else hidden)
            yield from linear(f"{merger}.{first}", merged, merged)
            yield from linear(f"{merger}.{second}", self.out_size, merged)

    @property
    def mlp_names(self) -> tuple[tuple[str, ...], str]:
        """The names of an MLP's projections: those from the hidden size, and that back to it."""
        return (("gate_proj", "up_proj"), "down_proj") if self.is_gated else (("linear_fc1",), "linear_fc2")

    @property
    def merger_names(self) -> tuple[str, str, str]:
        """The names of a merger's norm and of its two projections."""
        return ("ln_q", "mlp.0", "mlp.2") if self.is_gated else ("norm", "linear_fc1", "linear_fc2")


def read_qwen2_5_vision(config: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Qwen2.5-VL: windows, and RMS norms. `config` is the whole file, `text` its settings of the
    decoder."""
    vision = _section(config)
    activation = vision.get("hidden_act", str, "silu")
    if activation != "silu":
        raise vision.error("hidden_act", f"{show(activation)} is not supported; supported: silu")
    patch, merge = vision.positive("patch_size"), _merge_size(vision)
    window = vision.positive("window_size") if vision.values.get("window_size") is not None else 112
    if window % (patch * merge):
        raise vision.error("window_size", f"{window} is not a multiple of {patch * merge}, the pixels of a token")
    return VisionConfig(
        norm="rms",
        activation="silu",
        is_gated=True,
        has_patch_bias=False,
        window_tokens=window // patch // merge,
        full_layers=_layers(vision, "fullatt_block_indexes", (7, 15, 23, 31)),
        **_sizes(config, vision, text, _axes(text, (16, 24, 24), is_interleaved=False)),
    )


def read_qwen3_5_vision(config: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Qwen 3.5, which is Qwen3-VL's without deepstack."""
    return read_qwen3_vision(config, text, sections=(11, 11, 10))


def read_qwen3_vision(
    config: JsonFile, text: JsonFile, *, sections: tuple[int, int, int] = (24, 20, 20)
) -> VisionConfig:
    """Read the tower of Qwen3-VL: learned positions, layer norms and deepstack. `sections` is the default of
    `mrope_section`."""
    vision = _section(config)
    activation = vision.get("hidden_act", str, "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        raise vision.error("hidden_act", f"{show(activation)} is not supported; supported: gelu_pytorch_tanh")
    num_positions = vision.positive("num_position_embeddings")
    if round(num_positions**0.5) ** 2 != num_positions:
        raise vision.error("num_position_embeddings", f"{num_positions:,} is not the area of a square")
    deep = _layers(vision, "deepstack_visual_indexes", ())
    if len(deep) >= (num_layers := text.positive("num_hidden_layers")):
        raise vision.error("deepstack_visual_indexes", f"has {len(deep)} layers, and the decoder only {num_layers}")
    return VisionConfig(
        norm="layer",
        activation="gelu_tanh",
        is_gated=False,
        has_patch_bias=True,
        num_positions=num_positions,
        deepstack_layers=deep,
        **_sizes(config, vision, text, _axes(text, sections, is_interleaved=True)),
    )


def _section(config: JsonFile) -> JsonFile:
    values = config.values.get(_SECTION)
    if not isinstance(values, dict):
        raise config.error(_SECTION, f"{show(values)} is not an object")
    return config.with_values(values, f"{_SECTION}.")


def _merge_size(vision: JsonFile) -> int:
    return vision.positive("spatial_merge_size") if vision.values.get("spatial_merge_size") is not None else 2


def _sizes(config: JsonFile, vision: JsonFile, text: JsonFile, axes: tuple[int, ...]) -> dict[str, Any]:
    """Read what all towers have."""
    hidden, heads = vision.positive("hidden_size"), vision.positive("num_heads")
    if hidden % (4 * heads):
        raise vision.error("hidden_size", f"{hidden} is not a multiple of 4 × {heads} heads")
    channels = vision.get("in_channels", int, vision.get("in_chans", int, _CHANNELS))
    if channels != _CHANNELS:
        raise vision.error("in_channels", f"{channels} is not supported; supported: {_CHANNELS}")
    temporal = vision.values.get("temporal_patch_size")
    if vision.positive("out_hidden_size") != text.positive("hidden_size"):
        raise vision.error("out_hidden_size", f"is not the decoder's hidden size, {text.positive('hidden_size')}")
    return {
        "axes": axes,
        "depth": vision.positive("depth"),
        "hidden_size": hidden,
        "intermediate_size": vision.positive("intermediate_size"),
        "num_heads": heads,
        "patch_size": vision.positive("patch_size"),
        "temporal_patch_size": 2 if temporal is None else vision.positive("temporal_patch_size"),
        "merge_size": _merge_size(vision),
        "out_size": vision.positive("out_hidden_size"),
        "image_token_id": config.get("image_token_id", int),
    }


def _layers(vision: JsonFile, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Read a list of layer numbers."""
    value = vision.values.get(key)
    if value is None:
        return default
    depth = vision.positive("depth")
    if not isinstance(value, list) or not all(isinstance(n, int) and 0 <= n < depth for n in value):
        raise vision.error(key, f"{show(value)} is not a list of layers of {depth}")
    return tuple(value)


def _axes(text: JsonFile, default: tuple[int, int, int], *, is_interleaved: bool) -> tuple[int, ...]:
    """Read `mrope_section`, the numbers of frequencies for time, height and width: one behind the other, or those of
    height and width at every third place (`recomposition_frequencies` in transformers)."""
    rope = rope_section(text)
    sections = rope.values.get("mrope_section", list(default))
    whole = isinstance(sections, list) and len(sections) == _AXES
    if not whole or not all(isinstance(n, int) and n >= 0 for n in sections):
        raise rope.error("mrope_section", f"{show(sections)} is not a list of {_AXES} numbers of frequencies")
    if not is_interleaved:
        return tuple(axis for axis, count in enumerate(sections) for _ in range(count))
    axes = [0] * sum(sections)
    for axis in (1, 2):
        for place in range(axis, min(sections[axis] * _AXES, len(axes)), _AXES):
            axes[place] = axis
    return tuple(axes)
