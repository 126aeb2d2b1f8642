"""The settings of a model in a GGUF file, and those that mean the same in all families.

Settings: github.com/ggml-org/llama.cpp/blob/master/gguf-py/gguf/constants.py; what is changed on the way to a file:
convert_hf_to_gguf.py there. Torch-free.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from nvcli.core.validation import show
from nvcli.models.gguf.header import GGUFHeader
from nvcli.models.json_file import JsonFile

FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
KV_HEADS = "attention.head_count_kv"
_MOST_LAYERS = 10_000
"""More than any model has."""
_ROPE_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that are settings: divisors of the frequencies of rotary positions."""


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
        key, count = "nextn_predict_layers", self.keys.positive("block_count", most=_MOST_LAYERS)
        of_head = self.keys.get(key, int, 0)
        if not 0 <= of_head < count:
            raise self.keys.error(key, f"{of_head} of {count} layers, which leaves no decoder; download the file again")
        return count - of_head

    @property
    def head_dim(self) -> int | None:
        """The size of a head; None: that of a share of the hidden size."""
        key = "attention.key_length"
        return self.keys.positive(key) if self.keys.has(key) else None

    @property
    def mlp_size(self) -> int | None:
        """The size of the first layer's MLP; None: it has none, or files do not say it."""
        key = "feed_forward_length"
        return self.of_layers(key)[0] or None if self.keys.has(key) else None

    @property
    def most_kv_heads(self) -> int:
        """The heads of keys and values of a layer with attention."""
        if isinstance(self.keys.values.get(KV_HEADS), list):
            return max(1, *self.of_layers(KV_HEADS))
        return self.keys.positive(KV_HEADS, self.keys.positive("attention.head_count"))

    def of_layers(self, key: str) -> list[int]:
        """Return the value of `key` for each layer: files have one for all of them, or a list."""
        found, count = self.keys.values.get(key), self.keys.positive("block_count", most=_MOST_LAYERS)
        values: list[Any] = found if isinstance(found, list) else [found] * count
        if len(values) != count or not all(isinstance(value, int) and value >= 0 for value in values):
            raise self.keys.error(key, f"no number from 0 on, or {count} of them, one for each layer")
        return values[: self.num_layers]

    def has(self, tensor: str) -> bool:
        return tensor in self.tensors

    def has_any(self, end: str) -> bool:
        """Whether a layer has a tensor whose name ends so."""
        return any(name.endswith(f".{end}") for name in self.tensors)

    def has_bias(self, module: str) -> bool:
        return f"blk.0.{module}.bias" in self.tensors

    def window_types(self) -> dict[str, Any]:
        """Return `layer_types`, if the file says which layers have windows."""
        found = self.keys.values.get("attention.sliding_window_pattern")
        return {"layer_types": [SLIDING if one else FULL for one in found]} if isinstance(found, list) else {}

    def rope(self) -> dict[str, Any]:
        """Return `rope_parameters`."""
        keys = self.keys
        rope: dict[str, Any] = {
            "rope_type": "default",
            "rope_theta": keys.positive_number("rope.freq_base", 10_000.0),
        }
        if keys.has("rope.dimension_count"):
            whole = self.head_dim or max(1, keys.positive("embedding_length") // keys.positive("attention.head_count"))
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
        "intermediate_size": found.mlp_size,
        "num_attention_heads": keys.positive("attention.head_count"),
        "num_key_value_heads": found.most_kv_heads,
        "head_dim": found.head_dim,
        "max_position_embeddings": keys.positive("context_length"),
        "rms_norm_eps": keys.get("attention.layer_norm_rms_epsilon", float, 0.0) or None,
        "rope_parameters": found.rope(),
        "attention_bias": found.has_bias("attn_q"),
        "mlp_bias": found.has_bias("ffn_down"),
        "sliding_window": keys.get("attention.sliding_window", int, 0) or None,
    }


def experts(
    found: Settings, count: str = "num_experts", used: str = "num_experts_per_tok", size: str = ""
) -> dict[str, Any]:
    """Return the number of experts, how many of them a token has, and their size, under the names that a family has for
    these; without a name for it, the size is left out."""
    names = {count: "expert_count", used: "expert_used_count", size: "expert_feed_forward_length"}
    return {name: found.keys.positive(key) for name, key in names.items() if name}


def read_settings(header: GGUFHeader, name: str) -> Settings:
    """Return the settings of a file whose architecture has this name."""
    own = {key.removeprefix(f"{name}."): value for key, value in header.metadata.items() if key.startswith(f"{name}.")}
    return Settings(JsonFile(header.file, own, f"{name}."), header)


def is_setting(tensor: str) -> bool:
    """Whether a tensor is part of the settings, and no weight."""
    return tensor in _ROPE_FACTORS
