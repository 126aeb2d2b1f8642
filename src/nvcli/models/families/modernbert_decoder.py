"""ModernBERT (https://arxiv.org/abs/2412.13663) and its decoders (Ettin, https://arxiv.org/abs/2507.11412): windows in
two of three layers, normed embeddings, and a prediction head before the LM head."""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.checkpoint_layout import CheckpointLayout, starts_after
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import FULL, SLIDING, ModelFile
from nvcli.models.layer_config import PREDICTION, DecoderConfig, LayerNorms, PredictionHead
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mixers.mixer import NormConfig

_STARTS = {
    "embeddings.tok_embeddings.": "model.embed_tokens.",
    "embeddings.norm.": "model.embedding_norm.",
    "layers.": "model.layers.",
    "final_norm.": "model.norm.",
}
_LAYOUT = CheckpointLayout(
    starts=(
        *starts_after("model.", _STARTS),
        *((head, f"{PREDICTION}.") for head in ("lm_head.", "head.")),
        ("decoder.", "lm_head."),
        ("classifier.", "score."),
    ),
    renamed=(
        (".attn_norm.", ".input_layernorm."),
        (".mlp_norm.", ".post_attention_layernorm."),
        (".attn.Wo.", ".self_attn.o_proj."),
        (".attn.Wqkv.", ".self_attn.qkv_proj."),
        (".attn.", ".self_attn."),
        (".mlp.Wi.", ".mlp.gate_up_proj."),
        (".mlp.Wo.", ".mlp.down_proj."),
    ),
)
_THETAS = {FULL: ("global_rope_theta", 160_000.0), SLIDING: ("local_rope_theta", 10_000.0)}
"""Older names of the bases of rotations, and their defaults."""


def read(config: ModelFile) -> DecoderConfig:
    """Read full attention in every third layer, and in the others half of the window that `local_attention` says. The
    first layer has no norm before attention: the embeddings are normed."""
    norm = NormConfig(
        eps=config.positive_number("norm_eps", 1e-5), kind="layer", has_bias=config.get("norm_bias", bool, False)
    )
    activation = config.plain_activation("gelu", key="classifier_activation")
    if activation == "xielu":
        raise config.error("classifier_activation", "xielu is not supported here")
    every = config.positive("global_attn_every_n_layers", 3)
    attention = {kind: _attention(config, kind) for kind in (FULL, SLIDING)}
    mlp = config.mlp(key="hidden_activation", default="gelu", bias=config.mlp_bias())
    first, *others = config.layers(config.layer_kinds(lambda number: number % every == 0), attention, mlp)
    return config.decoder(
        [replace(first, norms=LayerNorms(before_attention=None)), *others],
        norm=norm,
        embedding_norm=norm,
        prediction_head=PredictionHead(
            activation=activation,
            has_bias=config.get("classifier_bias", bool, False),
        ),
        has_head_bias=config.get("decoder_bias", bool, True),
        layout=_LAYOUT,
    )


def _attention(config: ModelFile, kind: str) -> AttentionConfig:
    key, theta = _THETAS[kind]
    config = config.replacing(num_key_value_heads=None, head_dim=None, rope_theta=config.values.get(key))
    window = config.bounded(config.positive("local_attention", 128, least=2) // 2) if kind == SLIDING else None
    return config.attention(bias=config.bias(), rope=config.rope(theta, layer_type=kind), window=window)


MODERNBERT_DECODER = Family(
    name="ModernBERT decoder",
    architectures=("ModernBertDecoderForCausalLM",),
    encoders=("ModernBertModel", "ModernBertForMaskedLM", "ModernBertForSequenceClassification"),
    features="LayerNorm, windows in two of three layers, gated GELU, a prediction head; also the encoder",
    examples=("jhu-clsp/ettin-decoder-1b", "Alibaba-NLP/gte-modernbert-base"),
    read=read,
    ties_embeddings=True,
)
