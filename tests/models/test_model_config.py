"""config.json and generation_config.json of every age are read alike; what cannot be served is refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from checkpoints import tiny_model_config, write_tiny_config
from model_facts import attention_of, rope_of, windows_of
from nvcli.errors import ConfigError, LoadError
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.models.geometry import model_tensors

ABSENT = object()


def write(path: Path, generation: dict[str, Any] | None = None, **overrides: Any) -> Path:
    """A folder with a config.json; `ABSENT` removes a key."""
    values = {"architectures": ["Qwen3ForCausalLM"], "dtype": "bfloat16", **tiny_model_config(), **overrides}
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not ABSENT}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def read(path: Path, generation: dict[str, Any] | None = None, **overrides: Any) -> ModelConfig:
    return load_model_config(write(path, generation, **overrides))


def assert_refused(path: Path, *parts: str) -> None:
    with pytest.raises(LoadError) as caught:
        load_model_config(path)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_shapes(tmp_path: Path) -> None:
    config = read(tmp_path, tie_word_embeddings=True)
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (97, 32, 2)
    assert config.layers[0] is config.layers[1]
    assert config.layers[0].mlp.intermediate_size == 48
    attention = attention_of(config)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 16)
    assert config.tie_word_embeddings
    assert not attention.qkv_bias
    assert not attention.o_bias
    assert windows_of(config) == (None, None)
    assert config.max_position_embeddings == 512


@pytest.mark.parametrize(
    ("keys", "labels", "activation", "pad_id"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax", 0),
        ({"num_labels": 1, "pad_token_id": ABSENT}, ("LABEL_0",), "sigmoid", None),
        ({"id2label": {"1": "b", "0": "a"}, "problem_type": "multi_label_classification"}, ("a", "b"), "sigmoid", 0),
        ({"id2label": {"0": "reward"}, "problem_type": "regression"}, ("reward",), "none", 0),
    ],
)
def test_classes(tmp_path: Path, keys: dict[str, Any], labels: tuple[str, ...], activation: str, pad_id: int) -> None:
    config = read(tmp_path, architectures=["Qwen3ForSequenceClassification"], **keys)
    assert config.classifier is not None
    assert (config.classifier.labels, config.classifier.activation) == (labels, activation)
    assert config.classifier.pad_id == pad_id
    assert not config.has_head
    with_vocabulary = [each.name for each in model_tensors(config, "bfloat16") if 97 in each.shape]
    assert with_vocabulary == ["model.embed_tokens.weight"]  # and no LM head


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"id2label": {"0": 5}}, "`id2label.0`: 5 is not text"),
        ({"id2label": {"0": "a", "1": "\ud800"}}, "`id2label.1`: it holds the lone surrogate"),
        ({"id2label": dict.fromkeys(map(str, range(65_537)), "a")}, "`id2label`: 65,537 names are too many"),
        ({"id2label": ["a"]}, '`id2label`: ["a"] is not an object'),
        ({"num_labels": 0}, "`num_labels`: 0 is not positive"),
        ({"pad_token_id": "0"}, '`pad_token_id`: "0" is not an integer'),
        ({"problem_type": "ranking"}, '`problem_type`: "ranking" is not supported; supported: regression, single_l'),
        ({"pooling": "max"}, '`pooling`: "max" is not supported; supported: avg, cls, last'),
    ],
)
def test_classes_that_cannot_be_read(tmp_path: Path, keys: dict[str, Any], told: str) -> None:
    assert_refused(write(tmp_path, **{"architectures": ["Qwen3ForSequenceClassification"], **keys}), told)


def test_reading_needs_no_torch() -> None:
    code = (
        "import sys, nvcli.models.config, nvcli.models.checkpoint_check, nvcli.models.registry, nvcli.models.kv_groups;"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", f"import sys; sys.path[:] = {sys.path!r}; {code}"], check=True)


@pytest.mark.parametrize(
    ("keys", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": ABSENT, "torch_dtype": "float16"}, "float16"),  # before transformers 5
        ({"dtype": "torch.float32"}, "float32"),
        ({"dtype": ABSENT}, "float32"),
    ],
)
def test_dtype(tmp_path: Path, keys: dict[str, Any], dtype: str) -> None:
    assert read(tmp_path, **keys).dtype == dtype


NAN = float("NaN")
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_parameters": {**YARN, "rope_theta": 5e5}},
        {"rope_parameters": {"full_attention": {**YARN, "rope_theta": 5e5}, "sliding_attention": None}},
        {"rope_parameters": ABSENT, "rope_theta": 5e5, "rope_scaling": YARN},
        {"rope_parameters": ABSENT, "rope_theta": 5e5, "rope_scaling": {**YARN, "type": "yarn", "rope_type": None}},
        {"rope_parameters": YARN, "rope_theta": 5e5},
    ],
    ids=["new", "new by layer type", "old", "older", "mixed"],
)
def test_old_and_new_rope_formats_mean_the_same(tmp_path: Path, keys: dict[str, Any]) -> None:
    rope = rope_of(read(tmp_path, **keys))
    assert (rope.rope_type, rope.theta, rope.factor, rope.original_max_position_embeddings) == ("yarn", 5e5, 4.0, 128)


@pytest.mark.parametrize("scaling", [None, ABSENT])
def test_old_format_without_scaling(tmp_path: Path, scaling: object) -> None:
    rope = rope_of(read(tmp_path, rope_parameters=ABSENT, rope_theta=1000000, rope_scaling=scaling))
    assert (rope.rope_type, rope.theta) == ("default", 1e6)


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (5, [7, 5], (7, 5)),
        ([1, 2], None, (1, 2)),
        (None, 3, (3,)),
        (ABSENT, ABSENT, ()),
    ],
)
def test_eos_ids_of_both_files(tmp_path: Path, in_config: Any, in_generation: Any, expected: tuple[int, ...]) -> None:
    generation = {} if in_generation is ABSENT else {"eos_token_id": in_generation}
    assert read(tmp_path, generation, eos_token_id=in_config).eos_token_ids == expected


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, {}),
        ({"eos_token_id": 3, "max_new_tokens": 50, "min_new_tokens": 2}, {"max_tokens": 50, "min_tokens": 2}),
        ({"do_sample": False, "stop_strings": ["END"]}, {"temperature": 0.0, "stop": ["END"]}),
        (
            {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95},
            {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
        ),
        ({"temperature": 0.7, "min_p": 0.1, "top_p": None}, {"temperature": 0.7, "min_p": 0.1}),
        ({"do_sample": False}, {"temperature": 0.0}),
        (
            {"do_sample": False, "temperature": 0.7, "repetition_penalty": 1.05},
            {"temperature": 0.0, "repetition_penalty": 1.05},
        ),
        (  # tokens that the model does not have, and its end, are left out
            {"eos_token_id": [3, 9], "suppress_tokens": [5, 97, -1, 9], "bad_words_ids": [[1, 2], [9], [96, 97], [4]]},
            {"bad_words": [[5], [9], [1, 2], [4]]},
        ),
    ],
)
def test_generation_defaults(tmp_path: Path, generation: dict[str, Any] | None, expected: dict[str, Any]) -> None:
    assert read(tmp_path, generation).generation_defaults == expected


def test_a_generation_default_out_of_range_is_not_the_model_s_fault(tmp_path: Path) -> None:
    """A run may leave these defaults out; one that takes them refuses it (`resolve.sampling_defaults`)."""
    assert read(tmp_path, {"top_p": 1.5}).generation_defaults == {"top_p": 1.5}
    assert read(tmp_path, {"suppress_tokens": 5}).generation_defaults == {"bad_words": 5}
    assert read(tmp_path, {"bad_words_ids": [5, ["a"]]}).generation_defaults == {"bad_words": [5, ["a"]]}


def test_missing_file(tmp_path: Path) -> None:
    assert_refused(tmp_path, str(tmp_path / "config.json"), "no such file")


@pytest.mark.parametrize("content", ["{", "[]", "\udcff"])
def test_bad_json(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert_refused(tmp_path, "config.json")


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ({"hidden_size": ABSENT}, ["`hidden_size`", "missing"]),
        ({"head_dim": None}, ["`head_dim`", "null where a value belongs"]),
        ({"head_dim": 15}, ["`head_dim`", "15", "odd"]),
        ({"hidden_size": "32"}, ["`hidden_size`", '"32"', "int"]),
        ({"hidden_size": True}, ["`hidden_size`", "true"]),
        ({"num_hidden_layers": 0}, ["`num_hidden_layers`", "0"]),
        ({"num_key_value_heads": 3}, ["`num_key_value_heads`", "3", "4"]),
        ({"architectures": ABSENT}, ["`architectures`"]),
        ({"quantization_config": {"quant_method": "aqlm"}}, ["`quantization_config`", "aqlm"]),
        ({"layer_types": ["full_attention"]}, ["`layer_types`", "1 layer", "2"]),
        ({"layer_types": ["full_attention", "linear_attention"]}, ["`layer_types`", "linear_attention"]),
        ({"layer_types": "full_attention"}, ["`layer_types`", "not a list"]),
        ({"use_sliding_window": True, "sliding_window": 0}, ["`sliding_window`", "0"]),
        ({"layer_types": ["full_attention", "sliding_attention"]}, ["`layer_types`", "sliding_attention"]),
        ({"hidden_act": "mish"}, ["`hidden_act`", "mish", "silu"]),
        ({"dtype": "float8_e4m3fn"}, ["`dtype`", "float8_e4m3fn", "bfloat16"]),
        ({"eos_token_id": "</s>"}, ["`eos_token_id`", "</s>"]),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, ["rope_parameters.rope_type", "spiral"]),
        ({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0}}, ["parameters.short_factor", "missing"]),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, ["`rope_parameters.factor`", "missing"]),
        ({"rope_parameters": ABSENT}, ["rope_theta", "missing"]),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, ["partial_rotary_factor", "1.5"]),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.2}}, ["partial_rotary_factor", "odd"]),
        ({"rms_norm_eps": NAN}, ["`rms_norm_eps`", "NaN"]),
        ({"rms_norm_eps": 0}, ["`rms_norm_eps`", "0"]),
        ({"rms_norm_eps": -1e-6}, ["`rms_norm_eps`", "-1e-06"]),
        ({"rope_parameters": {"rope_theta": 0}}, ["`rope_parameters.rope_theta`", "0"]),
        ({"rope_parameters": ABSENT, "rope_theta": NAN}, ["rope_theta`", "NaN"]),
        ({"rope_parameters": {"rope_theta": float("Infinity")}}, ["`rope_parameters.rope_theta`", "Infinity"]),
        ({"rope_parameters": {"rope_theta": -10000.0}}, ["`rope_parameters.rope_theta`", "-10000"]),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0}}, ["factor`", "0"]),
        ({"rope_parameters": {**LLAMA3, "factor": NAN}}, ["`rope_parameters.factor`", "NaN"]),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 0}}, ["`rope_parameters.low_freq_factor`", "0"]),
        ({"rope_parameters": {**LLAMA3, "high_freq_factor": 0.5}}, ["`rope_parameters.high_freq_factor`", "0.5"]),
        ({"rope_parameters": {**YARN, "rope_theta": 1e4, "attention_factor": NAN}}, ["attention_factor`", "NaN"]),
        ({"rope_parameters": {**YARN, "rope_theta": 1e4, "factor": float("Infinity")}}, ["factor`", "Infinity"]),
        ({"rope_parameters": {**YARN, "rope_theta": 1e4, "beta_fast": NAN}}, ["beta_fast`", "NaN is not a finite"]),
        ({"rope_parameters": {**YARN, "rope_theta": 10**400}}, ["rope_theta`", "1000", "not a finite"]),
    ],
)  # fmt: skip
def test_refused(tmp_path: Path, overrides: dict[str, Any], parts: list[str]) -> None:
    assert_refused(write(tmp_path, **overrides), "config.json", *parts)


def test_sliding_window_that_no_layer_uses_is_fine(tmp_path: Path) -> None:
    """Qwen's configs carry a window that `use_sliding_window: false` or `max_window_layers` turns off."""
    for keys in (
        {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 1},
        {"use_sliding_window": True, "sliding_window": 512, "max_window_layers": 0},  # no sequence is longer
    ):
        assert windows_of(read(tmp_path, **keys)) == (None, None)
    absent = read(tmp_path, use_sliding_window=True, sliding_window=64, num_hidden_layers=29)
    assert windows_of(absent) == (*[None] * 28, 64), "an absent `max_window_layers` is 28"


@pytest.mark.parametrize(
    ("keys", "windows"),
    [
        ({"sliding_window": 64, "max_window_layers": 1}, (None, 64)),
        ({"max_window_layers": 1, "max_position_embeddings": 8192}, (None, 4096)),  # what an absent window stands for
        ({"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}, (64, None)),
        ({"sliding_window": 64, "layer_types": ["full_attention"] * 2, "max_window_layers": 0}, (None, None)),
    ],
)
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3"])
def test_windows_by_layer(tmp_path: Path, family: str, keys: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    config = read(tmp_path, architectures=[f"{family}ForCausalLM"], use_sliding_window=True, **keys)
    assert windows_of(config) == windows


def test_families_differ_by_their_biases_norms_and_windows(tmp_path: Path) -> None:
    keys = {"attention_bias": True, "mlp_bias": True, "sliding_window": 64}

    def traits(family: str) -> tuple[Any, ...]:
        config = read(tmp_path, architectures=[f"{family}ForCausalLM"], **keys)
        layer = config.layers[0]
        attention = layer.mixer
        return attention.qk_norm, attention.qkv_bias, attention.o_bias, layer.mlp.bias, attention.window

    assert traits("Llama") == (None, True, True, True, None)
    assert traits("Mistral") == (None, False, False, False, 64)
    assert traits("Qwen2") == (None, True, False, False, None)
    assert traits("Qwen3") == ("head", True, True, False, None)


@pytest.mark.parametrize("family", ["Llama", "Mistral", "Qwen2"])
def test_an_absent_head_dim_is_the_heads_share_of_the_hidden_size(tmp_path: Path, family: str) -> None:
    for absent in (None, ABSENT):
        config = read(tmp_path, architectures=[f"{family}ForCausalLM"], head_dim=absent)
        assert attention_of(config).head_dim == 8
    write(tmp_path, architectures=[f"{family}ForCausalLM"], head_dim=None, hidden_size=30)
    assert_refused(tmp_path, "`head_dim`", "4 heads", "30")


def test_llama_2_says_no_rope_theta(tmp_path: Path) -> None:
    config = read(tmp_path, architectures=["LlamaForCausalLM"], rope_parameters=ABSENT, rope_scaling=None)
    rope = rope_of(config)
    assert (rope.rope_type, rope.theta) == ("default", 10_000.0)


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("Llama", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}),
        ("Mistral", {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}),
        ("Mistral", {"layer_types": ["sliding_attention"] * 2, "sliding_window": None}),
    ],
)
def test_windows_that_a_family_does_not_have_are_refused(tmp_path: Path, family: str, keys: dict[str, Any]) -> None:
    write(tmp_path, architectures=[f"{family}ForCausalLM"], **keys)
    assert_refused(tmp_path, "`layer_types`", "_attention is not supported here")


@pytest.mark.parametrize(("window", "expected"), [(64, 64), (None, None), (512, None)])
def test_mistral_has_one_window_for_all_layers(tmp_path: Path, window: int | None, expected: int | None) -> None:
    config = read(tmp_path, architectures=["MistralForCausalLM"], sliding_window=window)
    assert windows_of(config) == (expected, expected)


@pytest.mark.parametrize(("size", "fits"), [(1, True), (2, True), (3, False), (4, True), (8, False)])
def test_tensor_parallel_sizes(tmp_path: Path, size: int, fits: bool) -> None:
    config = read(tmp_path)  # 4 heads, 2 KV heads, intermediate size 48
    if fits:
        config.check_tensor_parallel(size)
        return
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size {size}.*4 attention heads.*Possible: 1, 2, 4$"):
        config.check_tensor_parallel(size)


def test_tensor_parallel_with_kv_heads_that_do_not_divide(tmp_path: Path) -> None:
    config = read(tmp_path, num_attention_heads=12, num_key_value_heads=6)
    with pytest.raises(ConfigError, match="6 KV heads neither divide by 4 nor divide it"):
        config.check_tensor_parallel(4)


def test_attention_by_rows_is_refused_where_mlps_read_what_attention_reads(tmp_path: Path) -> None:
    assert load_model_config(write_tiny_config(tmp_path / "plain"), attention_dp=True).attention_ranks(8) == 1
    path = write_tiny_config(tmp_path / "parallel", "Cohere2")
    with pytest.raises(ConfigError, match=r"`enable_attention_dp` .* has MLPs that read what"):
        load_model_config(path, attention_dp=True)
