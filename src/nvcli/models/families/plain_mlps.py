"""Families whose MLPs have no gate: Arcee's AFM-4.5B (https://huggingface.co/arcee-ai/AFM-4.5B), Apertus
(https://arxiv.org/abs/2509.14233), Nemotron (https://arxiv.org/abs/2402.16819), StarCoder 2
(https://arxiv.org/abs/2402.19173), Jais 2 (https://huggingface.co/inceptionai/Jais-2-8B-Chat) and nanochat
(https://github.com/karpathy/nanochat). Nemotron, StarCoder 2 and Jais 2 have LayerNorm with biases; nanochat has norms
without weights."""

from __future__ import annotations

from dataclasses import replace

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import FULL, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.mixer import NormConfig

_APERTUS_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 12_000_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def read_arcee(config: ModelFile) -> DecoderConfig:
    """Read Llama's attention, and MLPs without a gate."""
    config.layer_types(supported=(FULL,))
    attention = config.attention(bias=config.bias(), rope=config.rope())
    mlp = config.plain_mlp("relu2", bias=config.mlp_bias())
    return config.decoder(LayerConfig(mixer=attention, mlp=mlp))


def read_apertus(config: ModelFile) -> DecoderConfig:
    """Read normed queries and keys; the layers' activations have numbers of their own."""
    norms = LayerNorms(before_attention="attention_layernorm", before_mlp="feedforward_layernorm")
    attention = config.attention(qk_norm="head", bias=config.bias(), rope=config.rope(default_theta=None))
    return config.decoder(LayerConfig(mixer=attention, mlp=config.plain_mlp("xielu"), norms=norms))


def read_apertus1p5(config: ModelFile) -> DecoderConfig:
    """Read Apertus 1.5, whose LM head has no rows for what stands for images and sounds; so this is the vocabulary."""
    return replace(read_apertus(config), layout=CheckpointLayout(longer=("model.embed_tokens.weight",)))


def read_nemotron(config: ModelFile) -> DecoderConfig:
    """Read half-rotated heads. Weights of norms are stored as differences from 1."""
    attention = config.attention(bias=config.bias(), rope=config.rope(default_partial=0.5))
    mlp = config.plain_mlp("relu2", bias=config.mlp_bias())
    return config.decoder(LayerConfig(mixer=attention, mlp=mlp), norm=config.layer_norm("norm_eps", weight_offset=1.0))


def read_starcoder2(config: ModelFile) -> DecoderConfig:
    """Read one window for all layers, or none, and biases everywhere."""
    bias = config.get("use_bias", bool, True)
    attention = config.attention(window=config.bounded(config.window()), bias=bias, rope=config.rope())
    layer = LayerConfig(mixer=attention, mlp=config.plain_mlp("gelu_pytorch_tanh", bias=bias))
    layout = CheckpointLayout(renamed=((".mlp.c_fc", ".mlp.up_proj"), (".mlp.c_proj", ".mlp.down_proj")))
    return config.decoder(layer, norm=config.layer_norm("norm_epsilon"), layout=layout)


def read_jais2(config: ModelFile) -> DecoderConfig:
    """Read Arcee's layers, with LayerNorm and, by default, biases everywhere."""
    attention = config.attention(bias=config.bias(default=True), rope=config.rope())
    mlp = config.plain_mlp("relu2", bias=config.mlp_bias(default=True))
    return config.decoder(LayerConfig(mixer=attention, mlp=mlp), norm=config.layer_norm())


def read_nanochat(config: ModelFile) -> DecoderConfig:
    """Read heads that the rotation turns back, and normed embeddings. A norm without weights may as well come before
    the rotation."""
    attention = config.attention(
        qk_norm="head", weighs_norms=False, bias=config.bias(), rope=replace(config.rope(), turns_back=True)
    )
    norm = NormConfig(eps=config.positive_number("rms_norm_eps", 1e-6), has_weight=False)
    return config.decoder(
        LayerConfig(mixer=attention, mlp=config.plain_mlp("relu2")),
        norm=norm,
        embedding_norm=norm,
        logit_soft_cap=config.optional_number("final_logit_softcapping", 15.0),
        layout=CheckpointLayout(renamed=((".mlp.fc1", ".mlp.up_proj"), (".mlp.fc2", ".mlp.down_proj"))),
    )


ARCEE = Family(
    name="Arcee AFM",
    architectures=("ArceeForCausalLM",),
    features="MLPs without a gate, with relu²",
    examples=("arcee-ai/AFM-4.5B",),
    read=read_arcee,
)
APERTUS = Family(
    name="Apertus",
    architectures=("ApertusForCausalLM",),
    features="normed queries and keys; MLPs without a gate, with xIELU",
    examples=("swiss-ai/Apertus-8B-Instruct-2509", "swiss-ai/Apertus-70B-Instruct-2509"),
    read=read_apertus,
    defaults={"rope_parameters": _APERTUS_ROPE},
)
APERTUS1P5 = Family(
    name="Apertus 1.5",
    architectures=("Apertus1p5ForConditionalGeneration", "Apertus1p5TextForCausalLM"),
    features="as Apertus; text alone",
    examples=("swiss-ai/Apertus-v1.5-8B",),
    read=read_apertus1p5,
    keys={"output_vocab_size": "vocab_size"},
    defaults=APERTUS.defaults,
)
NEMOTRON = Family(
    name="Nemotron dense",
    architectures=("NemotronForCausalLM",),
    features="MLPs without a gate, with relu²; LayerNorm with biases, half of each head rotated",
    examples=("nvidia/Minitron-8B-Base", "nvidia/Nemotron-4-340B-Instruct"),
    read=read_nemotron,
)
STARCODER2 = Family(
    name="StarCoder 2",
    architectures=("Starcoder2ForCausalLM",),
    features="MLPs without a gate; LayerNorm, and biases everywhere",
    examples=("bigcode/starcoder2-15b", "bigcode/starcoder2-3b"),
    read=read_starcoder2,
    ties_embeddings=True,
)
JAIS2 = Family(
    name="Jais 2",
    architectures=("Jais2ForCausalLM",),
    features="MLPs without a gate, with relu²; LayerNorm, and biases everywhere",
    examples=("inceptionai/Jais-2-8B-Chat", "inceptionai/Jais-2-70B-Chat"),
    read=read_jais2,
)
NANOCHAT = Family(
    name="nanochat",
    architectures=("NanoChatForCausalLM",),
    features="MLPs without a gate, with relu²; norms without weights, of the embeddings too",
    examples=("nanochat-students/nanochat-d20",),
    read=read_nanochat,
)
