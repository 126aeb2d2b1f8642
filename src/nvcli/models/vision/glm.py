"""The towers of GLM-4.1V to GLM-4.6V (https://arxiv.org/abs/2507.01006), GLM-OCR and GLM-5.3, as config.json spells
them. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import read_axes, read_sizes, rope_theta, side_of

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


def read_glm4v_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of GLM-4.1V to GLM-4.6V, with learned positions."""
    sizes = _sizes(config, vision, text)
    merger = _merger(sizes.pop("intermediate_size"))
    return VisionConfig(
        intermediate_size=sizes["out_size"],  # as in transformers
        merger=merger,
        qkv_bias=vision.get("attention_bias", bool, False),
        out_bias=False,
        mlp_bias=False,
        has_first_norm=True,
        num_positions=(side_of(vision, "image_size", 336) // vision.positive("patch_size")) ** 2,
        interpolation="bicubic",
        **sizes,
    )


def read_glm_ocr_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of GLM-OCR, with normed queries and keys."""
    bias = vision.get("attention_bias", bool, True)
    return VisionConfig(
        merger=_merger(3 * text.positive("hidden_size")),
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        qk_norm="head",
        **_sizes(config, vision, text),
    )


def read_glm5_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of GLM-5.3, which is GLM-OCR's with clamped MLPs. Tokens have one position."""
    tower = read_glm_ocr_vision(config.with_defaults({"image_token_id": 154_854}), vision, text)
    size = vision.positive("projection_intermediate_size", 10_240)
    limit = vision.positive_number("swiglu_limit", 10.0)
    return replace(tower, processor="glm5_next", merger=_merger(size), limit=limit, axes=())


def _merger(size: int) -> MergerConfig:
    return MergerConfig(kind="gated", size=size, has_bias=False, eps=_MERGER_EPS)


def _sizes(config: JsonFile, vision: JsonFile, text: JsonFile) -> dict[str, Any]:
    """Read what these towers have in common."""
    vision.only(hidden_act="silu")
    return {
        **read_sizes(vision, text, depth="depth", heads="num_heads"),
        "names": _NAMES,
        "processor": "glm46v",
        "temporal_patch_size": vision.positive("temporal_patch_size", 2),
        "merge_size": vision.positive("spatial_merge_size", 2),
        "norm": "rms",
        "eps": vision.positive_number("rms_norm_eps", 1e-5),
        "activation": "silu",
        "is_gated": True,
        "has_last_norm": True,
        "rope": "same",
        "rope_theta": rope_theta(vision),
        "axes": read_axes(text, _SECTIONS),
        "image_token_id": config.get("image_token_id", int),
    }
