"""MiniMax-M2 (https://github.com/MiniMax-AI/MiniMax-M2): norms over all heads together, half of each head rotated, and
experts chosen by sigmoid scores with a correction. MiniMax-Text-01 and M1 (https://arxiv.org/abs/2501.08313): lightning
attention in most layers, and a residual stream of normed inputs.

In these a block's input x is also what it adds to: the stream after it is α x + β block(x). The next norm does not
depend on the scale of what it reads, except through its epsilon: so the stream is kept divided by β.
"""

from __future__ import annotations

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import CORRECTION_BESIDE_GATE
from nvcli.models.families.family import Family
from nvcli.models.families.mamba import MAX_STATE
from nvcli.models.families.mistral import MIXTRAL_NAMES
from nvcli.models.families.model_file import LINEAR, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.lightning import LightningConfig
from nvcli.models.mixers.mixer import Mixer, NormConfig

_LAYOUT = CheckpointLayout(renamed=(*MIXTRAL_NAMES, CORRECTION_BESIDE_GATE))


_DEFAULTS = {"torch_dtype": "bfloat16"}  # the published files leave it out
_OWN_NAMES = {
    f"layernorm_{own}_{kind}": f"{newer}_{kind}_factor"
    for own, newer in (("full_attention", "full_attn"), ("linear_attention", "linear_attn"), ("mlp", "mlp"))
    for kind in ("alpha", "beta")
}
"""The names of α and β in MiniMax's own files, and in transformers'."""


def read(config: ModelFile) -> DecoderConfig:
    """Read full attention in all layers."""
    attention = config.attention(qk_norm="row", rope=config.rope(5_000_000.0, default_partial=rotated_part(config)))
    routing = config.routing(scoring="sigmoid", renormalise=True)
    experts = config.experts(routing, size_key="intermediate_size", has_correction=True)
    return config.decoder(LayerConfig(mixer=attention, mlp=experts), layout=_LAYOUT)


def rotated_part(config: ModelFile) -> float:
    """Read the part of each head that is rotated; the files give its size, `rotary_dim`."""
    return config.positive("rotary_dim", config.head_dim()) / config.head_dim()


def read_text_01(config: ModelFile) -> DecoderConfig:
    """Read MiniMax-Text-01 or M1, whose heads forget the slower, the later their layer."""
    config.only(postnorm=True, shared_intermediate_size=0, hidden_act="silu")
    config = config.with_names(_OWN_NAMES)
    norm, count = config.rms_norm(), config.num_layers()
    window = config.bounded(config.window())
    full = config.attention(window=window, rope=config.rope(1_000_000.0, default_partial=rotated_part(config)))
    config.positive("head_dim", full.head_dim, most=MAX_STATE)
    experts = config.experts(config.routing(renormalise=True), size_key="intermediate_size")
    of_mlp = _factors(config, "mlp")
    layers, before = [], 1.0
    for number, kind in enumerate(_layer_types(config)):
        mixer: Mixer = full
        if kind == LINEAR:
            rate_factor = 1 - number / (count - 1 + 1e-5) + 1e-5
            mixer = LightningConfig(num_heads=full.num_heads, head_dim=full.head_dim, rate_factor=rate_factor)
        of_mixer = _factors(config, "linear_attn" if kind == LINEAR else "full_attn")
        norms = LayerNorms(
            epsilons=(norm.eps / before**2, norm.eps, norm.eps / of_mixer[1] ** 2, norm.eps),
            stream_factors=(of_mixer[0] / of_mixer[1], of_mlp[0] / of_mlp[1]),
        )
        layers.append(LayerConfig(mixer=mixer, mlp=experts, norms=norms))
        before = of_mlp[1]
    layout = CheckpointLayout(renamed=MIXTRAL_NAMES, qkv_groups=full.num_heads)
    return config.decoder(layers, norm=norm, last_norm=NormConfig(eps=norm.eps / before**2), layout=layout)


def _factors(config: ModelFile, block: str) -> tuple[float, float]:
    """Read α and β of a kind of block."""
    alpha, beta = (config.positive_number(f"{block}_{kind}_factor", 1.0) for kind in ("alpha", "beta"))
    return alpha, beta


def _layer_types(config: ModelFile) -> list[str]:
    """Read `layer_types`, or in MiniMax's own files `attn_type_list`: 0 for lightning attention, 1 for full attention.
    By default every second layer has lightning attention."""
    is_full = config.of_layers("attn_type_list", (0, 1))
    return config.layer_kinds(lambda number: number % 2 == 0 if is_full is None else is_full[number], other=LINEAR)


MINIMAX_TEXT_01 = Family(
    name="MiniMax-Text-01, M1",
    architectures=("MiniMaxForCausalLM", "MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"),
    features="lightning attention in most layers; a mixture of experts",
    examples=("MiniMaxAI/MiniMax-Text-01", "MiniMaxAI/MiniMax-M1-80k"),
    read=read_text_01,
    defaults=_DEFAULTS,
)
MINIMAX_M2 = Family(
    name="MiniMax-M2",
    architectures=("MiniMaxM2ForCausalLM",),
    features="a mixture of experts; norms over all heads together, part of each head rotated",
    examples=("MiniMaxAI/MiniMax-M2", "MiniMaxAI/MiniMax-M2.1"),
    read=read,
    defaults=_DEFAULTS,
)
