"""The tower of VideoLLaMA 3 (SigLIP, https://arxiv.org/abs/2501.13106), as config.json spells it. Torch-free.

Images are of any size, with rotary positions, and each of their patches becomes a token.
"""

from __future__ import annotations

from nvcli.models.checkpoint_layout import TowerNames
from nvcli.models.json_file import JsonFile
from nvcli.models.vision.siglip import SQUARES, siglip_sizes
from nvcli.models.vision.vision_config import TOWER, MergerConfig, VisionConfig
from nvcli.models.vision.vision_file import rope_theta

_NAMES = TowerNames(
    prefixes=(
        ("vision_model.", f"{TOWER}."),
        ("projector.readout.0.", f"{TOWER}.merger.linear_fc1."),
        ("projector.readout.2.", f"{TOWER}.merger.linear_fc2."),
    ),
    renamed=SQUARES.renamed,
)


def read_video_llama_vision(config: JsonFile, vision: JsonFile, text: JsonFile) -> VisionConfig:
    """Read the tower of VideoLLaMA 3."""
    sizes = siglip_sizes(vision, text)
    return VisionConfig(
        names=_NAMES,
        processor="video_llama_3",
        merge_size=1,
        merger=MergerConfig(kind="squares", size=sizes["out_size"], has_norm=False),
        rope="same",
        rope_theta=rope_theta(vision),
        image_token_id=config.get("image_token_id", int, 151_655),
        **sizes,
    )
