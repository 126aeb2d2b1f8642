"""How llama.cpp names and stores the models of each family: their settings, as config.json has them, and their tensors.

Settings and names: github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py; what is changed on the way to a
file: convert_hf_to_gguf.py there. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nvcli.core.validation import show
from nvcli.errors import LoadError
from nvcli.models.gguf.header import GGUFHeader, GGUFTensor
from nvcli.models.json_file import JsonFile
from nvcli.models.tensor_info import GGUFOrder

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that are settings: divisors of the frequencies of rotary positions."""
_IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "token_embd_norm": "model.norm",
    "output": "lm_head",
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
}
"""The names of modules in GGUF and in the decoder (`geometry.py`)."""
_WHOLE_NAMES = {
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
}
"""Names of a layer's tensors whose ends differ too."""
_DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    "post_attention_norm": "post_attention_layernorm",
}
_SHORT_CONVOLUTIONS = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "in_proj": "conv.in_proj",
    "conv": "conv.conv",
    "out_proj": "conv.out_proj",
}
_HEADS = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
"""The keys that count the heads of queries and keys."""
_WHOLE_VALUES = ("attn_qkv", "attn_gate", "ssm_conv1d")
_OF_VALUE_HEADS = (*_WHOLE_VALUES, "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt")
"""Modules of a delta net with rows for each number, or for each head, of its values."""
_FUSED_MLP = {"ffn_up": "mlp.gate_up_proj"}
_NORMS_ON_BOTH_SIDES = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a model in a file."""

    keys: JsonFile
    """The keys of its architecture, without the architecture's name."""
    header: GGUFHeader

    @property
    def tensors(self) -> Collection[str]:
        return self.header.tensors.keys()

    @property
    def num_layers(self) -> int:
        """The layers of the decoder; a head that drafts tokens is counted in the file."""
        return self.keys.positive("block_count") - self.keys.get("nextn_predict_layers", int, 0)

    @property
    def head_dim(self) -> int | None:
        """The size of a head; None: that of a share of the hidden size."""
        key = "attention.key_length"
        return self.keys.positive(key) if self.keys.has(key) else None

    def has_bias(self, module: str) -> bool:
        return f"blk.0.{module}.bias" in self.tensors

    def window_types(self) -> dict[str, Any]:
        """Return `layer_types`, if the file says which layers have windows."""
        found = self.keys.values.get("attention.sliding_window_pattern")
        return {"layer_types": [_SLIDING if one else _FULL for one in found]} if isinstance(found, list) else {}

    def rope(self) -> dict[str, Any]:
        """Return `rope_parameters`."""
        keys = self.keys
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": keys.positive_number("rope.freq_base", 10_000.0),
        }
        if keys.has("rope.dimension_count"):
            whole = self.head_dim or keys.positive("embedding_length") // keys.positive("attention.head_count")
            partial = keys.positive("rope.dimension_count") / whole
            rope |= {"partial_rotary_factor": partial} if partial < 1 else {}
        kind = keys.get("rope.scaling.type", str, "none")
        if "rope_freqs.weight" in self.tensors:
            rope |= self._divided("rope_freqs.weight", "rope_freqs.weight", {"attention_factor": 1.0})
        elif "rope_factors_short.weight" in self.tensors:
            rope |= self._divided("rope_factors_short.weight", "rope_factors_long.weight", {})
        elif kind == "linear":
            rope |= {"rope_type": "linear", "factor": keys.positive_number("rope.scaling.factor")}
        elif kind == "yarn":
            rope |= {
                "rope_type": "yarn",
                "factor": keys.positive_number("rope.scaling.factor"),
                "original_max_position_embeddings": keys.positive("rope.scaling.original_context_length"),
                **{f"beta_{one}": keys.get(f"rope.scaling.yarn_beta_{one}", float, 0.0) for one in ("fast", "slow")},
            }
        elif kind not in ("none", "longrope"):
            raise keys.error("rope.scaling.type", f"{show(kind)} is not supported; supported: none, linear, yarn")
        return rope

    def _divided(self, short: str, long: str, others: dict[str, Any]) -> dict[str, Any]:
        """Return rotary positions whose frequencies are divided by factors, as Llama 3's and Phi-3's are."""
        longest = self.keys.positive("context_length")
        return {
            "rope_type": "longrope",
            "short_factor": self.header.read_floats(short),
            "long_factor": self.header.read_floats(long),
            "original_max_position_embeddings": self.keys.positive("rope.scaling.original_context_length", longest),
            **others,
        }


def _common(found: Settings) -> dict[str, Any]:
    """Return what the config.json of nearly all families has."""
    keys = found.keys
    return {
        "hidden_size": keys.positive("embedding_length"),
        "num_hidden_layers": found.num_layers,
        "intermediate_size": keys.get("feed_forward_length", int, 0) or None,
        "num_attention_heads": keys.positive("attention.head_count"),
        "num_key_value_heads": keys.positive("attention.head_count_kv", keys.positive("attention.head_count")),
        "head_dim": found.head_dim,
        "max_position_embeddings": keys.positive("context_length"),
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon", float, 0.0) or None,
        "rope_parameters": found.rope(),
        "attention_bias": found.has_bias("attn_q"),
        "mlp_bias": found.has_bias("ffn_down"),
        "sliding_window": keys.get("attention.sliding_window", int, 0) or None,
    }


def _llama(found: Settings) -> dict[str, Any]:
    keys = found.keys
    whole_heads = keys.positive("rope.dimension_count") if keys.has("rope.dimension_count") else None
    config = {**_common(found), "sliding_window": None, "head_dim": found.head_dim or whole_heads}
    config["rope_parameters"].pop("partial_rotary_factor", None)
    if not keys.get("expert_count", int, 0):
        return config
    return {
        **config,
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
    }


def _mistral3(found: Settings) -> dict[str, Any]:
    keys, config = found.keys, _llama(found)
    weight = keys.get("rope.scaling.yarn_log_multiplier", float, 0.0)
    growth = keys.get("attention.temperature_scale", float, 0.0)
    config["rope_parameters"] |= {"mscale": weight, "mscale_all_dim": weight} if weight else {}
    config["rope_parameters"] |= {"llama_4_scaling_beta": growth} if growth else {}
    return config


def _lfm2(found: Settings) -> dict[str, Any]:
    key = "attention.head_count_kv"
    heads = found.keys.values.get(key)
    if not isinstance(heads, list) or not heads:
        raise found.keys.error(key, "no list of a number for each layer, 0 for those of convolutions")
    config = _common(replace(found, keys=found.keys.replacing(**{key: max(heads)})))
    return {
        **config,
        "layer_types": [_FULL if count else "conv" for count in heads],
        "block_auto_adjust_ff_dim": False,
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": found.keys.positive("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in found.tensors),
    }


def _qwen2(found: Settings) -> dict[str, Any]:
    return {**_common(found), "sliding_window": None}  # llama.cpp has no windows for it


def _experts(found: Settings, *, renormalises: bool) -> dict[str, Any]:
    """Return the keys of Qwen's mixtures of experts."""
    keys = found.keys
    used = keys.positive("expert_used_count")
    size = keys.get("feed_forward_length", int, 0) // used  # of older files
    return {
        **_qwen2(found),
        "num_experts": keys.positive("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.positive("expert_feed_forward_length", size or None),
        "norm_topk_prob": renormalises,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _qwen2_moe(found: Settings) -> dict[str, Any]:
    shared = found.keys.get("expert_shared_feed_forward_length", int, 0)
    shared = shared or found.keys.positive("feed_forward_length")  # of older files
    return {**_experts(found, renormalises=False), "shared_expert_intermediate_size": shared}


def _qwen35(found: Settings) -> dict[str, Any]:
    keys = found.keys
    num_values = keys.positive("ssm.time_step_rank")
    sizes = {
        "full_attention_interval": keys.positive("full_attention_interval", 4),
        "linear_num_key_heads": keys.positive("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_key_head_dim": keys.positive("ssm.state_size"),
        "linear_value_head_dim": keys.positive("ssm.inner_size") // num_values,
        "linear_conv_kernel_dim": keys.positive("ssm.conv_kernel"),
        "mtp_num_hidden_layers": 0,
    }
    return {**_qwen2(found), **sizes}


def _qwen35_moe(found: Settings) -> dict[str, Any]:
    return {**_qwen2_moe(found), **_qwen35(found)}


def _glm4(found: Settings) -> dict[str, Any]:
    sections = "rope.dimension_sections"
    if found.keys.has(sections):
        raise found.keys.error(sections, "the text part of GLM-4V is not supported in GGUF; supported: GLM-4")
    return _common(found)


def _glm4_moe(found: Settings) -> dict[str, Any]:
    keys = found.keys
    return {
        **_common(found),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in found.tensors,
        "first_k_dense_replace": keys.get("leading_dense_block_count", int, 0),
        "n_routed_experts": keys.positive("expert_count"),
        "n_shared_experts": keys.get("expert_shared_count", int, 0),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "n_group": keys.positive("expert_group_count", 1),
        "topk_group": keys.positive("expert_group_used_count", 1),
        "norm_topk_prob": keys.get("expert_weights_norm", bool, False),
        "routed_scaling_factor": keys.positive_number("expert_weights_scale", 1.0),
        "num_nextn_predict_layers": 0,
    }


def _gemma2(found: Settings) -> dict[str, Any]:
    keys, config = found.keys, _common(found)
    return {
        **config,
        "query_pre_attn_scalar": _query_scalar(config, largest=46),
        "attn_logit_softcapping": keys.positive_number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.positive_number("final_logit_softcapping", 30.0),
        **found.window_types(),
    }


def _gemma3(found: Settings) -> dict[str, Any]:
    keys, config = found.keys, _common(found)
    local = {"rope_type": "default", "rope_theta": keys.positive_number("rope.freq_base_swa", 10_000.0)}
    return {
        **config,
        "query_pre_attn_scalar": _query_scalar(config, largest=62),
        "rope_parameters": {_FULL: config["rope_parameters"], _SLIDING: local},
        "final_logit_softcapping": keys.get("final_logit_softcapping", float, 0.0) or None,
        **found.window_types(),
    }


def _query_scalar(config: Mapping[str, Any], *, largest: int) -> float:
    """Return `query_pre_attn_scalar`, which files leave out: in the largest model of a family, which has so many
    layers, it is not the size of a head."""
    share: float = config["hidden_size"] / config["num_attention_heads"]
    return share if config["num_hidden_layers"] == largest else float(config["head_dim"] or share)


def _granite(found: Settings) -> dict[str, Any]:
    keys = found.keys
    scales = {
        "attention_multiplier": keys.positive_number("attention.scale", 1.0),
        "embedding_multiplier": keys.positive_number("embedding_scale", 1.0),
        "residual_multiplier": keys.positive_number("residual_scale", 1.0),
        "logits_scaling": keys.positive_number("logit_scale", 1.0),
    }
    return {**_llama(found), **scales}


def _granite_moe(found: Settings) -> dict[str, Any]:
    shared = found.keys.get("expert_shared_feed_forward_length", int, 0)
    return {**_granite(found), "architectures": ["GraniteMoeForCausalLM"], "shared_intermediate_size": shared}


def _phi3(found: Settings) -> dict[str, Any]:
    config = _common(found)
    original = config["rope_parameters"].get("original_max_position_embeddings", config["max_position_embeddings"])
    return {**config, "original_max_position_embeddings": original}


def _olmo2(found: Settings) -> dict[str, Any]:
    config = {**_common(found), **found.window_types()}
    if config["sliding_window"] is None:
        return config
    rope = config.pop("rope_parameters")  # stretched in layers without windows alone
    scaling = None if rope["rope_type"] == "default" else rope
    return {**config, "architectures": ["Olmo3ForCausalLM"], "rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def _cohere2(found: Settings) -> dict[str, Any]:
    keys = found.keys
    return {
        **_common(found),
        "layer_norm_eps": keys.positive_number("attention.layer_norm_epsilon"),
        "logit_scale": keys.positive_number("logit_scale"),
        **found.window_types(),
    }


def _seed_oss(found: Settings) -> dict[str, Any]:
    return {**_common(found), "attention_out_bias": found.has_bias("attn_output")}


def _exaone4(found: Settings) -> dict[str, Any]:
    return {**_common(found), **found.window_types()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A family in llama.cpp."""

    name: str
    """Its name in config.json."""
    config: Callable[[Settings], dict[str, Any]] = _common
    """Makes config.json of a file's settings, but for the keys that all architectures have."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of a layer's modules that differ from `_NAMES_IN_LAYER`."""
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
            if found[2] in _WHOLE_NAMES:
                return f"{layer}.{_WHOLE_NAMES[found[2]]}"
            known, module = {**_NAMES_IN_LAYER, **self.names}, _module_of(stored)
            return f"{layer}.{known[module]}.{kind}" if module in known else stored
        return f"{_NAMES[module]}.{kind}" if module in _NAMES else stored

    def row_order(self, tensor: GGUFTensor, found: Settings) -> GGUFOrder | None:
        """Return the order of a tensor's rows in the file; None: they are where they belong."""
        module, keys = _module_of(tensor.name), found.keys
        if self.pairs_rows and module in _HEADS:
            num_heads = keys.positive(_HEADS[module], keys.positive("attention.head_count"))
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


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(name="LlamaForCausalLM", config=_llama, pairs_rows=True),
    "mistral3": Architecture(name="Ministral3ForCausalLM", config=_mistral3, pairs_rows=True),
    "smollm3": Architecture(name="SmolLM3ForCausalLM", config=_llama, pairs_rows=True),
    "granite": Architecture(name="GraniteForCausalLM", config=_granite, pairs_rows=True),
    "granitemoe": Architecture(name="GraniteForCausalLM", config=_granite_moe, pairs_rows=True),
    "qwen2": Architecture(name="Qwen2ForCausalLM", config=_qwen2),
    "qwen2moe": Architecture(name="Qwen2MoeForCausalLM", config=_qwen2_moe),
    "qwen3": Architecture(name="Qwen3ForCausalLM", config=_qwen2),
    "qwen3moe": Architecture(name="Qwen3MoeForCausalLM", config=lambda found: _experts(found, renormalises=True)),
    # The text parts of models that read images, of whose positions text needs one axis.
    "qwen2vl": Architecture(name="Qwen2ForCausalLM", config=_qwen2),
    "qwen3vl": Architecture(name="Qwen3ForCausalLM", config=_qwen2),
    "qwen3vlmoe": Architecture(name="Qwen3MoeForCausalLM", config=lambda found: _experts(found, renormalises=True)),
    "qwen35": Architecture(
        name="Qwen3_5ForCausalLM", config=_qwen35, names=_DELTA_NET, norm_offset=1.0, tiles_values=True
    ),
    "qwen35moe": Architecture(
        name="Qwen3_5MoeForCausalLM", config=_qwen35_moe, names=_DELTA_NET, norm_offset=1.0, tiles_values=True
    ),
    "gemma": Architecture(name="GemmaForCausalLM", norm_offset=1.0),
    "gemma2": Architecture(name="Gemma2ForCausalLM", config=_gemma2, names=_NORMS_ON_BOTH_SIDES, norm_offset=1.0),
    "gemma3": Architecture(name="Gemma3ForCausalLM", config=_gemma3, names=_NORMS_ON_BOTH_SIDES, norm_offset=1.0),
    "phi3": Architecture(name="Phi3ForCausalLM", config=_phi3, names=_FUSED_MLP),
    "olmo2": Architecture(name="Olmo2ForCausalLM", config=_olmo2, names=_NORMS_ON_BOTH_SIDES),
    "exaone4": Architecture(name="Exaone4ForCausalLM", config=_exaone4, names=_NORMS_ON_BOTH_SIDES),
    "glm4": Architecture(
        name="Glm4ForCausalLM",
        config=_glm4,
        names={
            **_FUSED_MLP,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "glm4moe": Architecture(
        name="Glm4MoeForCausalLM", config=_glm4_moe, names={"post_attention_norm": "post_attention_layernorm"}
    ),
    "lfm2": Architecture(name="Lfm2ForCausalLM", config=_lfm2, names=_SHORT_CONVOLUTIONS),
    "seed_oss": Architecture(
        name="SeedOssForCausalLM", config=_seed_oss, names={"post_attention_norm": "post_attention_layernorm"}
    ),
    "cohere2": Architecture(name="Cohere2ForCausalLM", config=_cohere2),
}
"""The families that are read, by `general.architecture`."""


def find_architecture(header: GGUFHeader) -> tuple[str, Architecture]:
    """Return the architecture of a file's model, by its name in the file. Raises LoadError if it is not supported."""
    name = header.metadata.get("general.architecture")
    kind = header.metadata.get("general.type", "model")
    if kind != "model" or name == "clip":
        raise LoadError(
            f"{header.file}: no language model (`general.type`: {show(kind)}, `general.architecture`: {show(name)}); "
            "name the file that holds the model"
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


def read_settings(header: GGUFHeader, name: str) -> Settings:
    """Return the settings of a file whose architecture has this name."""
    own = {key.removeprefix(f"{name}."): value for key, value in header.metadata.items() if key.startswith(f"{name}.")}
    return Settings(JsonFile(header.file, own, f"{name}."), header)


def is_setting(tensor: str) -> bool:
    """Whether a tensor is part of the settings, and no weight."""
    return tensor in _ROPE_FACTORS
