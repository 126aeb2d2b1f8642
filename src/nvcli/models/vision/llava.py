"""The towers of LLaVA 1.5 (CLIP, https://arxiv.org/abs/2310.03744) and its relatives, as config.json spells them.
Torch-free.

The results of a tower's last layers are often not read. Each patch becomes a token. LLaVA-NeXT and LLaVA-OneVision see
the whole image and tiles, whose tokens stand in rows across all tiles, each with a learned vector at its end.
"""

from __future__ import annotations

from typing import Any, Literal

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.pixtral import read_pixtral_vision
from nvcli.models.vision.siglip import SQUARES
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import image_token, read_sizes, read_tiles

_PIXTRAL, _CLIP, _SIGLIP = "pixtral", "clip_vision_model", "siglip_vision_model"
_STRATEGIES = {_CLIP: "default", _SIGLIP: "full"}
"""Whether the class token, which only CLIP has, is left out."""
_MOST_DIGITS = 9
_RENAMED = (("embeddings.class_embedding", "cls_token.weight"), ("pre_layrnorm.", "first_norm."))
_ACTIVATIONS: dict[str, Literal["quick_gelu", "gelu", "gelu_tanh"]] = {
    "quick_gelu": "quick_gelu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def read_llava_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of LLaVA 1.5 or of a relative, such as Pixtral 12B."""
    if vision.get("model_type", str, _CLIP) == _PIXTRAL:
        config.only(vision_feature_layer=-1, vision_feature_select_strategy="full")
        return read_pixtral_vision(config, vision, text, _projector(config, text))
    return _read(config, vision, text, processor="clip")


def read_llava_next_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of LLaVA-NeXT."""
    return _read(config, vision, text, processor="llava_next", has_newlines=True)


def read_onevision_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of LLaVA-OneVision, which shows large images in fewer tokens."""
    ratio = config.get("vision_aspect_ratio", str, "anyres_max_9")
    most = ratio.removeprefix("anyres_max_")
    if not most.isdecimal() or len(most) > _MOST_DIGITS or not int(most):
        raise config.error("vision_aspect_ratio", f"{show(ratio)} is not supported; supported: anyres_max_9")
    return _read(
        config,
        vision,
        text,
        default_kind=_SIGLIP,
        default_layer=-1,
        default_strategy="full",
        processor="llava_onevision",
        has_newlines=True,
        most_tiles=int(most),
    )


def _read(
    config: JsonFile,
    vision: JsonFile,
    text: JsonFile,
    *,
    default_kind: str = _CLIP,
    default_layer: int = -2,
    default_strategy: str = "default",
    **settings: Any,
) -> VisionConfig:
    """Read CLIP's tower or SigLIP's. `settings` are other fields of `VisionConfig`."""
    kind = vision.choice("model_type", {name: name for name in _STRATEGIES}, default_kind)
    strategy = config.get("vision_feature_select_strategy", str, default_strategy)
    if strategy != _STRATEGIES[kind]:
        raise config.error("vision_feature_select_strategy", f"{show(strategy)} is not supported with {kind}")
    sizes, is_clip = read_sizes(vision, text), kind == _CLIP
    depth = sizes["depth"]
    chosen = config.get("vision_feature_layer", int, default_layer)
    num_read = chosen if chosen >= 0 else depth + 1 + chosen
    if not 0 < num_read <= depth:
        raise config.error("vision_feature_layer", f"{chosen} is none of the tower's {depth} layers")
    unread = tuple(f"{TOWER}.blocks.{number}." for number in range(num_read, depth))
    return VisionConfig(
        names=TowerNames(
            prefixes=(*SQUARES.prefixes, ("image_newline", f"{TOWER}.newline.weight")),
            renamed=(*_RENAMED, *SQUARES.renamed),
            left=(*SQUARES.left, f"{TOWER}.last_norm.", *unread),
        ),
        merger=_projector(config, text),
        eps=vision.positive_number("layer_norm_eps", 1e-5 if is_clip else 1e-6),
        activation=vision.choice("hidden_act", _ACTIVATIONS, "quick_gelu" if is_clip else "gelu_pytorch_tanh"),
        has_patch_bias=not is_clip,
        has_first_norm=is_clip,
        norms_positions=is_clip,
        has_class_token=is_clip,
        has_flat_class_token=is_clip,
        image_token_id=image_token(config, 32_000),
        **read_tiles(vision, sizes["patch_size"], default=336),
        **{**sizes, "depth": num_read},
        **settings,
    )


def _projector(config: JsonFile, text: JsonFile) -> MergerConfig:
    config.only(projector_hidden_act="gelu")
    return MergerConfig(
        kind="squares",
        size=text.positive("hidden_size"),
        has_norm=False,
        has_bias=config.get("multimodal_projector_bias", bool, True),
    )
