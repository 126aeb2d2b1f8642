"""The tower of Nemotron 3 Omni (C-RADIO, https://arxiv.org/abs/2412.07679), as config.json spells it. Torch-free.

Images are of any size. Registers are attended to with their patches. The scales of layers that transformers writes into
its files are 1, and left there.
"""

from __future__ import annotations

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.image_text import ImageText
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import read_sizes

_PREFIXES = (
    ("vision_model.radio_model.model.", f"{TOWER}."),
    ("vision_model.radio_model.", f"{TOWER}."),
    ("vision_projector.vision_final_layernorm.", f"{TOWER}.last_norm."),
    ("vision_final_layernorm.", f"{TOWER}.last_norm."),
    ("mlp1.0.", f"{TOWER}.merger.norm."),
    ("mlp1.1.", f"{TOWER}.merger.linear_fc1."),
    ("mlp1.3.", f"{TOWER}.merger.linear_fc2."),
)
_RENAMED = (
    ("patch_generator.embedder.", "patch_embed.proj."),
    ("patch_generator.pos_embed", "pos_embed.weight"),
    ("patch_generator.cls_token.token", "registers.weight"),
    (".mlp.fc", ".mlp.linear_fc"),
)
_LEFT = tuple(f"{TOWER}.{name}" for name in ("input_conditioner.", "summary_idxs", "patch_generator.video_embedder."))
_TEXT = ImageText(written="<image>", token="<image>", before="<img>", after="</img>")
_DEFAULTS = {
    "hidden_size": 1280,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "patch_size": 16,
    "max_img_size": 2048,
    "num_cls_tokens": 3,
    "num_registers": 7,
}
"""Keys that files leave out."""
_MERGE = 2


def read_radio_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of Nemotron 3 Omni, which has a last norm if the decoder has layers that draft."""
    config.only(downsample_ratio=1 / _MERGE)
    vision = vision.with_defaults(_DEFAULTS)
    vision.only(hidden_act="gelu", use_swiglu_ffn=False)
    inner = int(vision.positive("hidden_size") * vision.positive_number("mlp_ratio", 4.0))
    sizes = read_sizes(vision.replacing(intermediate_size=inner), text)
    if config.positive("vision_hidden_size", sizes["hidden_size"]) != sizes["hidden_size"]:
        raise config.error("vision_hidden_size", f"is not the tower's hidden size, {sizes['hidden_size']}")
    scales = (f"{TOWER}.blocks.{n}.layer_scale{part}." for n in range(sizes["depth"]) for part in (1, 2))
    return VisionConfig(
        names=TowerNames(prefixes=_PREFIXES, renamed=_RENAMED, left=(*_LEFT, *scales)),
        processor="nemotron_h_omni",
        has_flat_patches=True,
        merge_size=_MERGE,
        merger=MergerConfig(
            kind="squares",
            size=config.positive("projector_hidden_size", 4096),
            activation="relu2",
            norms_squares=True,
            has_bias=False,
            norm="rms",
            eps=1e-5,
        ),
        eps=vision.positive_number("layer_norm_eps", 1e-6),
        activation="gelu",
        has_patch_bias=False,
        qkv_bias=vision.get("qkv_bias", bool, True),
        has_last_norm=text.get("num_nextn_predict_layers", int, 0) > 0,
        num_registers=vision.positive("num_cls_tokens") + vision.get("num_registers", int),
        num_positions=(vision.positive("max_img_size") // sizes["patch_size"]) ** 2,
        interpolation="cropped",
        image_token_id=config.get("image_token_id", int, 18),
        text=_TEXT,
        **sizes,
    )
