"""LLaVA (https://arxiv.org/abs/2310.03744): the decoder of another family after CLIP's or SigLIP's vision tower, and
Pixtral 12B (https://arxiv.org/abs/2410.07073), whose files have its form."""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.families.family import Family
from nvcli.models.families.llama import LLAMA_DEFAULTS, read_llama
from nvcli.models.families.mistral import read_mistral
from nvcli.models.families.model_file import read_by_type
from nvcli.models.families.qwen import read_qwen2, read_qwen3
from nvcli.models.vision.llava import read_llava_next_vision, read_llava_vision, read_onevision_vision

_TEXT_PARTS = {"llama": read_llama, "mistral": read_mistral, "qwen2": read_qwen2, "qwen3": read_qwen3}

LLAVA = Family(
    name="LLaVA 1.5, Pixtral 12B",
    architectures=("LlavaForConditionalGeneration",),
    features="Llama, Mistral or Qwen with a vision tower (CLIP, SigLIP or Pixtral)",
    examples=("llava-hf/llava-1.5-7b-hf", "mistral-community/pixtral-12b"),
    read=lambda config: read_by_type(config, _TEXT_PARTS, "llama"),
    read_vision=read_llava_vision,
    ties_as_text=True,
    defaults=LLAMA_DEFAULTS,
)
LLAVA_NEXT = replace(
    LLAVA,
    name="LLaVA-NeXT (1.6)",
    architectures=("LlavaNextForConditionalGeneration",),
    features="Llama, Mistral or Qwen with a vision tower (CLIP), which sees images as rows across tiles",
    examples=("llava-hf/llava-v1.6-mistral-7b-hf",),
    read_vision=read_llava_next_vision,
)
LLAVA_ONEVISION = replace(
    LLAVA,
    name="LLaVA-OneVision",
    architectures=("LlavaOnevisionForConditionalGeneration",),
    features="Qwen2 with a vision tower (SigLIP), which sees images as rows across tiles",
    examples=("llava-hf/llava-onevision-qwen2-7b-ov-hf",),
    read=lambda config: read_by_type(config, _TEXT_PARTS, "qwen2"),
    read_vision=read_onevision_vision,
)
