"""Idefics 3 (https://arxiv.org/abs/2408.12637), SmolVLM (https://arxiv.org/abs/2504.05299) and Granite Docling: a
decoder of Llama's shape after a vision tower, which sees an image as tiles and as a whole."""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.families.family import Family
from nvcli.models.families.granite import read_granite
from nvcli.models.families.llama import LLAMA_DEFAULTS, read_llama
from nvcli.models.families.model_file import ModelFile, read_by_type
from nvcli.models.layer_config import DecoderConfig
from nvcli.models.vision.siglip import read_docling_vision, read_idefics3_vision

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
