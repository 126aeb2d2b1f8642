"""The tower of MiniCPM-V 4.6 and 4.7 (https://github.com/OpenBMB/MiniCPM-V) and MiniCPM-OCR, as config.json spells it.
Torch-free.

After some layers of SigLIP's, squares of patches attend among themselves and become one patch each. Large images are
read as a whole and then in slices, which are marked in the prompt, and in MiniCPM-V 4.7 have places on one canvas.
"""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.image_text import ImageText
from nvcli.models.vision.siglip import SQUARES, siglip_sizes
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import read_axes, side_of

_EARLY = f"{TOWER}.early_merger."
_NAMES = TowerNames(
    prefixes=(("vision_tower.", f"{TOWER}."), ("merger.mlp.0.", f"{TOWER}.merger.")),
    renamed=(("vit_merger.", "early_merger."), ("pre_norm.", "norm."), *SQUARES.renamed),
    left=(*SQUARES.left, _EARLY),
)
_SLICES = ImageText(
    written="<|image_pad|>",
    token="<|image_pad|>",
    before="<image_id>{image}</image_id>",
    alone="<image>",
    whole="<image>",
    after="</image>",
    tile="<slice>",
    tile_end="</slice>",
    row_end="\n",
)
_MARKS = "slice_start_id", "slice_end_id", "image_start_id", "image_end_id", "newline_id"
_SQUARE = 2
_EARLY_MERGES = {"16x": _SQUARE, "4x": 1}
"""`downsample_mode`: the patches of which one token is made, and the side of the squares that become one patch."""


def read_minicpm_vision(config: JsonFile, vision: JsonFile, text: JsonFile, mode: str = "16x") -> VisionConfig:
    """Read the tower of MiniCPM-V 4.6. `mode` is the default of `downsample_mode`."""
    config.only(merger_times=1)
    for file, key in ((config, "merge_kernel_size"), (vision, "window_kernel_size")):
        if (side := side_of(file, key, _SQUARE)) != _SQUARE:
            raise file.error(key, f"{side} is not supported; supported: {_SQUARE}")
    sizes, early = siglip_sizes(vision, text), config.choice("downsample_mode", _EARLY_MERGES, mode)
    layer, depth, hidden = config.get("insert_layer_id", int, 6), sizes["depth"], sizes["hidden_size"]
    if early > 1 and not 0 <= layer < depth:
        raise config.error("insert_layer_id", f"{layer} is none of the tower's {depth} layers, from 0 on")
    return VisionConfig(
        names=_NAMES if early == 1 else TowerNames(prefixes=_NAMES.prefixes, renamed=_NAMES.renamed),
        processor="minicpmv4_6",
        merge_size=early * _SQUARE,
        early_merge=early,
        early_layer=layer,
        merger=MergerConfig(kind="squares", size=hidden * _SQUARE**2, norms_squares=True),
        num_positions=(side_of(vision, "image_size", 224) // sizes["patch_size"]) ** 2,
        interpolation="nearest",
        image_token_id=config.get("image_token_id", int, 248_056),
        text=_SLICES,
        **sizes,
    )


def read_minicpm4_7_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of MiniCPM-V 4.7, which is that of 4.6."""
    tower, marks = read_minicpm_vision(config, vision, text), tuple(config.get(key, int) for key in _MARKS)
    return replace(tower, axes=read_axes(text, (11, 11, 10), is_interleaved=True), canvas_marks=marks)
