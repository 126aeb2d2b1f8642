"""The towers of InternVL 3 and 3.5 (InternViT, https://arxiv.org/abs/2504.10479) and of Qianfan-OCR, as config.json
spells them. Torch-free.

Images are cut into tiles, each of which the tower sees by itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.image_text import ImageText
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import MLP_NAMES, PREFIXES, read_sizes, read_tiles

_NAMES = TowerNames(
    prefixes=PREFIXES,
    renamed=(
        ("embeddings.cls_token", "cls_token.weight"),
        ("embeddings.position_embeddings", "pos_embed.weight"),
        ("embeddings.patch_embeddings.projection.", "patch_embed.proj."),
        ("encoder.layer.", "blocks."),
        (".layernorm_before.", ".norm1."),
        (".layernorm_after.", ".norm2."),
        (".attention.projection_layer.", ".attn.proj."),
        (".attention.", ".attn."),
        (".mlp.fc", ".mlp.linear_fc"),
        (".lambda_1", ".scale1.weight"),
        (".lambda_2", ".scale2.weight"),
        ("layernorm.", "last_norm."),
        ("layer_norm.", "norm."),
        *MLP_NAMES,
    ),
)
_QIANFAN = TowerNames(
    prefixes=(
        ("vision_model.", f"{TOWER}."),
        ("mlp1.0.", f"{TOWER}.merger.norm."),
        ("mlp1.1.", f"{TOWER}.merger.linear_fc1."),
        ("mlp1.3.", f"{TOWER}.merger.linear_fc2."),
    ),
    renamed=(
        ("embeddings.class_embedding", "cls_token.weight"),
        ("embeddings.position_embedding", "pos_embed.weight"),
        ("embeddings.patch_embedding.", "patch_embed.proj."),
        ("encoder.layers.", "blocks."),
        (".mlp.fc", ".mlp.linear_fc"),
        (".ls1", ".scale1.weight"),
        (".ls2", ".scale2.weight"),
    ),
)
_TEXT = ImageText(written="<IMG_CONTEXT>", token="<IMG_CONTEXT>", before="<img>", after="</img>")
_MERGE = 2
_NORMS: dict[str, Literal["rms", "layer"]] = {"layer_norm": "layer", "rms_norm": "rms"}


def read_qianfan_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Qianfan-OCR, which has names of its own."""
    tower = read_internvl_vision(config, vision, text, has_bias=True)
    return replace(tower, names=_QIANFAN, text=replace(_TEXT, written="<image>"))


def read_internvl_vision(config: JsonFile, vision: JsonFile, text: JsonFile, *, has_bias: bool = False) -> VisionConfig:
    """Read the tower of InternVL. `has_bias` is the default of `attention_bias`."""
    config.only(vision_feature_layer=-1, vision_feature_select_strategy="default", projector_hidden_act="gelu")
    config.only(downsample_ratio=1 / _MERGE)
    vision.only(hidden_act="gelu", use_mask_token=False, use_absolute_position_embeddings=True)
    sizes, norms_heads = read_sizes(vision, text), vision.get("use_qk_norm", bool, False)
    if norms_heads:
        vision.only(layer_norm_eps=1e-6)
    return VisionConfig(
        names=_NAMES,
        processor="got_ocr2",
        merger=MergerConfig(kind="squares", size=sizes["out_size"], norms_squares=True, eps=1e-5),
        norm=vision.choice("norm_type", _NORMS, "layer_norm"),
        eps=vision.positive_number("layer_norm_eps", 1e-6),
        activation="gelu",
        qkv_bias=vision.get("attention_bias", bool, has_bias),
        qk_norm="all" if norms_heads else None,
        has_layer_scales=True,
        has_last_norm=not vision.get("use_mean_pooling", bool, True),
        has_class_token=True,
        image_token_id=config.get("image_token_id", int, 151_667),
        text=_TEXT,
        **read_tiles(vision, sizes["patch_size"], _MERGE, default=448),
        **sizes,
    )
