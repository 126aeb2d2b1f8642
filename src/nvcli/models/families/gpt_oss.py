"""gpt-oss (https://arxiv.org/abs/2508.10925): attention sinks, windows in every other layer, biases everywhere, and a
mixture of experts whose gate and up projections are clamped."""

from __future__ import annotations

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig

_LAYOUT = CheckpointLayout(
    renamed=(
        (".mlp.router.", ".mlp.gate."),
        *((f"_proj_{part}", f"_proj.{part}") for part in ("blocks", "scales", "bias")),
    ),
    interleaves_experts=True,
)


def read(config: ModelFile) -> DecoderConfig:
    """Read two kinds of layers. The weights of a token's experts are a softmax over the chosen experts alone."""
    if config.activation().kind != "silu":
        raise config.error("hidden_act", "only silu is supported here: the experts' gates are based on it")
    bias = config.bias(default=True)
    attention = config.by_kind(config.attention(bias=bias, has_sinks=True, rope=config.rope(150_000.0)), 128)
    experts = config.experts(
        config.routing(renormalise=True),
        size_key="intermediate_size",
        activation=config.clamped_swiglu(),
        bias=True,
    )
    return config.decoder(config.layers(config.every_nth_full(2), attention, experts), layout=_LAYOUT)


GPT_OSS = Family(
    name="gpt-oss",
    architectures=("GptOssForCausalLM",),
    features="attention sinks, windows in every other layer, a mixture of experts in MXFP4",
    examples=("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
    read=read,
    quantisations=("mxfp4",),
    defaults={
        "dtype": "bfloat16",  # the published files leave it out
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    },
)
