"""The towers of Qwen2-VL (https://arxiv.org/abs/2409.12191), Qwen2.5-VL (https://arxiv.org/abs/2502.13923), EXAONE 4.5,
HyperCLOVA X, Qwen3-VL (https://arxiv.org/abs/2511.21631), Cohere Compass, Qwen 3.5, Qwen2.5-Omni and Qwen3-Omni, as
config.json spells them. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig, deep_outputs
from nvcli.models.vision.vision_file import image_token, layer_list, read_axes, read_sizes, square

_PREFIXES = (("visual.", f"{TOWER}."),)
_ROPES, _SECTION = "rope_parameters", "mrope_section"
_HYPERCLOVAX_PREFIXES = (
    ("vision_model.", f"{TOWER}."),
    ("vision_projector.", f"{TOWER}.merger.projector."),
    ("projector.", f"{TOWER}.merger.projector."),
)
"""Published names, and those of transformers."""
_QWEN2 = TowerNames(
    prefixes=_PREFIXES,
    renamed=(
        (".mlp.fc", ".mlp.linear_fc"),
        (".ln_q.", ".norm."),
        (".mlp.0.", ".linear_fc1."),
        (".mlp.2.", ".linear_fc2."),
        ("merger_list.", "deepstack_merger_list."),
        *((f".attn.{part}.", f".attn.{part}_proj.") for part in "qkv"),
    ),
)
"""The names of all but Qwen3-VL and Qwen 3.5."""


def read_qwen2_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Qwen2-VL, whose `hidden_size` is the decoder's."""
    vision.only(hidden_act="quick_gelu")
    size = vision.positive("embed_dim")
    same = vision.replacing(
        hidden_size=size,
        intermediate_size=size * vision.positive("mlp_ratio", 4),
        out_hidden_size=vision.positive("hidden_size"),
    )
    return VisionConfig(
        names=_QWEN2,
        activation="quick_gelu",
        has_patch_bias=False,
        axes=read_axes(text, (16, 24, 24)),
        **_sizes(config, same, text, "layer"),
    )


def read_exaone4_5_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of EXAONE 4.5, which is Qwen2.5-VL's with fewer heads of keys and values. Tokens have one
    position."""
    num_kv_heads, heads = vision.positive("num_key_value_heads", 8), vision.positive("num_heads")
    if heads % num_kv_heads:
        raise vision.error("num_key_value_heads", f"{num_kv_heads} does not divide {heads} heads")
    return replace(read_qwen2_5_vision(config, vision, text), num_kv_heads=num_kv_heads, axes=())


def read_hyperclovax_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of HyperCLOVA X, which is Qwen2.5-VL's with another projection behind it. Tokens have one
    position."""
    config = config.with_defaults({"image_token_id": 128_060})
    found = read_qwen2_5_vision(config, vision.replacing(out_hidden_size=None), text)
    merger = replace(found.merger, result_size=vision.positive("out_hidden_size"))
    return replace(found, axes=(), merger=merger, names=replace(_QWEN2, prefixes=_HYPERCLOVAX_PREFIXES))


def read_qwen2_5_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Qwen2.5-VL: windows, and RMS norms."""
    vision.only(hidden_act="silu")
    patch, merge = vision.positive("patch_size"), vision.positive("spatial_merge_size", 2)
    window = vision.positive("window_size", 112)
    if window % (patch * merge):
        raise vision.error("window_size", f"{window} is not a multiple of {patch * merge}, the pixels of a token")
    return VisionConfig(
        names=_QWEN2,
        norm="rms",
        activation="silu",
        is_gated=True,
        has_patch_bias=False,
        window_tokens=window // patch // merge,
        full_layers=layer_list(vision, "fullatt_block_indexes", (7, 15, 23, 31)),
        axes=read_axes(text, (16, 24, 24)),
        **_sizes(config, vision, text, "rms"),
    )


def read_qwen2_5_omni_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Qwen2.5-Omni, which is Qwen2.5-VL's."""
    return read_qwen2_5_vision(config.replacing(image_token_id=image_token(config, 151_655)), vision, text)


def read_qwen3_omni_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Qwen3-Omni, which is Qwen3-VL's with other names."""
    return replace(read_qwen3_vision(config, vision, text), names=_QWEN2)


def read_qwen3_5_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Qwen 3.5, which is Qwen3-VL's without deepstack."""
    return read_qwen3_vision(config, vision, text, sections=(11, 11, 10))


def read_compass_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Cohere Compass, which is Qwen3-VL's. The decoder's kinds of layers that rotate have the same
    axes."""
    ropes = text.object(_ROPES)
    rotating = [ropes.object(kind) for kind, rope in ropes.values.items() if rope is not None]
    sections = [rope.values.get(_SECTION) for rope in rotating]
    if any(section != sections[0] for section in sections):
        raise rotating[-1].error(_SECTION, f"{show(sections[-1])} is not that of the other layers, {show(sections[0])}")
    same = text.replacing(**{_ROPES: {_SECTION: sections[0]} if sections else {}})
    return read_qwen3_vision(config.with_defaults({"image_token_id": 255_031}), vision, same)


def read_qwen3_vision(
    config: JsonFile, vision: JsonFile, text: JsonFile, *, sections: tuple[int, int, int] = (24, 20, 20)
) -> VisionConfig:
    """Read the tower of Qwen3-VL: learned positions, layer norms and deepstack. `sections` is the default of
    `mrope_section`."""
    vision.only(hidden_act="gelu_pytorch_tanh")
    num_positions = vision.positive("num_position_embeddings")
    square(vision, "num_position_embeddings", num_positions)
    deep = layer_list(vision, "deepstack_visual_indexes", ())
    if len(deep) >= (num_layers := text.positive("num_hidden_layers")):
        raise vision.error("deepstack_visual_indexes", f"has {len(deep)} layers, and the decoder only {num_layers}")
    return VisionConfig(
        names=TowerNames(prefixes=_PREFIXES),
        activation="gelu_tanh",
        num_positions=num_positions,
        deepstack=deep_outputs(deep),
        axes=read_axes(text, sections, is_interleaved=True),
        **_sizes(config, vision, text, "layer"),
    )


def _sizes(config: JsonFile, vision: JsonFile, text: JsonFile, norm: Literal["rms", "layer"]) -> dict[str, Any]:
    """Read what these towers have in common."""
    sizes = read_sizes(vision, text, depth="depth", heads="num_heads")
    merge = vision.positive("spatial_merge_size", 2)
    return {
        **sizes,
        "processor": "qwen2_vl",
        "temporal_patch_size": vision.positive("temporal_patch_size", 2),
        "merge_size": merge,
        "merger": MergerConfig(kind="squares", size=sizes["hidden_size"] * merge**2, norm=norm),
        "rope": "same",
        "image_token_id": config.get("image_token_id", int),
    }
