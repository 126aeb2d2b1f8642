"""MiniMax-M2 (https://github.com/MiniMax-AI/MiniMax-M2): norms over all heads together, half of each head rotated, and
experts chosen by sigmoid scores with a correction. MiniMax-M3 (https://huggingface.co/MiniMaxAI/MiniMax-M3): each KV
head attends to blocks of keys that it chooses, and MLPs and experts are clamped. MiniMax-Text-01 and M1
(https://arxiv.org/abs/2501.08313): lightning attention in most layers, and a residual stream of normed inputs.

In the last two a block's input x is also what it adds to: the stream after it is α x + β block(x). The next norm does
not depend on the scale of what it reads, except through its epsilon: so the stream is kept divided by β.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from nvcli.core.validation import show
from nvcli.kernels.pool_settings import Pools
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import CORRECTION_BESIDE_GATE, SHARED_EXPERT
from nvcli.models.families.family import Family
from nvcli.models.families.mamba import MAX_STATE
from nvcli.models.families.mistral import MIXTRAL_NAMES
from nvcli.models.families.model_file import DENSE, FULL, LINEAR, SPARSE, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mixers.block_index import BlockIndexConfig
from nvcli.models.mixers.lightning import LightningConfig
from nvcli.models.mixers.mixer import Mixer, NormConfig
from nvcli.models.vision.minimax import read_minimax_m3_vision

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


_CHOSEN = "minimax_m3_sparse"
_SECTION = "sparse_attention_config"
_M3_OWN_NAMES = {
    "sparse_num_index_heads": "index_n_heads",
    "sparse_index_dim": "index_head_dim",
    "sparse_block_size": "index_block_size",
    "sparse_topk_blocks": "index_topk_blocks",
    "sparse_local_block": "index_local_blocks",
}
"""The names of the choice's sizes in MiniMax's own files, in a section of theirs, and in transformers'."""
_MOST_KEYS = 4096
"""The most keys of a block; more than any model has."""
_NAMES = (
    *MIXTRAL_NAMES,
    CORRECTION_BESIDE_GATE,
    SHARED_EXPERT,
    *((f".indexer.{kind}.", f".index_{kind}.") for kind in ("q_proj", "k_proj", "q_norm", "k_norm")),
)


def read_m3(config: ModelFile) -> DecoderConfig:
    """Read the text model. Layers for multi-token prediction stay on disk."""
    config = config.replacing(**_sparse_settings(config))
    clamped = config.clamped_swiglu()
    dense = replace(config.mlp(size_key="dense_intermediate_size"), activation=clamped)
    experts = config.experts(
        config.sigmoid_routing(default=2.0),
        size_key="intermediate_size",
        activation=clamped,
        has_correction=True,
        shared=replace(config.mlp(size_key="shared_intermediate_size"), activation=clamped),
    )
    rope = config.rope(5_000_000.0, default_partial=rotated_part(config))
    attention = config.attention(qk_norm="head", rope=rope)
    chosen = _with_choice(config, attention)
    kinds = config.layer_types(supported=(FULL, _CHOSEN)) or [FULL] * config.num_layers()
    layers = (
        LayerConfig(mixer=chosen if kind == _CHOSEN else attention, mlp=experts if is_sparse else dense)
        for kind, is_sparse in zip(kinds, config.sparse_layers(default=0), strict=True)
    )
    return config.decoder(layers, norm=config.rms_norm(weight_offset=1.0), layout=CheckpointLayout(renamed=_NAMES))


def _with_choice(config: ModelFile, attention: AttentionConfig) -> AttentionConfig:
    """Read the choice of blocks that each KV head makes."""
    size = config.positive("index_block_size", 128, most=_MOST_KEYS)
    if size & (size - 1):
        raise config.error("index_block_size", f"{size} is no power of 2")
    most, num_last = config.positive("index_topk_blocks", 16, least=2), config.positive("index_local_blocks", 1)
    if num_last >= most:
        raise config.error("index_local_blocks", f"{num_last} blocks are not fewer than `index_topk_blocks`, {most}")
    for key, wanted in (("index_n_heads", attention.num_kv_heads), ("index_head_dim", attention.head_dim)):
        if config.positive(key, wanted) != wanted:
            raise config.error(key, f"only {wanted} is supported here, as keys and values have")
    pools = Pools(size=size, num_last=1 + (num_last - 1) * size)
    index = BlockIndexConfig(num_heads=attention.num_kv_heads, head_dim=attention.head_dim, pools=pools)
    return replace(attention, top_k=most * size, index=index)


def _sparse_settings(config: ModelFile) -> dict[str, Any]:
    """Return the keys that MiniMax's own files spell otherwise: the choice's sizes and layers, and which layers have
    experts."""
    section = config.object(_SECTION) if config.has(_SECTION) else config.with_values({})
    found = {own: section.values[name] for name, own in _M3_OWN_NAMES.items() if name in section.values}
    for file, key, name, kinds in (
        (section, "sparse_attention_freq", "layer_types", (FULL, _CHOSEN)),
        (config, "moe_layer_freq", "mlp_layer_types", (DENSE, SPARSE)),
    ):
        if key in file.values and not config.has(name):
            flags = file.values[key]
            if not isinstance(flags, list) or any(flag not in (0, 1) for flag in flags):
                raise file.error(key, f"{show(flags)} is not a list of 0 and 1")
            found[name] = [kinds[flag] for flag in flags]
    return found


MINIMAX_M3 = Family(
    name="MiniMax-M3",
    architectures=("MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3VLForCausalLM"),
    features="each KV head attends to blocks of keys that it chooses (MSA); clamped experts, and one that all tokens "
    "share; with a vision tower",
    examples=("MiniMaxAI/MiniMax-M3",),
    read=read_m3,
    read_vision=read_minimax_m3_vision,
    defaults={"torch_dtype": "bfloat16"},
)
