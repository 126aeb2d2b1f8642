"""Mamba-2 alone (https://arxiv.org/abs/2405.21060): every layer is one, without attention or an MLP."""

from __future__ import annotations

from nvcli.models.families.family import Family
from nvcli.models.families.mamba import read_mamba
from nvcli.models.families.model_file import ModelFile
from nvcli.models.families.nemotron_h import KEYS, MIXER_ALONE, backbone_layout
from nvcli.models.layer_config import DecoderConfig, LayerConfig


def read_mamba2(config: ModelFile) -> DecoderConfig:
    """Read Mamba-2, whose inner size is `expand` times the hidden size."""
    mamba = read_mamba(config)
    layout = backbone_layout([f"{number}.{mamba.name}" for number in range(config.num_layers())])
    return config.decoder(LayerConfig(mixer=mamba, mlp=None, norms=MIXER_ALONE), layout=layout)


MAMBA2 = Family(
    name="Mamba-2",
    architectures=("Mamba2ForCausalLM",),
    features="Mamba-2 layers alone",
    examples=("mistralai/Mamba-Codestral-7B-v0.1",),
    read=read_mamba2,
    keys={
        **KEYS,
        "expand": "mamba_expand",
        "head_dim": "mamba_d_head",
        "num_heads": "mamba_n_heads",
        "state_size": "mamba_d_state",
    },
    defaults={"max_position_embeddings": 1 << 18},
)
