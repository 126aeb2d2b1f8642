"""The towers of GLM-4.1V to GLM-4.6V (https://arxiv.org/abs/2507.01006) and GLM-OCR, as config.json spells them.
Torch-free."""

from __future__ import annotations

from typing import Any

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import (
    head_sizes,
    only,
    or_default,
    read_axes,
    rope_theta,
    side_of,
    vision_section,
)

_NAMES = TowerNames(
    prefixes=(("visual.downsample.", f"{TOWER}.merger.downsample."), ("visual.", f"{TOWER}.")),
    renamed=(
        ("embeddings.position_embedding.", "pos_embed."),
        ("post_conv_layernorm.", "first_norm."),
        ("post_layernorm.", "last_norm."),
        ("post_projection_norm.", "norm."),
    ),
)
_SECTIONS = (8, 12, 12)
_MERGER_EPS = 1e-5


def read_glm4v_vision(config: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of GLM-4.1V to GLM-4.6V, with learned positions."""
    vision = vision_section(config)
    return VisionConfig(
        intermediate_size=vision.positive("out_hidden_size"),  # as in transformers
        merger=_merger(vision.positive("intermediate_size")),
        qkv_bias=vision.get("attention_bias", bool, False),
        out_bias=False,
        mlp_bias=False,
        has_first_norm=True,
        num_positions=(side_of(vision, "image_size", 336) // vision.positive("patch_size")) ** 2,
        interpolation="bicubic",
        **_sizes(config, vision, text),
    )


def read_glm_ocr_vision(config: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of GLM-OCR, with normed queries and keys."""
    vision = vision_section(config)
    bias = vision.get("attention_bias", bool, True)
    return VisionConfig(
        intermediate_size=vision.positive("intermediate_size"),
        merger=_merger(3 * vision.positive("out_hidden_size")),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        qk_norm="head",
        **_sizes(config, vision, text),
    )


def _merger(size: int) -> MergerConfig:
    return MergerConfig(kind="gated", size=size, has_bias=False, eps=_MERGER_EPS)


def _sizes(config: JsonFile, vision: JsonFile, text: JsonFile) -> dict[str, Any]:
    """Read what these towers have in common."""
    only(vision, "hidden_act", "silu")
    hidden, heads = head_sizes(vision, "num_heads")
    if vision.positive("out_hidden_size") != text.positive("hidden_size"):
        raise vision.error("out_hidden_size", f"is not the decoder's hidden size, {text.positive('hidden_size')}")
    return {
        "names": _NAMES,
        "processor": "glm46v",
        "depth": vision.positive("depth"),
        "hidden_size": hidden,
        "num_heads": heads,
        "patch_size": vision.positive("patch_size"),
        "temporal_patch_size": or_default(vision, "temporal_patch_size", 2),
        "merge_size": or_default(vision, "spatial_merge_size", 2),
        "out_size": vision.positive("out_hidden_size"),
        "norm": "rms",
        "eps": vision.positive_number("rms_norm_eps", 1e-5),
        "activation": "silu",
        "is_gated": True,
        "has_patch_bias": True,
        "has_last_norm": True,
        "rope": "same",
        "rope_theta": rope_theta(vision),
        "axes": read_axes(text, _SECTIONS, is_interleaved=False),
        "image_token_id": config.get("image_token_id", int),
    }
