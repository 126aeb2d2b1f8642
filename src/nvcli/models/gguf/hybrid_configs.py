"""Makes config.json of the settings in a GGUF file for families that have other layers beside attention.

Settings: github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py; what is changed on the way to a file:
convert_hf_to_gguf.py there. Torch-free.
"""

from __future__ import annotations

from typing import Any

from nvcli.errors import LoadError
from nvcli.models.gguf.configs import qwen2
from nvcli.models.gguf.expert_configs import qwen2_moe
from nvcli.models.gguf.settings import FULL, Settings, common


def lfm2(found: Settings) -> dict[str, Any]:
    config = common(found.with_largest("attention.head_count_kv"))
    return {
        **config,
        "layer_types": [FULL if count else "conv" for count in found.of_layers("attention.head_count_kv")],
        "block_auto_adjust_ff_dim": False,
        "norm_eps": config["rms_norm_eps"],
        "conv_L_cache": found.keys.positive("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in found.tensors),
    }


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
