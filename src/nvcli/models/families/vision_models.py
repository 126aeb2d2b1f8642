"""Models with the decoder of another family after a vision tower: LLaVA (https://arxiv.org/abs/2310.03744), with CLIP's
or SigLIP's, and Pixtral 12B (https://arxiv.org/abs/2410.07073), whose files have its form; VideoLLaMA 3
(https://arxiv.org/abs/2501.13106); InternVL 3 and 3.5 (https://arxiv.org/abs/2504.10479); Ovis 2
(https://arxiv.org/abs/2405.20797); Idefics 2 (https://arxiv.org/abs/2405.02246); and Idefics 3
(https://arxiv.org/abs/2408.12637), SmolVLM
(https://arxiv.org/abs/2504.05299) and Granite Docling, which see an image as tiles and as a whole."""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.families.family import Family
from nvcli.models.families.granite import read_granite
from nvcli.models.families.llama import LLAMA_DEFAULTS, read_llama
from nvcli.models.families.mistral import read_mistral
from nvcli.models.families.model_file import ModelFile, read_by_type
from nvcli.models.families.qwen import read_qwen2, read_qwen3, read_qwen3_moe
from nvcli.models.layer_config import DecoderConfig
from nvcli.models.vision.idefics2 import read_idefics2_vision
from nvcli.models.vision.internvl import read_internvl_vision, read_qianfan_vision
from nvcli.models.vision.llava import read_llava_next_vision, read_llava_vision, read_onevision_vision
from nvcli.models.vision.ovis import read_ovis_vision
from nvcli.models.vision.sam import read_got_vision
from nvcli.models.vision.siglip import read_docling_vision, read_idefics3_vision
from nvcli.models.vision.video_llama import read_video_llama_vision

_GOT_PROMPT = (  # as transformers' processor writes it, which asks for the text of images where nothing else does
    "{% if messages[0].role != 'system' %}<|im_start|>system\n"
    "You should follow the instructions carefully and explain your answers in detail.<|im_end|>{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% set images = message.content | selectattr('type', 'equalto', 'image') | list %}"
    "{% set texts = message.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | list %}"
    "{% if images %}<img>{{ '<imgpad>' * images | length }}</img>\n{% endif %}{{ texts | join or ' OCR: ' }}"
    "{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LLAVA_TEXT_PARTS = {"llama": read_llama, "mistral": read_mistral, "qwen2": read_qwen2, "qwen3": read_qwen3}

LLAVA = Family(
    name="LLaVA 1.5, Pixtral 12B",
    architectures=("LlavaForConditionalGeneration",),
    features="Llama, Mistral or Qwen with a vision tower (CLIP, SigLIP or Pixtral)",
    examples=("llava-hf/llava-1.5-7b-hf", "mistral-community/pixtral-12b"),
    read=lambda config: read_by_type(config, _LLAVA_TEXT_PARTS, "llama"),
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
    read=lambda config: read_by_type(config, _LLAVA_TEXT_PARTS, "qwen2"),
    read_vision=read_onevision_vision,
)
VIDEO_LLAMA3 = Family(
    name="VideoLLaMA 3",
    architectures=("VideoLlama3ForConditionalGeneration",),
    features="Qwen2 with a vision tower (SigLIP) for images of any size",
    examples=("lkhl/VideoLLaMA3-7B-Image-HF",),
    read=read_qwen2,
    read_vision=read_video_llama_vision,
    ties_as_text=True,
)

_INTERNVL_TEXT_PARTS = {"qwen2": read_qwen2, "qwen3": read_qwen3, "qwen3_moe": read_qwen3_moe}

INTERNVL = Family(
    name="InternVL 3, 3.5",
    architectures=("InternVLForConditionalGeneration",),
    features="Qwen2 or Qwen3 with a vision tower, which sees images as tiles",
    examples=("OpenGVLab/InternVL3-8B-hf", "OpenGVLab/InternVL3_5-8B-HF"),
    read=lambda config: read_by_type(config, _INTERNVL_TEXT_PARTS, "qwen2"),
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


OVIS2 = Family(
    name="Ovis 2",
    architectures=("Ovis2ForConditionalGeneration",),
    features="Qwen2 with a vision tower (AIMv2), whose results weigh the vectors of a table",
    examples=("thisisiron/Ovis2-2B-hf",),
    read=read_qwen2,
    read_vision=read_ovis_vision,
    ties_embeddings=True,
)


GOT_OCR2 = Family(
    name="GOT-OCR 2",
    architectures=("GotOcr2ForConditionalGeneration",),
    features="Qwen2 with a vision tower (SAM), whose scores depend on learned distances",
    examples=("stepfun-ai/GOT-OCR-2.0-hf",),
    read=read_qwen2,
    read_vision=read_got_vision,
    chat_template=_GOT_PROMPT,
    ties_embeddings=True,
    defaults={
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "rope_theta": 1_000_000.0,
        "vocab_size": 151_860,
    },
)


IDEFICS2 = Family(
    name="Idefics 2",
    architectures=("Idefics2ForConditionalGeneration",),
    features="Mistral with a vision tower (SigLIP), whose images have equally many tokens",
    examples=("HuggingFaceM4/idefics2-8b",),
    read=read_mistral,
    read_vision=read_idefics2_vision,
    defaults={
        **LLAMA_DEFAULTS,
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32_768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "sliding_window": 4096,
    },
)
IDEFICS3 = Family(
    name="SmolVLM, Idefics 3",
    architectures=("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration"),
    features="Llama with a vision tower (SigLIP), which sees images as marked tiles; also Granite Docling 258M",
    examples=("HuggingFaceTB/SmolVLM2-2.2B-Instruct", "ibm-granite/granite-docling-258M"),
    read=lambda config: read_by_type(config, {"llama": read_llama, "granite": read_granite}, "llama"),
    read_vision=read_idefics3_vision,
    defaults=LLAMA_DEFAULTS,
)


def read_docling(config: ModelFile) -> DecoderConfig:
    """Read Granite 3. What says whether a page is dense stays on disk."""
    decoder = read_granite(config)
    return replace(decoder, layout=replace(decoder.layout, left=("model.density_router.",)))


GRANITE_DOCLING = Family(
    name="Granite Docling 500M",
    architectures=("GraniteDoclingForConditionalGeneration",),
    features="Granite 3 with a vision tower, from several layers of which the decoder reads; marked tiles",
    examples=("ibm-granite/granite-for-docling-500m",),
    read=read_docling,
    read_vision=read_docling_vision,
    ties_embeddings=True,
    defaults={
        "embedding_multiplier": 12.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.263,
        "attention_multiplier": 1 / 64,
    },
)
