"""Models that are not served: their kind is named, or the family whose keys their config.json has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nvcli.errors import ConfigError
from nvcli.models.config import load_model_config

LLAMA = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "initializer_range": 0.02,
    "model_type": "other",
    "transformers_version": "4.40.0",
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False}
MLA = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "n_routed_experts": 8}
QWEN3 = {"head_dim": 32, "attention_bias": False, "sliding_window": None}
NONE = "its config.json fits no supported family"


@pytest.mark.parametrize(
    ("name", "values", "told"),
    [
        ("AquilaForCausalLM", LLAMA, "the keys of LlamaForCausalLM (Llama 2, 3). If it computes the same, --hf-"),
        (
            "Qwen7ForCausalLM",
            {**LLAMA, **QWEN3},
            "the keys of Qwen3ForCausalLM (Qwen3 dense). If",
        ),
        ("OtherForCausalLM", {**LLAMA, "sliding_window": 128}, "the keys of MistralForCausalLM (Mistral). If"),
        ("OtherMoeForCausalLM", {**LLAMA, **EXPERTS}, "the keys of MixtralForCausalLM (Mixtral). If"),
        ("OtherForCausalLM", {**LLAMA, "gate": True}, "LlamaForCausalLM (Llama 2, 3) but for `gate`. If"),
        ("MiniCPMForCausalLM", {**LLAMA, "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4}, NONE),
        ("OtherForConditionalGeneration", {**LLAMA, "vision_config": {"depth": 2}}, "its vision tower is not computed"),
        ("OtherForConditionalGeneration", {"audio_config": {}, "text_config": LLAMA}, "it reads audio"),
        ("OtherForConditionalGeneration", {"text_config": {**MLA, "index_topk": 64}}, "(DSA)"),
        ("RwkvForCausalLM", {"attention_hidden_size": 64, "vocab_size": 9}, "its recurrent layers are of a kind"),
        ("OtherLMHeadModel", {"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 9}, NONE),
        ("OtherForCausalLM", {**LLAMA, **MLA, "index_topk": 64}, "a sparse choice of keys (DSA)"),
        ("OtherForCausalLM", {**LLAMA, **MLA}, "it has multi-head latent attention in layers of a form"),
        ("ZambaForCausalLM", {**LLAMA, "mamba_d_conv": 4}, "it has Mamba layers of a kind"),
        ("BertModel", {**LLAMA, "type_vocab_size": 2}, "it is an encoder, and nvcli serves decoders"),
        ("DistilBertForMaskedLM", LLAMA, "it is an encoder, and nvcli serves decoders"),
        ("T5ForConditionalGeneration", {"d_model": 64, "is_encoder_decoder": True}, "it is an encoder with a decoder"),
        ("OtherForSequenceClassification", LLAMA, "it is a classifier, and nvcli serves decoders, ModernBERT"),
        ("Qwen2ForProcessRewardModel", LLAMA, "its head is that of its own code; `nvcli classify` runs"),
        ("BailingMoeV2ForCausalLM", {**LLAMA, **EXPERTS}, "no model of it"),
    ],
)
def test_what_is_said_of_a_model_that_is_not_served(
    tmp_path: Path, name: str, values: dict[str, Any], told: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**values, "architectures": [name]}))
    with pytest.raises(ConfigError) as error:
        load_model_config(tmp_path)
    message = str(error.value)
    assert message.startswith(f"{tmp_path}/config.json: `architectures`: {name} is not supported: ")
    assert told in message
    assert message.endswith("; `nvcli models` lists what is supported")


def test_the_advice_can_be_followed(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "architectures": ["AquilaForCausalLM"]}))
    model = load_model_config(tmp_path, overrides={"architectures": ["LlamaForCausalLM"]})
    assert model.architecture == "LlamaForCausalLM"
