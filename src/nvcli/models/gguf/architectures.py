"""How llama.cpp names and stores the models of each family; `settings.py` reads their settings.

Names: github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py; what is changed on the way to a file:
convert_hf_to_gguf.py there. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from nvcli.core.validation import show
from nvcli.errors import LoadError
from nvcli.models.gguf import configs, expert_configs, hybrid_configs
from nvcli.models.gguf.header import GGUFHeader, GGUFTensor
from nvcli.models.gguf.settings import Settings, common
from nvcli.models.json_file import JsonFile
from nvcli.models.tensor_info import GGUFOrder

_IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_NAMES_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    # Names whose ends differ too.
    "attn_sinks.weight": "self_attn.sinks",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
"""The names of modules in GGUF and in the decoder (`geometry.py`)."""
_SECOND_NORM = {"post_attention_norm": "post_attention_layernorm"}
_DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    **_SECOND_NORM,
}
_SHORT_CONVOLUTIONS = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "in_proj": "conv.in_proj",
    "conv": "conv.conv",
    "out_proj": "conv.out_proj",
}
_LATENTS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_KIMI_DELTA = {
    **_LATENTS,
    **{f"ssm_conv1d_{one}": f"self_attn.{one}_conv1d" for one in "qkv"},
    **{f"ssm_{one}": f"self_attn.{one}_proj" for one in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_beta": "self_attn.b_proj",
    "ssm_norm": "self_attn.o_norm",
    "ssm_a": "self_attn.A_log",
    "ssm_dt.bias": "self_attn.dt_bias",
}
_WHOLE_VALUES = ("attn_qkv", "attn_gate", "ssm_conv1d")
_OF_VALUE_HEADS = (*_WHOLE_VALUES, "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")
"""Modules of a delta net with rows for each number, or for each head, of its values."""
_MAMBA = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_dt.bias": "mamba.dt_bias",
}
_MIXERS = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "ffn_up_exps": "mixer.experts.up_proj",
    "ffn_down_exps": "mixer.experts.down_proj",
    "ffn_up_shexp": "mixer.shared_experts.up_proj",
    "ffn_down_shexp": "mixer.shared_experts.down_proj",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    **{name: wanted.replace("mamba.", "mixer.") for name, wanted in _MAMBA.items()},
}
"""Names in Nemotron-H's files, where each block is a layer."""
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj"}
_NORMS_AROUND = {
    **_SECOND_NORM,
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GEMMA4 = {
    **_NORMS_AROUND,
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_up_exps": "experts.gate_up_proj",
    "ffn_down_exps": "experts.down_proj",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A family in llama.cpp."""

    name: str
    """Its name in config.json."""
    config: Callable[[Settings], dict[str, Any]] = common
    """Makes config.json of a file's settings, but for the keys that all architectures have."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names in a layer that differ from `_NAMES_IN_LAYER`."""
    pairs_rows: bool = False
    """Whether rows of queries and keys that are rotated together lie side by side."""
    norm_offset: float = 0.0
    """A number that files have added to the weights of norms."""
    tiles_values: bool = False
    """Whether the heads of a delta net's values lie in another order: not those of a key head after each other, but the
    first of each key head, then the second."""

    def decoder_name(self, stored: str) -> str:
        """Return the decoder's name of a tensor in the file; unknown names stay as they are."""
        module, _, kind = stored.rpartition(".")
        if found := _IN_LAYER.fullmatch(stored):
            layer = f"model.layers.{found[1]}"
            known, module = {**_NAMES_IN_LAYER, **self.names}, _module_of(stored)
            if found[2] in known:
                return f"{layer}.{known[found[2]]}"
            return f"{layer}.{known[module]}.{kind}" if module in known else stored
        return f"{_NAMES[module]}.{kind}" if module in _NAMES else stored

    def row_order(self, tensor: GGUFTensor, found: Settings) -> GGUFOrder | None:
        """Return the order of a tensor's rows in the file; None: they are where they belong."""
        module, keys = _module_of(tensor.name), found.keys
        if self.pairs_rows and module in ("attn_q", "attn_k"):
            num_heads = keys.positive("attention.head_count") if module == "attn_q" else found.most_kv_heads
            return GGUFOrder(2, tensor.shape[0] // num_heads // 2)
        if self.tiles_values and module in _OF_VALUE_HEADS:
            return _value_heads(keys, tensor.shape[0] if module in _WHOLE_VALUES else None)
        return None

    def column_order(self, tensor: GGUFTensor, found: Settings) -> GGUFOrder | None:
        """Return the order of its columns."""
        is_tiled = self.tiles_values and _module_of(tensor.name) == "ssm_out"
        return _value_heads(found.keys, tensor.shape[-1]) if is_tiled else None

    def offset(self, tensor: GGUFTensor) -> float:
        """Return a number that its values lack."""
        module = _module_of(tensor.name)
        return -self.norm_offset if module.endswith("norm") and module != "ssm_norm" else 0.0


def _module_of(stored: str) -> str:
    """Return the last part of a module's name in a file."""
    return stored.removesuffix(".weight").removesuffix(".bias").rpartition(".")[2]


def layer_of(stored: str) -> int:
    """Return the number of the layer that a tensor in a file belongs to; -1: to none."""
    match = _IN_LAYER.fullmatch(stored)
    return -1 if match is None else int(match[1])


def _value_heads(keys: JsonFile, size: int | None) -> GGUFOrder:
    """Return the order of a delta net's value heads: of a row each, or of all rows or columns that follow those of
    queries and keys, which `size` counts together."""
    num_keys, num_values = keys.positive("ssm.group_count"), keys.positive("ssm.time_step_rank")
    if size is None:
        return GGUFOrder(num_keys, num_values // num_keys)
    all_values = keys.positive("ssm.inner_size")
    return GGUFOrder(num_keys, num_values // num_keys, all_values // num_values, size - all_values)


_INDEXED_LATENTS = {
    **_LATENTS,
    "indexer.attn_q_b.weight": "self_attn.indexer.wq_b.weight",
    "indexer.attn_k.weight": "self_attn.indexer.wk.weight",
    "indexer.k_norm.weight": "self_attn.indexer.k_norm.weight",
    "indexer.k_norm.bias": "self_attn.indexer.k_norm.bias",
    "indexer.proj.weight": "self_attn.indexer.weights_proj.weight",
}
_AFMOE = {
    **_SECOND_NORM,
    "attn_gate": "self_attn.g_proj",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(name="LlamaForCausalLM", config=configs.llama, pairs_rows=True),
    "mistral3": Architecture(name="Ministral3ForCausalLM", config=configs.mistral3, pairs_rows=True),
    "smollm3": Architecture(name="SmolLM3ForCausalLM", config=configs.llama, pairs_rows=True),
    "granite": Architecture(name="GraniteForCausalLM", config=configs.granite, pairs_rows=True),
    "granitemoe": Architecture(name="GraniteForCausalLM", config=configs.granite_moe, pairs_rows=True),
    "granitehybrid": Architecture(
        name="GraniteMoeHybridForCausalLM", config=hybrid_configs.granite_hybrid, names=_MAMBA, pairs_rows=True
    ),
    "nemotron_h": Architecture(name="NemotronHForCausalLM", config=hybrid_configs.nemotron_h, names=_MIXERS),
    "nemotron_h_moe": Architecture(name="NemotronHForCausalLM", config=hybrid_configs.nemotron_h, names=_MIXERS),
    "llama4": Architecture(name="Llama4ForCausalLM", config=expert_configs.llama4),
    "qwen2": Architecture(name="Qwen2ForCausalLM", config=configs.qwen2),
    "qwen2moe": Architecture(name="Qwen2MoeForCausalLM", config=expert_configs.qwen2_moe),
    "qwen3": Architecture(name="Qwen3ForCausalLM", config=configs.qwen2),
    "qwen3moe": Architecture(name="Qwen3MoeForCausalLM", config=expert_configs.qwen3_moe),
    # The text parts of models that read images, of whose positions text needs one axis.
    "qwen2vl": Architecture(name="Qwen2ForCausalLM", config=configs.qwen2),
    "qwen3vl": Architecture(name="Qwen3ForCausalLM", config=configs.qwen2),
    "qwen3vlmoe": Architecture(name="Qwen3MoeForCausalLM", config=expert_configs.qwen3_moe),
    "qwen3next": Architecture(
        name="Qwen3_5MoeForCausalLM", config=hybrid_configs.qwen3_next, names=_DELTA_NET, norm_offset=1.0
    ),
    "qwen35": Architecture(
        name="Qwen3_5ForCausalLM",
        config=hybrid_configs.qwen35,
        names=_DELTA_NET,
        norm_offset=1.0,
        tiles_values=True,
    ),
    "qwen35moe": Architecture(
        name="Qwen3_5MoeForCausalLM",
        config=hybrid_configs.qwen35_moe,
        names=_DELTA_NET,
        norm_offset=1.0,
        tiles_values=True,
    ),
    "gemma": Architecture(name="GemmaForCausalLM", norm_offset=1.0),
    "gemma2": Architecture(name="Gemma2ForCausalLM", config=configs.gemma2, names=_NORMS_AROUND, norm_offset=1.0),
    "gemma3": Architecture(name="Gemma3ForCausalLM", config=configs.gemma3, names=_NORMS_AROUND, norm_offset=1.0),
    "gemma4": Architecture(name="Gemma4ForCausalLM", config=configs.gemma4, names=_GEMMA4),
    "phi3": Architecture(name="Phi3ForCausalLM", config=configs.phi3, names=_FUSED_MLP),
    "olmo2": Architecture(name="Olmo2ForCausalLM", config=configs.olmo2, names=_NORMS_AROUND),
    "exaone4": Architecture(name="Exaone4ForCausalLM", config=configs.exaone4, names=_NORMS_AROUND),
    "glm4": Architecture(
        name="Glm4ForCausalLM",
        config=configs.glm4,
        names={
            **_FUSED_MLP,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm4moe": Architecture(name="Glm4MoeForCausalLM", config=expert_configs.glm4_moe, names=_SECOND_NORM),
    "gpt-oss": Architecture(name="GptOssForCausalLM", config=expert_configs.gpt_oss, names=_SECOND_NORM),
    "deepseek2": Architecture(name="DeepseekV3ForCausalLM", config=expert_configs.deepseek2, names=_LATENTS),
    "glm-dsa": Architecture(name="GlmMoeDsaForCausalLM", config=expert_configs.glm_dsa, names=_INDEXED_LATENTS),
    "kimi-linear": Architecture(name="KimiLinearForCausalLM", config=hybrid_configs.kimi_linear, names=_KIMI_DELTA),
    "afmoe": Architecture(name="AfmoeForCausalLM", config=expert_configs.afmoe, names=_AFMOE),
    "mimo2": Architecture(name="MiMoV2FlashForCausalLM", config=expert_configs.mimo2),
    "dots1": Architecture(name="Dots1ForCausalLM", config=expert_configs.dots1),
    "exaone-moe": Architecture(name="ExaoneMoeForCausalLM", config=expert_configs.exaone_moe),
    "lfm2": Architecture(name="Lfm2ForCausalLM", config=hybrid_configs.lfm2, names=_SHORT_CONVOLUTIONS),
    "lfm2moe": Architecture(name="Lfm2MoeForCausalLM", config=hybrid_configs.lfm2_moe, names=_SHORT_CONVOLUTIONS),
    "mistral4": Architecture(name="Mistral4ForCausalLM", config=expert_configs.mistral4, names=_LATENTS),
    "minimax-m2": Architecture(name="MiniMaxM2ForCausalLM", config=expert_configs.minimax_m2),
    "olmoe": Architecture(name="OlmoeForCausalLM", config=expert_configs.olmoe),
    "ernie4_5": Architecture(name="Ernie4_5ForCausalLM", config=configs.ernie),
    "ernie4_5-moe": Architecture(name="Ernie4_5_MoeForCausalLM", config=expert_configs.ernie_moe),
    "hunyuan-dense": Architecture(name="HunYuanDenseV1ForCausalLM"),
    "hunyuan-moe": Architecture(name="HunYuanMoEV1ForCausalLM", config=expert_configs.hunyuan_moe),
    "seed_oss": Architecture(name="SeedOssForCausalLM", config=configs.seed_oss, names=_SECOND_NORM),
    "command-r": Architecture(name="CohereForCausalLM", config=configs.cohere),
    "cohere2": Architecture(name="Cohere2ForCausalLM", config=configs.cohere2),
}
"""The families that are read, by `general.architecture`."""


def find_architecture(header: GGUFHeader) -> tuple[str, Architecture]:
    """Return the architecture of a file's model, by its name in the file. Raises LoadError if it is not supported."""
    name = header.metadata.get("general.architecture")
    kind = header.metadata.get("general.type", "model")
    if kind != "model" or name == "clip":
        reads_images = name == "clip" or kind == "mmproj"
        images = ", which reads text alone: a tower for images is read from *.safetensors" if reads_images else ""
        raise LoadError(
            f"{header.file}: no language model (`general.type`: {show(kind)}, `general.architecture`: {show(name)}); "
            f"name the file that holds the model{images}"
        )
    return str(name), check_supported(str(header.file), name)


def check_supported(place: str, name: object) -> Architecture:
    """Return the architecture of this name. Raises LoadError, which begins with the file or model `place`, if it is not
    supported."""
    if isinstance(name, str) and name in ARCHITECTURES:
        return ARCHITECTURES[name]
    raise LoadError(
        f"{place}: `general.architecture`: {show(name)} is not supported in GGUF: give the repository that it was made "
        "from, with its *.safetensors files (often the same name without -GGUF); supported in GGUF: "
        f"{', '.join(ARCHITECTURES)}"
    )
