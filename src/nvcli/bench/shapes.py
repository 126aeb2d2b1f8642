"""Known model shapes, so that anyone can measure without a download. The weights are made up."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from nvcli.bench.dense_shapes import DENSE_SHAPES
from nvcli.bench.expert_shapes import EXPERT_SHAPES
from nvcli.bench.hybrid_shapes import HYBRID_SHAPES
from nvcli.config_types import Quantization
from nvcli.errors import ConfigError
from nvcli.models.checkpoint import resolve_model
from nvcli.validation import suggest

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "eos_token_id": 151645,
}


_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
_MXFP4 = {"quant_method": "mxfp4"}
"""What a checkpoint in 4 bits says of its weights."""


def _qwen3(hidden: int, layers: int, heads: int, intermediate: int, *, tied: bool) -> dict[str, Any]:
    return {
        **_QWEN3,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": intermediate,
        "tie_word_embeddings": tied,
    }


def _qwen3_moe(
    hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, experts: int, per_token: int
) -> dict[str, Any]:
    """Experts in every layer, as large as `intermediate` each."""
    return {
        **_qwen3(hidden, layers, heads, 3 * hidden, tied=False),
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": kv_heads,
        "moe_intermediate_size": intermediate,
        "num_experts": experts,
        "num_experts_per_tok": per_token,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    """The published models differ in these two. Shapes have their weights in bfloat16."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "attention_bias": True,
        "sliding_window": 128,
        "intermediate_size": 2880,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "hidden_act": "silu",
        "vocab_size": 201088,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "max_position_embeddings": 131072,
        "eos_token_id": 200002,
    }


SHAPES = {
    **DENSE_SHAPES,
    "qwen3-0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 12288, tied=False),
    "qwen3-14b": _qwen3(5120, 40, 40, 17408, tied=False),
    "qwen3-32b": _qwen3(5120, 64, 64, 25600, tied=False),
    "qwen3-30b-a3b": _qwen3_moe(2048, 48, 32, 4, 768, 128, 8),
    "qwen3-235b-a22b": _qwen3_moe(4096, 94, 64, 4, 1536, 128, 8),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    **EXPERT_SHAPES,
    **HYBRID_SHAPES,
}
"""The shapes, as the models' published config.json files have them."""


@contextlib.contextmanager
def model_folder(
    name: str, shape: str | None, *, revision: str | None = None, quantization: Quantization = "auto"
) -> Iterator[Path]:
    """Give the folder of a model, or one with a known shape's config.json. Raises ConfigError and LoadError.

    `revision` is the model's, as in RunConfig; with `quantization` w4a16 a shape is that of a checkpoint in 4 bits.
    """
    if shape is None:
        yield resolve_model(name, revision=revision)
        return
    if shape not in SHAPES:
        raise ConfigError(f"--shape {shape}: unknown; {suggest(shape, SHAPES)}")
    with tempfile.TemporaryDirectory(prefix="nvcli-shape-") as folder:
        yield write_shape(shape, Path(folder), quantization=quantization)


def write_shape(name: str, folder: Path, *, quantization: Quantization = "auto") -> Path:
    """Write a shape's config.json into a folder, and return the folder."""
    config = SHAPES[name]
    if quantization == "w4a16":
        config = {**config, "quantization_config": _MXFP4 if config["model_type"] == "gpt_oss" else _AWQ}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
