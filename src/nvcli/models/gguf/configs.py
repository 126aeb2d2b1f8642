"""Makes config.json of the settings in a GGUF file, with a function for each family that has keys of its own.

Settings: github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py; what is changed on the way to a file:
convert_hf_to_gguf.py there. Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from nvcli.core.validation import is_integer, show
from nvcli.errors import LoadError
from nvcli.models.gguf.header import GGUFHeader
from nvcli.models.json_file import JsonFile

_FULL, _SLIDING = "full_attention", "sliding_attention"
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that are settings: divisors of the frequencies of rotary positions."""
_LAYER_EMBEDDING = "per_layer_token_embd.weight"


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

    def of_layers(self, key: str) -> list[int]:
        """Return the value of `key` for each layer: files have one for all of them, or a list."""
        found, count = self.keys.values.get(key), self.keys.positive("block_count")
        values: list[Any] = found if isinstance(found, list) else [found] * count
        if len(values) != count or not all(is_integer(value, 0) for value in values):
            raise self.keys.error(key, f"no number from 0 on, or {count} of them, one for each layer")
        return values[: self.num_layers]

    def with_largest(self, *names: str) -> Settings:
        """Return the settings with the largest value for a layer as that of all layers."""
        return replace(self, keys=self.keys.replacing(**{name: max(self.of_layers(name)) for name in names}))

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

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


def common(found: Settings) -> dict[str, Any]:
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


def llama(found: Settings) -> dict[str, Any]:
    keys = found.keys
    whole_heads = keys.positive("rope.dimension_count") if keys.has("rope.dimension_count") else None
    config = {**common(found), "sliding_window": None, "head_dim": found.head_dim or whole_heads}
    config["rope_parameters"].pop("partial_rotary_factor", None)
    if not keys.get("expert_count", int, 0):
        return config
    return {
        **config,
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
    }


def mistral3(found: Settings) -> dict[str, Any]:
    keys, config = found.keys, llama(found)
    weight = keys.get("rope.scaling.yarn_log_multiplier", float, 0.0)
    growth = keys.get("attention.temperature_scale", float, 0.0)
    config["rope_parameters"] |= {"mscale": weight, "mscale_all_dim": weight} if weight else {}
    config["rope_parameters"] |= {"llama_4_scaling_beta": growth} if growth else {}
    return config


def lfm2(found: Settings) -> dict[str, Any]:
    config = common(found.with_largest("attention.head_count_kv"))
    return {
        **config,
        "layer_types": [_FULL if count else "conv" for count in found.of_layers("attention.head_count_kv")],
        "block_auto_adjust_ff_dim": False,
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": found.keys.positive("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in found.tensors),
    }


def qwen2(found: Settings) -> dict[str, Any]:
    return {**common(found), "sliding_window": None}  # llama.cpp has no windows for it


def _experts(found: Settings, *, renormalises: bool) -> dict[str, Any]:
    """Return the keys of Qwen's mixtures of experts."""
    keys = found.keys
    used = keys.positive("expert_used_count")
    size = keys.get("feed_forward_length", int, 0) // used  # of older files
    return {
        **qwen2(found),
        "num_experts": keys.positive("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": keys.positive("expert_feed_forward_length", size or None),
        "norm_topk_prob": renormalises,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def qwen2_moe(found: Settings) -> dict[str, Any]:
    shared = found.keys.get("expert_shared_feed_forward_length", int, 0)
    shared = shared or found.keys.positive("feed_forward_length")  # of older files
    return {**_experts(found, renormalises=False), "shared_expert_intermediate_size": shared}


def qwen3_moe(found: Settings) -> dict[str, Any]:
    return _experts(found, renormalises=True)


def qwen35(found: Settings) -> dict[str, Any]:
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
    return {**qwen2(found), **sizes}


def qwen35_moe(found: Settings) -> dict[str, Any]:
    return {**qwen2_moe(found), **qwen35(found)}


def qwen3_next(found: Settings) -> dict[str, Any]:
    """Return Qwen 3.5's config.json, as which newer files have Qwen3-Next's projections."""
    if any(name.endswith(".ssm_in.weight") for name in found.tensors):
        raise LoadError(
            f"{found.header.file}: Qwen3-Next as early versions of llama.cpp stored it (tensors ssm_in), which is not "
            "read: download a newer file"
        )
    return qwen35_moe(found)


def glm4(found: Settings) -> dict[str, Any]:
    sections = "rope.dimension_sections"
    if found.keys.has(sections):
        raise found.keys.error(sections, "the text part of GLM-4V is not supported in GGUF; supported: GLM-4")
    return common(found)


def glm4_moe(found: Settings) -> dict[str, Any]:
    has_norms = "blk.0.attn_q_norm.weight" in found.tensors
    return {**common(found), **_shared_experts(found), "use_qk_norm": has_norms}


def deepseek2(found: Settings) -> dict[str, Any]:
    """Return DeepSeek-V3's config.json, as GLM-4.7-Flash and Kimi-K2 have it too, or DeepSeek-V2's, or Youtu-LLM's."""
    keys, config = found.keys, _latent_attention(found)
    if not keys.get("expert_count", int, 0):
        return {**config, "architectures": ["YoutuForCausalLM"]}
    config |= _shared_experts(found)
    if any(name.endswith("exp_probs_b.bias") for name in found.tensors):
        return config
    kind = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    return {**config, "architectures": ["DeepseekV2ForCausalLM"], "topk_method": kind}


def _latent_attention(found: Settings) -> dict[str, Any]:
    """Return what latent attention has. In newer files the sizes of heads that it projects to have keys of their own,
    beside those of the latents."""
    keys, rope = found.keys, found.rope()
    rope.pop("partial_rotary_factor", None)
    # Written 0.1 times as large (TAG_DEEPSEEK2_YARN_LOG_MUL_FIX in llama.cpp).
    weight = 10 * keys.get("rope.scaling.yarn_log_multiplier", float, 0.0)
    rope |= {"mscale": weight, "mscale_all_dim": weight} if weight else {}
    rope_dim = keys.positive("rope.dimension_count")
    key_dim, value_dim = (
        keys.positive(f"attention.{one}_length_mla", keys.positive(f"attention.{one}_length"))
        for one in ("key", "value")
    )
    return {
        **common(found),
        "num_key_value_heads": keys.positive("attention.head_count"),
        "head_dim": None,
        "q_lora_rank": keys.get("attention.q_lora_rank", int, 0) or None,
        "kv_lora_rank": keys.positive("attention.kv_lora_rank"),
        "qk_rope_head_dim": rope_dim,
        "qk_nope_head_dim": key_dim - rope_dim,
        "v_head_dim": value_dim,
        "rope_parameters": rope,
        "attention_bias": found.has_bias("attn_q_a"),
    }


def _shared_experts(found: Settings) -> dict[str, Any]:
    """Return the keys of DeepSeek's mixtures of experts. Files that do not know groups yet are of models without them,
    but for DeepSeek-V3's, which has 256 experts."""
    keys = found.keys
    count = keys.positive("expert_count")
    groups = (8, 4) if count == 256 else (1, 1)
    return {
        "first_k_dense_replace": keys.get("leading_dense_block_count", int, 0),
        "n_routed_experts": count,
        "n_shared_experts": keys.get("expert_shared_count", int, 0),
        "num_experts_per_tok": keys.positive("expert_used_count"),
        "moe_intermediate_size": keys.positive("expert_feed_forward_length"),
        "n_group": keys.positive("expert_group_count", groups[0]),
        "topk_group": keys.positive("expert_group_used_count", groups[1]),
        "norm_topk_prob": keys.get("expert_weights_norm", bool, False),
        "routed_scaling_factor": keys.positive_number("expert_weights_scale", 1.0),
        "num_nextn_predict_layers": 0,
    }


def gpt_oss(found: Settings) -> dict[str, Any]:
    keys, config = found.keys, common(found)
    config["rope_parameters"] |= {"truncate": False}
    return {
        **config,
        "intermediate_size": keys.positive("expert_feed_forward_length"),
        "num_local_experts": keys.positive("expert_count"),
        "num_experts_per_tok": keys.positive("expert_used_count"),
    }


def gemma2(found: Settings) -> dict[str, Any]:
    keys, config = found.keys, common(found)
    return {
        **config,
        "query_pre_attn_scalar": _query_scalar(config, largest=46),
        "attn_logit_softcapping": keys.positive_number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.positive_number("final_logit_softcapping", 30.0),
        **found.window_types(),
    }


def gemma3(found: Settings) -> dict[str, Any]:
    keys, config = found.keys, common(found)
    local = {"rope_type": "default", "rope_theta": keys.positive_number("rope.freq_base_swa", 10_000.0)}
    return {
        **config,
        "query_pre_attn_scalar": _query_scalar(config, largest=62),
        "rope_parameters": {_FULL: config["rope_parameters"], _SLIDING: local},
        "final_logit_softcapping": keys.get("final_logit_softcapping", float, 0.0) or None,
        **found.window_types(),
    }


def gemma4(found: Settings) -> dict[str, Any]:
    """Return Gemma 4's, whose layers without windows have heads and frequencies of their own."""
    keys, kinds = found.keys, found.window_types()["layer_types"]
    of_kind = dict(zip(reversed(kinds), reversed(found.of_layers("attention.head_count_kv")), strict=True))
    sizes = found.of_layers("feed_forward_length")
    config = common(found.with_largest("attention.head_count_kv", "feed_forward_length"))
    turned = [1.0 if factor == 1.0 else 0.0 for factor in found.header.read_floats("rope_freqs.weight")]
    no_values = [number for number in range(found.num_layers) if not found.has(f"blk.{number}.attn_v.weight")]
    num_experts, inputs = keys.get("expert_count", int, 0), keys.get("embedding_length_per_layer_input", int, 0)
    return {
        **config,
        "layer_types": kinds,
        "intermediate_size": sizes[0],
        "head_dim": keys.positive("attention.key_length_swa"),
        "global_head_dim": keys.positive("attention.key_length"),
        "num_key_value_heads": of_kind.get(_SLIDING, config["num_key_value_heads"]),
        "num_global_key_value_heads": of_kind.get(_FULL),
        "attention_k_eq_v": any(found.has(f"blk.{number}.attn_k.weight") for number in no_values),
        "num_kv_shared_layers": keys.get("attention.shared_kv_layers", int, 0),
        "use_double_wide_mlp": sizes[-1] == 2 * sizes[0],
        "rope_parameters": {
            _FULL: {
                "rope_type": "proportional",
                "rope_theta": keys.positive_number("rope.freq_base"),
                "partial_rotary_factor": sum(turned) / len(turned),
            },
            _SLIDING: {"rope_type": "default", "rope_theta": keys.positive_number("rope.freq_base_swa", 10_000.0)},
        },
        "final_logit_softcapping": keys.get("final_logit_softcapping", float, 0.0) or None,
        "hidden_size_per_layer_input": inputs,
        "vocab_size_per_layer_input": found.header.tensors[_LAYER_EMBEDDING].shape[0] if inputs else None,
        "enable_moe_block": num_experts > 0,
        "num_experts": num_experts or None,
        "top_k_experts": keys.get("expert_used_count", int, 0) or None,
        "moe_intermediate_size": keys.get("expert_feed_forward_length", int, 0) or None,
    }


def _query_scalar(config: Mapping[str, Any], *, largest: int) -> float:
    """Return `query_pre_attn_scalar`, which files leave out: in the largest model of a family, which has so many
    layers, it is not the size of a head."""
    share: float = config["hidden_size"] / config["num_attention_heads"]
    return share if config["num_hidden_layers"] == largest else float(config["head_dim"] or share)


def granite(found: Settings) -> dict[str, Any]:
    keys = found.keys
    scales = {
        "attention_multiplier": keys.positive_number("attention.scale", 1.0),
        "embedding_multiplier": keys.positive_number("embedding_scale", 1.0),
        "residual_multiplier": keys.positive_number("residual_scale", 1.0),
        "logits_scaling": keys.positive_number("logit_scale", 1.0),
    }
    return {**llama(found), **scales}


def granite_moe(found: Settings) -> dict[str, Any]:
    shared = found.keys.get("expert_shared_feed_forward_length", int, 0)
    return {**granite(found), "architectures": ["GraniteMoeForCausalLM"], "shared_intermediate_size": shared}


def phi3(found: Settings) -> dict[str, Any]:
    config = common(found)
    original = config["rope_parameters"].get("original_max_position_embeddings", config["max_position_embeddings"])
    return {**config, "original_max_position_embeddings": original}


def olmo2(found: Settings) -> dict[str, Any]:
    config = {**common(found), **found.window_types()}
    if config["sliding_window"] is None:
        return config
    rope = config.pop("rope_parameters")  # stretched in layers without windows alone
    scaling = None if rope["rope_type"] == "default" else rope
    return {**config, "architectures": ["Olmo3ForCausalLM"], "rope_theta": rope["rope_theta"], "rope_scaling": scaling}


def cohere2(found: Settings) -> dict[str, Any]:
    keys = found.keys
    return {
        **common(found),
        "layer_norm_eps": keys.positive_number("attention.layer_norm_epsilon"),
        "logit_scale": keys.positive_number("logit_scale"),
        **found.window_types(),
    }


def seed_oss(found: Settings) -> dict[str, Any]:
    return {**common(found), "attention_out_bias": found.has_bias("attn_output")}


def exaone4(found: Settings) -> dict[str, Any]:
    return {**common(found), **found.window_types()}


def read_settings(header: GGUFHeader, name: str) -> Settings:
    """Return the settings of a file whose architecture has this name."""
    own = {key.removeprefix(f"{name}."): value for key, value in header.metadata.items() if key.startswith(f"{name}.")}
    return Settings(JsonFile(header.file, own, f"{name}."), header)


def is_setting(tensor: str) -> bool:
    """Whether a tensor is part of the settings, and no weight."""
    return tensor in _ROPE_FACTORS
