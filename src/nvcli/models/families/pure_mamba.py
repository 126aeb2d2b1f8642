"""Models of Mamba layers alone, without attention or MLPs: Mamba-1 (https://arxiv.org/abs/2312.00752), Falcon Mamba
(https://arxiv.org/abs/2410.05355), which norms step sizes, keys and queries, and Mamba-2
(https://arxiv.org/abs/2405.21060)."""

from __future__ import annotations

from dataclasses import replace

from nvcli.core.validation import show
from nvcli.kernels.whole_numbers import ceil_div
from nvcli.models.families.family import Family
from nvcli.models.families.mamba import read_mamba
from nvcli.models.families.model_file import ModelFile
from nvcli.models.families.nemotron_h import KEYS, MIXER_ALONE, backbone_layout
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.mamba import Mamba1Config

NAMES = ((".mamba.in_proj", ".mamba.xz_proj"), (".mamba.dt_proj.bias", ".mamba.dt_bias"))
"""Names in files, and the decoder's."""
_MAX_STATE = 64
"""The largest state of a channel that kernels hold."""
_KEYS = {
    "conv_kernel": "mamba_d_conv",
    "expand": "mamba_expand",
    "layer_norm_epsilon": "rms_norm_eps",
    "state_size": "mamba_d_state",
    "time_step_rank": "mamba_dt_rank",
    "use_bias": "mamba_proj_bias",
    "use_conv_bias": "mamba_conv_bias",
}


def read_layer(
    config: ModelFile, *, num_channels: int, norm_eps: float | None = None, norm_has_weight: bool = True
) -> Mamba1Config:
    """Read the Mamba layers, under the keys of Jamba. Raises LoadError for another activation than silu."""
    hidden_size = config.positive("hidden_size")
    if (activation := config.get("hidden_act", str, "silu")) not in ("silu", "swish"):
        raise config.error("hidden_act", f"{show(activation)} is not supported here; supported: silu")
    has_rank = config.values.get("mamba_dt_rank") not in (None, "auto")
    return Mamba1Config(
        num_channels=num_channels,
        state_size=config.positive("mamba_d_state", 16, most=_MAX_STATE),
        step_rank=config.positive("mamba_dt_rank") if has_rank else ceil_div(hidden_size, 16),
        conv_taps=config.conv_taps("mamba_d_conv"),
        norm_eps=norm_eps,
        norm_has_weight=norm_has_weight,
        conv_bias=config.get("mamba_conv_bias", bool, True),
        bias=config.get("mamba_proj_bias", bool, False),
    )


def read_mamba1(config: ModelFile) -> DecoderConfig:
    """Read Mamba-1."""
    return _read(config, norm_eps=None)


def read_falcon_mamba(config: ModelFile) -> DecoderConfig:
    """Read Falcon Mamba."""
    return _read(config, norm_eps=config.positive_number("mixer_rms_eps", 1e-6))


def _read(config: ModelFile, *, norm_eps: float | None) -> DecoderConfig:
    """Read layers of as many channels as `intermediate_size` says or, without it, the hidden size and `expand`."""
    expanded = config.positive("mamba_expand", 2) * config.positive("hidden_size")
    num_channels = config.positive("intermediate_size") if config.has("intermediate_size") else expanded
    mixer = read_layer(config, num_channels=num_channels, norm_eps=norm_eps, norm_has_weight=False)
    layout = backbone_layout([f"{number}.{mixer.name}" for number in range(config.num_layers())])
    layout = replace(layout, renamed=(*layout.renamed, *NAMES))
    return config.decoder(LayerConfig(mixer=mixer, mlp=None, norms=MIXER_ALONE), layout=layout)


MAMBA1 = Family(
    name="Mamba",
    architectures=("MambaForCausalLM",),
    features="Mamba-1 layers alone",
    examples=("state-spaces/mamba-2.8b-hf",),
    read=read_mamba1,
    ties_embeddings=True,
    keys=_KEYS,
    defaults={"max_position_embeddings": 1 << 18},
)
FALCON_MAMBA = replace(
    MAMBA1,
    name="Falcon Mamba",
    architectures=("FalconMambaForCausalLM",),
    features="Mamba-1 layers alone, with norms of step sizes, keys and queries",
    examples=("tiiuae/falcon-mamba-7b-instruct",),
    read=read_falcon_mamba,
)


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
