"""Ernie 4.5 (https://yiyan.baidu.com/blog/publication/ERNIE_Technical_Report.pdf), dense and with a mixture of experts:
Llama's layers with rotations of neighbouring pairs."""

from __future__ import annotations

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.deepseek_experts import SHARED_EXPERT, shared_experts
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.vision.siglip import read_paddleocr_vision

_THETA = 500_000.0
_MOE_LAYOUT = CheckpointLayout(
    renamed=((".mlp.moe_statics.", ".mlp.gate."), SHARED_EXPERT),
    left=("model.mtp",),
)


def read_ernie(config: ModelFile) -> DecoderConfig:
    """Read the dense models, whose projections all have biases or none."""
    bias = config.get("use_bias", bool, False)
    return config.decoder(LayerConfig(mixer=_attention(config, bias=bias), mlp=config.mlp(bias=bias)))


def read_paddleocr(config: ModelFile) -> DecoderConfig:
    """Read the decoder of PaddleOCR-VL, whose heads are rotated as Llama's."""
    bias = config.get("use_bias", bool, False)
    attention = config.attention(bias=bias, rope=config.rope(_THETA))
    return config.decoder(LayerConfig(mixer=attention, mlp=config.mlp(bias=bias)))


def read_ernie_moe(config: ModelFile) -> DecoderConfig:
    """Read which layers have experts. They are chosen by softmax scores with a correction, of a router in float32.
    Layers for multi-token prediction stay on disk."""
    if config.get("use_bias", bool, False):
        raise config.error("use_bias", "true is not supported beside experts, only false")
    routing = config.routing(keys=("moe_num_experts",), chosen_key="moe_k", renormalise=True)
    shared = shared_experts(config, "moe_num_shared_experts")
    experts = config.experts(routing, has_correction=True, has_wide_router=True, shared=shared)
    count = config.num_layers()
    first, last = config.get("moe_layer_start_index", int, 1), config.get("moe_layer_end_index", int, -1)
    interval = config.positive("moe_layer_interval", 1)
    with_experts = range(first, count if last == -1 else last + 1)
    is_sparse = (number in with_experts and (number + 1) % interval == 0 for number in range(count))
    attention = _attention(config, bias=False)
    layers = (LayerConfig(mixer=attention, mlp=mlp) for mlp in config.mlps(experts, is_sparse))
    return config.decoder(layers, layout=_MOE_LAYOUT)


def _attention(config: ModelFile, *, bias: bool) -> AttentionConfig:
    return config.attention(bias=bias, rope=config.rope(_THETA, is_interleaved=True))


ERNIE = Family(
    name="Ernie 4.5 dense",
    architectures=("Ernie4_5ForCausalLM",),
    features="neighbouring dimensions rotated in pairs",
    examples=("baidu/ERNIE-4.5-0.3B-PT",),
    read=read_ernie,
    ties_embeddings=True,
)
PADDLEOCR_VL = Family(
    name="PaddleOCR-VL",
    architectures=("PaddleOCRVLForConditionalGeneration",),
    features="Llama's layers with a vision tower (SigLIP); positions of three axes",
    examples=("PaddlePaddle/PaddleOCR-VL",),
    read=read_paddleocr,
    read_vision=read_paddleocr_vision,
    ties_embeddings=True,
)
ERNIE_MOE = Family(
    name="Ernie 4.5 MoE",
    architectures=("Ernie4_5_MoeForCausalLM",),
    features="a mixture of experts after dense layers, and experts that all tokens share",
    examples=("baidu/ERNIE-4.5-21B-A3B-PT", "baidu/ERNIE-4.5-300B-A47B-PT"),
    read=read_ernie_moe,
    ties_embeddings=True,
)
