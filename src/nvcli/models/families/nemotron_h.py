"""Nemotron-H (https://arxiv.org/abs/2504.03624) and Nemotron 3: Mamba-2, attention without positions, and MLPs or
experts without gates, in an order of their own.

In the files each of these blocks is a layer, with a norm before it. Here a layer is a block that mixes tokens with the
MLP or the experts right after it, if they follow, so the decoder has fewer layers.
"""

from __future__ import annotations

from collections.abc import Sequence

from nvcli.core.validation import show
from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import SHARED_EXPERT
from nvcli.models.families.family import Family
from nvcli.models.families.mamba import ATTENTION, MAMBA, read_mamba
from nvcli.models.families.model_file import FULL, LINEAR, MAX_LAYERS, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.mixers.mixer import FeedForward, Mixer
from nvcli.models.mixers.mlp import PlainMLPConfig
from nvcli.models.vision.radio import read_radio_vision

_LETTERS = {"M": LINEAR, "*": FULL, "-": "mlp", "E": "moe"}
"""Kinds of blocks in `hybrid_override_pattern`."""
_KNOWN = (*ATTENTION, *MAMBA, "mlp", "moe")
_PREFIXES = ("model.", "backbone.")
"""Prefixes of names: of a few files, and of most, whose lists of unquantised layers have the second one, too."""
_BEFORE_MIXER, _BEFORE_MLP = "input_layernorm", "post_attention_layernorm"
MIXER_ALONE = LayerNorms(before_attention=_BEFORE_MIXER, before_mlp=None)
KEYS = {
    "conv_kernel": "mamba_d_conv",
    "layer_norm_epsilon": "rms_norm_eps",
    "n_groups": "mamba_n_groups",
    "use_bias": "mamba_proj_bias",
    "use_conv_bias": "mamba_conv_bias",
}
"""Names of Mamba's keys in files of Nemotron-H and Mamba-2 → the names that are read."""
_NEMOTRON_KEYS = {
    **KEYS,
    "mamba_head_dim": "mamba_d_head",
    "mamba_hidden_act": "hidden_act",
    "mamba_num_heads": "mamba_n_heads",
    "ssm_state_size": "mamba_d_state",
}


def read_nemotron_h(config: ModelFile) -> DecoderConfig:
    """Read the blocks of `layers_block_type`, or of the older `hybrid_override_pattern`. Raises LoadError for an order
    in which an MLP follows no block that mixes tokens."""
    kinds = _block_kinds(config)
    attention = config.attention(bias=config.bias(), rope=None)
    blocks: dict[str, Mixer | FeedForward] = {}
    for kind in dict.fromkeys(kinds):
        if kind in ATTENTION:
            blocks[kind] = attention
        elif kind in MAMBA:
            blocks[kind] = read_mamba(config, config.positive("mamba_n_heads") * config.positive("mamba_d_head"))
        else:
            blocks[kind] = _mlp(config, "intermediate_size") if kind == "mlp" else _experts(config)
    layers: list[LayerConfig] = []
    places: list[str] = []
    for number, kind in enumerate(kinds):
        block = blocks[kind]
        if isinstance(block, Mixer):
            layers.append(LayerConfig(mixer=block, mlp=None, norms=MIXER_ALONE))
        elif isinstance(block, FeedForward) and layers and layers[-1].mlp is None:
            layers[-1] = LayerConfig(mixer=layers[-1].mixer, mlp=block)
        else:
            raise config.error(
                _key(config), f"block {number} is {kind} behind no block that mixes tokens, which is not supported"
            )
        places.append(f"{len(layers) - 1}.{block.name}")
    return config.decoder(layers, layout=backbone_layout(places))


def _key(config: ModelFile) -> str:
    keys = ("layers_block_type", "layer_types", "hybrid_override_pattern")
    return next(filter(config.has, keys), keys[-1])


def _block_kinds(config: ModelFile) -> Sequence[str]:
    """Read the kind of each block."""
    key = _key(config)
    value = config.values.get(key)
    kinds = [_LETTERS.get(letter, letter) for letter in value] if isinstance(value, str) else value
    if not isinstance(kinds, list) or not 0 < len(kinds) <= MAX_LAYERS:
        raise config.error(key, f"{show(value)} is not a list of blocks, or a text with a letter for each")
    if others := [kind for kind in kinds if kind not in _KNOWN]:
        raise config.error(key, f"{show(others[0])} is not supported here; supported: {', '.join(_KNOWN)}")
    return kinds


def _mlp(config: ModelFile, size_key: str) -> PlainMLPConfig:
    config.only(mlp_hidden_act="relu2")
    return PlainMLPConfig(intermediate_size=config.positive(size_key), activation="relu2", bias=config.mlp_bias())


def _experts(config: ModelFile) -> ExpertsConfig:
    """Read experts without gates, chosen as in DeepSeek-V3, and the shared one. Those of Nemotron 3 Super compute with
    latent vectors."""
    latent_size = None
    if config.has("moe_latent_size"):
        latent_size = config.positive("moe_latent_size")
        if config.mlp_bias():
            raise config.error("mlp_bias", "true is not supported together with `moe_latent_size`")
    renormalises = config.get("norm_topk_prob", bool, True)
    routing = config.sigmoid_routing(keys=("n_routed_experts",), renormalise=renormalises)
    return config.experts(
        config.routing_with_groups(routing),
        activation=ExpertActivation(kind="relu2"),
        has_correction=True,
        has_wide_router=True,
        latent_size=latent_size,
        shared=_mlp(config, "moe_shared_expert_intermediate_size"),
    )


def backbone_layout(places: Sequence[str]) -> CheckpointLayout:
    """Return the names in files, for blocks at `places`: layer and name of the block in the decoder."""
    renamed = [SHARED_EXPERT]
    for prefix in _PREFIXES:
        renamed += [(f"{prefix}embeddings.", "model.embed_tokens."), (f"{prefix}norm_f.", "model.norm.")]
        for number, place in enumerate(places):
            layer, _, name = place.partition(".")
            norm = _BEFORE_MLP if name == "mlp" else _BEFORE_MIXER
            renamed.append((f"{prefix}layers.{number}.mixer.", f"model.layers.{place}."))
            renamed.append((f"{prefix}layers.{number}.norm.", f"model.layers.{layer}.{norm}."))
    return CheckpointLayout(renamed=tuple(renamed), left=("mtp.",))


NEMOTRON_H = Family(
    name="Nemotron-H, Nemotron 3",
    architectures=("NemotronHForCausalLM",),
    features="Mamba-2 layers, layers of attention, MLPs or experts without a gate, with relu², also in a latent space",
    examples=("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nvidia/NVIDIA-Nemotron-Nano-9B-v2"),
    read=read_nemotron_h,
    keys=_NEMOTRON_KEYS,
)
NEMOTRON_OMNI = Family(
    name="Nemotron 3 Omni",
    architectures=("NemotronH_Omni_Reasoning_V3", "NemotronH_Nano_Omni_Reasoning_V3"),
    features="Nemotron 3 with a vision tower (C-RADIO)",
    examples=("nvidia/Nemotron-3-Nano-Omni-30B-A3B-Reasoning-BF16",),
    read=read_nemotron_h,
    read_vision=read_radio_vision,
    keys=_NEMOTRON_KEYS,
    whole_keys={
        "llm_config": "text_config",
        "img_context_token_id": "image_token_id",
        "vit_hidden_size": "vision_hidden_size",
    },
)
