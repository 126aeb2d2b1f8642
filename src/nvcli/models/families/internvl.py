"""InternVL 3 and 3.5 (https://arxiv.org/abs/2504.10479): the decoder of another family, behind a vision tower."""

from __future__ import annotations

from nvcli.core.validation import show
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.families.qwen import read_qwen2, read_qwen3, read_qwen3_moe
from nvcli.models.layer_config import DecoderConfig
from nvcli.models.vision.internvl import read_internvl_vision

_TEXT_PARTS = {"qwen2": read_qwen2, "qwen3": read_qwen3, "qwen3_moe": read_qwen3_moe}


def read_internvl(config: ModelFile) -> DecoderConfig:
    """Read Qwen2 or Qwen3, depending on its `model_type`."""
    kind = config.get("model_type", str, "qwen2")
    if kind not in _TEXT_PARTS:
        raise config.error("model_type", f"{show(kind)} is not supported; supported: {', '.join(_TEXT_PARTS)}")
    return _TEXT_PARTS[kind](config)


INTERNVL = Family(
    name="InternVL 3, 3.5",
    architectures=("InternVLForConditionalGeneration",),
    features="Qwen2 or Qwen3 with a vision tower, which sees images as tiles",
    examples=("OpenGVLab/InternVL3-8B-hf", "OpenGVLab/InternVL3_5-8B-HF"),
    read=read_internvl,
    read_vision=read_internvl_vision,
    ties_embeddings=True,
)
