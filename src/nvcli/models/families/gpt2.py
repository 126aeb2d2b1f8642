"""GPT-2 (https://openai.com/index/better-language-models) and models with its names of keys and tensors: StarCoder
(https://arxiv.org/abs/2305.06161), GPT-Neo (https://github.com/EleutherAI/gpt-neo), GPT-J
(https://github.com/kingoflolz/mesh-transformer-jax) and CodeGen (https://arxiv.org/abs/2203.13474). All have LayerNorm
with biases, and all but the last two learned their positions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from nvcli.core.validation import show
from nvcli.models.checkpoint_layout import CheckpointLayout, starts_after
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mixers.mlp import PlainMLPConfig

_KEYS = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "n_inner": "intermediate_size",
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "layer_norm_eps",
}
_STARTS = {
    "wte.": "model.embed_tokens.",
    "wpe.": "model.embed_positions.",
    "h.": "model.layers.",
    "ln_f.": "model.norm.",
}
_MLP = ((".mlp.c_fc.", ".mlp.up_proj."), (".mlp.c_proj.", ".mlp.down_proj."))
_RENAMED = (
    (".attn.", ".self_attn."),
    (".self_attn.c_attn.", ".self_attn.qkv_proj."),
    (".self_attn.c_proj.", ".self_attn.o_proj."),
    *_MLP,
)
_RENAMED_NEO = ((".attn.attention.", ".self_attn."), (".self_attn.out_proj.", ".self_attn.o_proj."), *_MLP)
_RENAMED_J = (
    (".attn.", ".self_attn."),
    (".out_proj.", ".o_proj."),
    (".fc_in.", ".up_proj."),
    (".fc_out.", ".down_proj."),
)
_CODEGEN_GROUPS = 4
_NORMS = LayerNorms(before_attention="ln_1", before_mlp="ln_2")


def read_gpt2(config: ModelFile) -> DecoderConfig:
    """Read full attention in every layer; plain weights of linear layers are stored as [in, out]."""
    config.only(scale_attn_by_inverse_layer_idx=False)
    return _decoder(config, _attention(config), "gelu_new", CheckpointLayout(renamed=_RENAMED, transposes_linear=True))


def read_bigcode(config: ModelFile) -> DecoderConfig:
    """Read attention with one KV head, or as many as there are queries, with which they then lie head by head."""
    num_kv_heads = 1 if config.get("multi_query", bool, True) else None
    attention = _attention(config.replacing(num_key_value_heads=num_kv_heads))
    layout = CheckpointLayout(renamed=_RENAMED, qkv_groups=attention.num_kv_heads)
    return _decoder(config, attention, "gelu_pytorch_tanh", layout)


def read_gpt_neo(config: ModelFile) -> DecoderConfig:
    """Read which layers have a window; scores are not scaled."""
    attention = config.attention(scale=1.0, o_bias=True, rope=None)
    local = replace(attention, window=config.bounded(config.positive("window_size", 256)))
    of_layers = (local if kind == "local" else attention for kind in _kinds(config))
    return _decoder(config, of_layers, "gelu_new", CheckpointLayout(renamed=_RENAMED_NEO))


def read_gptj(config: ModelFile) -> DecoderConfig:
    """Read separate projections."""
    return _read_gptj(config, CheckpointLayout(renamed=_RENAMED_J))


def read_codegen(config: ModelFile) -> DecoderConfig:
    """Read fused projections, which lie in groups for the four chips that the models were trained on."""
    if config.positive("num_attention_heads") % _CODEGEN_GROUPS:
        raise config.error("num_attention_heads", f"must be a multiple of {_CODEGEN_GROUPS}")
    renamed = (*_RENAMED_J, (".qkv_proj.", ".qvk_proj."))
    return _read_gptj(config, CheckpointLayout(renamed=renamed, qkv_groups=_CODEGEN_GROUPS))


def _read_gptj(config: ModelFile, layout: CheckpointLayout) -> DecoderConfig:
    """Read attention and MLP side by side, the first dimensions of heads rotated, and a bias of the LM head."""
    head_dim = config.head_dim()
    rotated = config.positive("rotary_dim", 64, most=head_dim)
    attention = config.attention(rope=config.rope(default_partial=rotated / head_dim, is_interleaved=True))
    layer = LayerConfig(mixer=attention, mlp=_mlp(config, "gelu_new"), norms=replace(_NORMS, before_mlp=None))
    layout = replace(layout, starts=starts_after("transformer.", _STARTS))
    return config.decoder(layer, norm=config.layer_norm(), layout=layout, has_head_bias=True)


def _attention(config: ModelFile) -> AttentionConfig:
    """Read attention that does not rotate, and has biases."""
    config.only(add_cross_attention=False)
    attention = config.attention(bias=True, rope=None)
    return attention if config.get("scale_attn_weights", bool, True) else replace(attention, scale=1.0)


def _mlp(config: ModelFile, default: str) -> PlainMLPConfig:
    return config.plain_mlp(default, bias=True, default_size=4 * config.positive("hidden_size"))


def _decoder(
    config: ModelFile, attention: AttentionConfig | Iterable[AttentionConfig], default: str, layout: CheckpointLayout
) -> DecoderConfig:
    """Make the decoder of layers with this attention, whose MLPs have the activation `default` if the file has none."""
    of_layers = [attention] * config.num_layers() if isinstance(attention, AttentionConfig) else attention
    mlp = _mlp(config, default)
    return config.decoder(
        (LayerConfig(mixer=one, mlp=mlp, norms=_NORMS) for one in of_layers),
        norm=config.layer_norm(),
        layout=replace(layout, starts=starts_after("transformer.", _STARTS)),
        learned_positions=config.learned_positions(),
    )


def _kinds(config: ModelFile) -> list[str]:
    """Read the kind of each layer's attention from `attention_types`: lists of kinds, and how often each is
    repeated."""
    key, count = "attention_types", config.num_layers()
    found = config.values.get(key) or [[["global", "local"], count // 2]]
    try:
        kinds = [kind for pattern, times in found for _ in range(min(times, count)) for kind in pattern]
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != count or any(kind not in ("global", "local") for kind in kinds):
        raise config.error(key, f"{show(found)} does not say of {count} layers whether each is global or local")
    return kinds


GPT2 = Family(
    name="GPT-2",
    architectures=("GPT2LMHeadModel",),
    features="learned positions, LayerNorm and biases everywhere",
    examples=("openai-community/gpt2-xl", "distilbert/distilgpt2"),
    read=read_gpt2,
    ties_embeddings=True,
    keys=_KEYS,
)
BIGCODE = Family(
    name="StarCoder",
    architectures=("GPTBigCodeForCausalLM",),
    features="as GPT-2, with one KV head",
    examples=("bigcode/starcoder", "bigcode/starcoderbase-1b"),
    read=read_bigcode,
    ties_embeddings=True,
    keys=_KEYS,
)
GPT_NEO = Family(
    name="GPT-Neo",
    architectures=("GPTNeoForCausalLM",),
    features="as GPT-2, with windows in every second layer",
    examples=("EleutherAI/gpt-neo-2.7B", "roneneldan/TinyStories-33M"),
    read=read_gpt_neo,
    ties_embeddings=True,
    keys={**_KEYS, "num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"},
)
GPTJ = Family(
    name="GPT-J",
    architectures=("GPTJForCausalLM",),
    features="attention and MLP side by side, LayerNorm with biases, a part of each head rotated",
    examples=("EleutherAI/gpt-j-6b",),
    read=read_gptj,
    keys=_KEYS,
)
CODEGEN = Family(
    name="CodeGen",
    architectures=("CodeGenForCausalLM",),
    features="as GPT-J, with fused projections",
    examples=("Salesforce/codegen-16B-mono", "Salesforce/codegen-350M-mono"),
    read=read_codegen,
    keys=_KEYS,
)
