"""Gemma 2 (https://arxiv.org/abs/2408.00118): soft caps, and windows in every other layer."""

from __future__ import annotations

from nvcli.models.families.family import Family
from nvcli.models.families.gemma import read_gemma_decoder, read_gemma_layer
from nvcli.models.families.reading import FULL, SLIDING, bounded, every_nth_full, read_optional, read_window
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig

DEFAULT_WINDOW = 4096
"""What transformers takes for an absent `sliding_window`."""


def read(config: JsonFile) -> DecoderConfig:
    """Read soft caps on scores and logits; every second layer has full attention."""
    kinds = {
        kind: read_gemma_layer(
            config,
            scale=config.positive_number("query_pre_attn_scalar", 256.0) ** -0.5,
            window=bounded(read_window(config, DEFAULT_WINDOW), config) if kind == SLIDING else None,
            soft_cap=read_optional(config, "attn_logit_softcapping", 50.0),
        )
        for kind in (SLIDING, FULL)
    }
    layers = (kinds[kind] for kind in every_nth_full(config, 2))
    return read_gemma_decoder(config, layers, logit_soft_cap=read_optional(config, "final_logit_softcapping", 30.0))


GEMMA2 = Family(
    name="Gemma 2",
    architectures=("Gemma2ForCausalLM",),
    features="soft caps, windows in every other layer, norms before and behind each block",
    examples=("google/gemma-2-9b-it", "google/gemma-2-27b-it"),
    read=read,
    ties_embeddings=True,
)
