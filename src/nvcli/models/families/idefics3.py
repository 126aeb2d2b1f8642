"""Idefics 3 (https://arxiv.org/abs/2408.12637) and SmolVLM (https://arxiv.org/abs/2504.05299): a decoder of Llama's
shape after a vision tower, which sees an image as tiles and as a whole."""

from __future__ import annotations

from nvcli.models.families.family import Family
from nvcli.models.families.granite import read_granite
from nvcli.models.families.llama import LLAMA_DEFAULTS, read_llama
from nvcli.models.families.model_file import read_by_type
from nvcli.models.vision.siglip import read_idefics3_vision

IDEFICS3 = Family(
    name="SmolVLM, Idefics 3",
    architectures=("SmolVLMForConditionalGeneration", "Idefics3ForConditionalGeneration"),
    features="Llama with a vision tower (SigLIP), which sees images as marked tiles; also Granite Docling 258M",
    examples=("HuggingFaceTB/SmolVLM2-2.2B-Instruct", "ibm-granite/granite-docling-258M"),
    read=lambda config: read_by_type(config, {"llama": read_llama, "granite": read_granite}, "llama"),
    read_vision=read_idefics3_vision,
    defaults=LLAMA_DEFAULTS,
)
