"""Bamba (https://huggingface.co/blog/bamba): Mamba-2 in most layers, attention in a few, each with a gated MLP."""

from __future__ import annotations

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.mamba import read_mamba
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms

LAYOUT = CheckpointLayout(
    renamed=((".feed_forward.", ".mlp."), ("model.final_layernorm.", "model.norm.")),
)
NORMS = LayerNorms(before_mlp="pre_ff_layernorm")


def read_bamba(config: ModelFile) -> DecoderConfig:
    """Read Bamba: the layers of `attn_layer_indices` have attention, of which half of each head is rotated."""
    bias, mlp = config.bias(), config.mlp(bias=config.mlp_bias())
    attention = config.attention(bias=bias, rope=config.rope(default_partial=0.5))
    indices, count = config.values.get("attn_layer_indices"), config.num_layers()
    if not isinstance(indices, list) or any(index not in range(count) for index in indices):
        raise config.error("attn_layer_indices", f"{show(indices)} is not a list of some of {count} layers")
    mamba = read_mamba(config)
    mixers = [attention if number in indices else mamba for number in range(count)]
    layers = [LayerConfig(mixer=mixer, mlp=mlp, norms=NORMS) for mixer in mixers]
    return config.decoder(layers, layout=LAYOUT)


BAMBA = Family(
    name="Bamba",
    architectures=("BambaForCausalLM",),
    features="Mamba-2 layers between layers of attention",
    examples=("ibm-ai-platform/Bamba-9B-v2",),
    read=read_bamba,
)
