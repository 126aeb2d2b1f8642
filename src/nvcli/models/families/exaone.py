"""EXAONE 4 (https://arxiv.org/abs/2507.11407): norms after the blocks, normed queries and keys, and full attention
without rotary positions in the layers between those with windows. K-EXAONE has norms before the blocks, and experts in
all layers but the first."""

from __future__ import annotations

from collections.abc import Sequence

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import CORRECTION_BESIDE_GATE, SHARED_EXPERT, read_experts
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import FULL, SLIDING, ModelFile
from nvcli.models.families.olmo import NORMS_AFTER
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mtp_config import PREFIX
from nvcli.models.vision.qwen import read_exaone4_5_vision

_LOCAL, _GLOBAL = "L", "G"


def read(config: ModelFile) -> DecoderConfig:
    """Read EXAONE 4."""
    mlp = config.mlp()
    return config.decoder(LayerConfig(mixer=mixer, mlp=mlp, norms=NORMS_AFTER) for mixer in _mixers(config))


def read_moe(config: ModelFile) -> DecoderConfig:
    """Read K-EXAONE; its head for multi-token prediction stays on disk."""
    experts = read_experts(config, shared_key="num_shared_experts")
    layout = CheckpointLayout(renamed=(CORRECTION_BESIDE_GATE, SHARED_EXPERT), left=(PREFIX,))
    mixers, mlps = _mixers(config), config.mlps(experts, config.sparse_layers())
    layers = (LayerConfig(mixer=mixer, mlp=mlp) for mixer, mlp in zip(mixers, mlps, strict=True))
    return config.decoder(layers, layout=layout)


def _mixers(config: ModelFile) -> Sequence[AttentionConfig]:
    """Read windows. Layers of full attention do not rotate, except in models without windows."""
    attention = config.attention(qk_norm="head", rope=config.rope())
    if config.window(4096) is None:
        return [attention] * config.num_layers()
    by_kind = config.by_kind(attention, 4096, full_rotates=False)
    return [by_kind[kind] for kind in _kinds(config)]


def _kinds(config: ModelFile) -> list[str]:
    """Read the kinds of layers: `layer_types`, or a pattern such as `LLLG`, which is repeated."""
    pattern = config.values.get("sliding_window_pattern")
    if config.values.get("layer_types") is not None or not isinstance(pattern, str):
        return config.every_nth_full(4)
    if not pattern or not set(pattern) <= {_LOCAL, _GLOBAL}:
        raise config.error("sliding_window_pattern", f"{show(pattern)} is not a pattern of {_LOCAL} and {_GLOBAL}")
    letters = (pattern[number % len(pattern)] for number in range(config.num_layers()))
    return [FULL if letter == _GLOBAL else SLIDING for letter in letters]


EXAONE4 = Family(
    name="EXAONE 4",
    architectures=("Exaone4ForCausalLM",),
    features="norms after the blocks; windows in three of four layers, full attention without rotary positions",
    examples=("LGAI-EXAONE/EXAONE-4.0-32B", "LGAI-EXAONE/EXAONE-4.0-1.2B"),
    read=read,
)
EXAONE4_5 = Family(
    name="EXAONE 4.5",
    architectures=("Exaone4_5_ForConditionalGeneration",),
    features="EXAONE 4 with a vision tower, which attends within windows",
    examples=("LGAI-EXAONE/EXAONE-4.5-33B",),
    read=read,
    read_vision=read_exaone4_5_vision,
)
EXAONE_MOE = Family(
    name="K-EXAONE",
    architectures=("ExaoneMoeForCausalLM", "ExaoneMoEForCausalLM"),
    features="attention as in EXAONE 4; a mixture of experts after a dense layer, and an expert that all tokens share",
    examples=("LGAI-EXAONE/K-EXAONE-236B-A23B",),
    read=read_moe,
    defaults={"num_shared_experts": 1, "routed_scaling_factor": 2.5},
)
