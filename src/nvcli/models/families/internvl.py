"""InternVL 3 and 3.5 (https://arxiv.org/abs/2504.10479): the decoder of another family, after a vision tower."""

from __future__ import annotations

from nvcli.models.families.family import Family
from nvcli.models.families.model_file import read_by_type
from nvcli.models.families.qwen import read_qwen2, read_qwen3, read_qwen3_moe
from nvcli.models.vision.internvl import read_internvl_vision, read_qianfan_vision

_TEXT_PARTS = {"qwen2": read_qwen2, "qwen3": read_qwen3, "qwen3_moe": read_qwen3_moe}

INTERNVL = Family(
    name="InternVL 3, 3.5",
    architectures=("InternVLForConditionalGeneration",),
    features="Qwen2 or Qwen3 with a vision tower, which sees images as tiles",
    examples=("OpenGVLab/InternVL3-8B-hf", "OpenGVLab/InternVL3_5-8B-HF"),
    read=lambda config: read_by_type(config, _TEXT_PARTS, "qwen2"),
    read_vision=read_internvl_vision,
    ties_embeddings=True,
)
QIANFAN_OCR = Family(
    name="Qianfan-OCR",
    architectures=("QianfanOCRForConditionalGeneration",),
    features="Qwen3 with the vision tower of InternVL",
    examples=("baidu/Qianfan-OCR",),
    read=read_qwen3,
    read_vision=read_qianfan_vision,
)
