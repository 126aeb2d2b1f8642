"""ModelConfig: what nvcli needs to know of a checkpoint, read from config.json and generation_config.json.

The one place that knows how transformers' versions spell these files. Torch-free and cheap to import. Everything that
cannot be served is refused here, by name, before any process is started or weight is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from nvcli.errors import ConfigError
from nvcli.models.families import FAMILIES, MAX_LAYERS
from nvcli.models.json_file import MAX_INT, JsonFile
from nvcli.models.rope_config import RopeConfig, read_rope
from nvcli.validation import show

CheckpointDtype = Literal["float32", "bfloat16", "float16"]

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"
MAX_EOS_IDS = 64
"""The most end-of-sequence ids; a message to the ranks has room for as many."""
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shapes and settings of a decoder-only model: of the whole model, not of one rank."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qk_norm: bool
    """Whether each head of the queries and keys is normed."""
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    layer_windows: tuple[int | None, ...]
    """For each layer how many tokens a token attends to: itself and those right before it; None: all before it."""
    rope: RopeConfig
    max_position_embeddings: int
    dtype: CheckpointDtype
    """The type that the weights are stored in, or are meant to be used in."""
    eos_token_ids: tuple[int, ...]
    """The end-of-sequence ids of both files, each once."""
    generation_defaults: Mapping[str, Any] = field(hash=False)
    """Sampling defaults of generation_config.json, under `SamplingParams`' names; see `_generation_defaults`. They are
    not checked: a run may do without them (`generation_config: none`)."""

    def check_tensor_parallel(self, size: int) -> None:
        """Raise ConfigError where the model cannot be cut over `size` ranks."""
        problems = []
        if self.num_heads % size:
            problems.append(f"{self.num_heads} attention heads do not divide by {size}")
        if self.num_kv_heads % size and size % self.num_kv_heads:
            problems.append(f"{self.num_kv_heads} KV heads neither divide by {size} nor divide it")
        if self.intermediate_size % size:
            problems.append(f"intermediate size {self.intermediate_size} does not divide by {size}")
        if problems:
            possible = [n for n in range(1, 17) if self.divides_by(n)]
            raise ConfigError(
                f"tensor_parallel_size {size} does not fit this model: {'; '.join(problems)}. "
                f"Possible: {', '.join(map(str, possible))}"
            )

    def check_pipeline_parallel(self, size: int) -> None:
        """Raise ConfigError where the model has fewer layers than stages."""
        if size > self.num_layers:
            raise ConfigError(
                f"pipeline_parallel_size (--pp) is {size}, and this model has {self.num_layers} layers, of which each "
                f"stage needs one: lower it to {self.num_layers} or less"
            )

    def divides_by(self, size: int) -> bool:
        """Whether the model can be cut over `size` ranks."""
        kv_fits = self.num_kv_heads % size == 0 or size % self.num_kv_heads == 0
        return kv_fits and self.num_heads % size == 0 and self.intermediate_size % size == 0


def load_model_config(path: Path) -> ModelConfig:
    """Read the config files of a checkpoint folder. Raises LoadError that names the file and the key."""
    config = JsonFile.read(path / CONFIG_FILE)
    generation = JsonFile.read_if_present(path / GENERATION_CONFIG_FILE)
    architecture = _architecture(config)
    _refuse_unsupported(config)
    traits = FAMILIES[architecture](config)
    return ModelConfig(
        architecture=architecture,
        vocab_size=config.positive("vocab_size"),
        hidden_size=config.positive("hidden_size"),
        num_layers=config.positive("num_hidden_layers", most=MAX_LAYERS),
        num_heads=config.positive("num_attention_heads"),
        num_kv_heads=_num_kv_heads(config),
        head_dim=traits.head_dim,
        intermediate_size=config.positive("intermediate_size"),
        rms_norm_eps=config.positive_number("rms_norm_eps"),
        tie_word_embeddings=config.get("tie_word_embeddings", bool, False),
        qk_norm=traits.qk_norm,
        qkv_bias=traits.qkv_bias,
        o_bias=traits.o_bias,
        mlp_bias=traits.mlp_bias,
        layer_windows=traits.layer_windows,
        rope=read_rope(config, default_theta=traits.default_rope_theta),
        max_position_embeddings=config.positive("max_position_embeddings", least=2),  # a prompt and its answer
        dtype=_dtype(config),
        eos_token_ids=_eos_token_ids(generation, config),
        generation_defaults=_generation_defaults(generation),
    )


def _architecture(config: JsonFile) -> str:
    supported = ", ".join(sorted(FAMILIES))
    names = config.values.get("architectures") or []
    if not isinstance(names, list) or not names:
        raise config.error("architectures", f"{show(names)} names no architecture; supported: {supported}")
    for name in names:
        if isinstance(name, str) and name in FAMILIES:
            return name
    name = show(names[0]).strip('"')
    raise config.error("architectures", f"{name} is not supported; supported: {supported}")


def _refuse_unsupported(config: JsonFile) -> None:
    values = config.values
    quantization = values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise config.error(
            "quantization_config",
            f"quantised weights ({show(method)}) are not supported; use the model's bfloat16 or float16 checkpoint",
        )
    activation = values.get("hidden_act", "silu")
    if activation != "silu":
        raise config.error("hidden_act", f"{show(activation)} is not supported; supported: silu")


def _num_kv_heads(config: JsonFile) -> int:
    num_heads = config.positive("num_attention_heads")
    if config.values.get("num_key_value_heads") is None:
        return num_heads
    num_kv_heads = config.positive("num_key_value_heads")
    if num_heads % num_kv_heads:
        raise config.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_heads} attention heads")
    return num_kv_heads


def _dtype(config: JsonFile) -> CheckpointDtype:
    key = "dtype" if config.values.get("dtype") is not None else "torch_dtype"  # the older name
    name = config.get(key, str, "float32").removeprefix("torch.")
    for dtype in get_args(CheckpointDtype):
        if name == dtype:
            return dtype  # type: ignore[no-any-return]
    raise config.error(key, f"{show(name)} is not supported; supported: {', '.join(get_args(CheckpointDtype))}")


def _eos_token_ids(*files: JsonFile) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for file in files:
        value = file.values.get("eos_token_id")
        for token in value if isinstance(value, list) else [] if value is None else [value]:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token <= MAX_INT:
                raise file.error("eos_token_id", f"{show(value)} is not a token id or a list of them")
            ids[token] = None
        if len(ids) > MAX_EOS_IDS:
            raise file.error("eos_token_id", f"{len(ids):,} ids end an answer; allowed: up to {MAX_EOS_IDS}")
    return tuple(ids)


def _generation_defaults(generation: JsonFile) -> dict[str, Any]:
    """Read the sampling defaults of generation_config.json.

    `do_sample: false` asks for greedy decoding, whatever the temperature. Where `do_sample` is absent, the keys that
    are present count. Absent keys take nvcli's own defaults, as in vLLM, and not transformers' (greedy, top_k 50).
    """
    values = generation.values
    greedy = values.get("do_sample") is False
    keys = ("repetition_penalty",) if greedy else _SAMPLING_KEYS
    defaults: dict[str, Any] = {"temperature": 0.0} if greedy else {}
    defaults.update({key: values[key] for key in keys if values.get(key) is not None})
    return defaults
