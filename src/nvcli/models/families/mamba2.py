"""Mamba-2 alone (https://arxiv.org/abs/2405.21060): every layer is one, without attention or an MLP."""

from __future__ import annotations

from nvcli.models.families.family import Family
from nvcli.models.families.mamba import MambaKeys, read_mamba
from nvcli.models.families.model_file import ModelFile
from nvcli.models.families.nemotron_h import MIXER_ALONE, backbone_layout
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.mixer import NormConfig

_KEYS = MambaKeys(
    heads="num_heads",
    head_dim="head_dim",
    groups="n_groups",
    state="state_size",
    taps="conv_kernel",
    conv_bias="use_conv_bias",
    bias="use_bias",
    activation="hidden_act",
    eps="layer_norm_epsilon",
)


def read_mamba2(config: ModelFile) -> DecoderConfig:
    """Read Mamba-2, whose inner size is `expand` times the hidden size."""
    mamba = read_mamba(config, _KEYS, inner_size=config.positive("expand") * config.positive("hidden_size"))
    norm = NormConfig(eps=config.positive_number("layer_norm_epsilon"))
    layout = backbone_layout([f"{number}.{mamba.name}" for number in range(config.num_layers())])
    return config.decoder(LayerConfig(mixer=mamba, mlp=None, norms=MIXER_ALONE), norm=norm, layout=layout)


MAMBA2 = Family(
    name="Mamba-2",
    architectures=("Mamba2ForCausalLM",),
    features="Mamba-2 layers alone",
    examples=("mistralai/Mamba-Codestral-7B-v0.1",),
    read=read_mamba2,
    defaults={"max_position_embeddings": 1 << 18},
)
