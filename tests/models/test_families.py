"""The catalogue of families: each architecture once, and the keys by which families tell their models apart."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from checkpoints import edit_json, tiny_model_config, write_tiny_config
from expert_shapes import EXPERT_SHAPES, LATENTS
from family_shapes import NEMOTRON
from model_facts import attention_of, rope_of, windows_of
from nvcli.attention.spec import StateSpec
from nvcli.cli.main import app
from nvcli.core.config import RunConfig
from nvcli.errors import ConfigError, LoadError
from nvcli.job.run.engine_settings import resolve_engine_config
from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.models import families
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.models.families import catalogue
from nvcli.models.families.catalogue import FAMILIES
from nvcli.models.geometry import model_tensors
from nvcli.models.layer_config import LearnedPositions
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mixers.delta_net import KimiDeltaConfig
from nvcli.models.mixers.latent_attention import LatentAttentionConfig
from nvcli.models.rope import rope_frequencies
from nvcli.models.rope_config import RopeConfig
from nvcli.models.vision.tower_tensors import tower_tensors
from nvcli.tools.bench.shapes import SHAPES
from nvcli.worker.distributed.stage import Stage

NAMES = [name for family in FAMILIES for name in family.architectures]
FULL, SLIDING = "full_attention", "sliding_attention"


def read(folder: Path, architecture: str, *, absent: tuple[str, ...] = (), **values: Any) -> ModelConfig:
    """Read a tiny config.json of an architecture, without the keys `absent`."""
    found = {"architectures": [architecture], **tiny_model_config(), **values}
    (folder / "config.json").write_text(json.dumps({key: value for key, value in found.items() if key not in absent}))
    return load_model_config(folder)


def test_each_architecture_belongs_to_one_family() -> None:
    assert len(NAMES) == len(set(NAMES))


def test_every_file_of_families_is_in_the_catalogue() -> None:
    files = Path(families.__file__).parent.glob("*.py")
    defining = {file.stem for file in files if re.search(r"^\w+ = Family\(", file.read_text(), re.MULTILINE)}
    assert defining == set(catalogue.MODULES.split())


def test_models_lists_all_families() -> None:
    table = CliRunner().invoke(app, ["models"], catch_exceptions=False).output
    listed = json.loads(CliRunner().invoke(app, ["models", "--json"], catch_exceptions=False).output)
    assert [entry["name"] for entry in listed] == [family.name for family in FAMILIES]
    for entry in listed:
        assert {"architectures", "examples", "features"} < entry.keys()
        assert all(name in table for name in (entry["name"], *entry["architectures"], *entry["examples"]))
    assert max(map(len, table.splitlines())) <= 120


def test_gpt_oss_of_the_hub(tmp_path: Path) -> None:
    """Its files say nothing of a type, and have the older names of the rope, whose ramp has no rounded ends."""
    values = {**SHAPES["gpt-oss-20b"], "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = load_model_config(tmp_path)
    assert config.dtype == "bfloat16"
    assert windows_of(config) == (128, None) * 12
    rope = rope_of(config)
    assert (rope.rope_type, rope.theta, rope.factor, rope.truncate) == ("yarn", 150_000.0, 32.0, False)
    assert rope.original_max_position_embeddings == 4096
    absent = {key: value for key, value in values.items() if not key.startswith("rope")}
    (tmp_path / "config.json").write_text(json.dumps(absent))
    assert load_model_config(tmp_path) == config, "what transformers takes for absent keys"


@pytest.mark.parametrize("name", ["MiniMaxM1ForCausalLM", "MiniMaxM2ForCausalLM"])
def test_minimax_of_the_hub_says_nothing_of_a_type(name: str, tmp_path: Path) -> None:
    values = {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 4}
    assert read(tmp_path, name, **values).dtype == "bfloat16"
    assert read(tmp_path, name, **values, torch_dtype="float16").dtype == "float16"


def test_gemma_3_of_the_hub_leaves_out_what_is_usual(tmp_path: Path) -> None:
    """google/gemma-3-4b-it gives these keys of its text part alone, and the older names of both ropes."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**values, "eos_token_id": [1, 106]}))
    config = load_model_config(tmp_path)
    assert (config.vocab_size, config.tie_word_embeddings, config.dtype) == (262_208, True, "bfloat16")
    assert config.eos_token_ids == (1, 106)
    attention = attention_of(config)
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (8, 4, 256)
    assert windows_of(config)[:7] == (1024,) * 5 + (None, 1024)
    assert len(config.decoder.layer_kinds) == 2
    local, everywhere = rope_of(config, 0), rope_of(config, 5)
    assert (local.rope_type, local.theta) == ("default", 10_000.0)
    assert (everywhere.rope_type, everywhere.theta, everywhere.factor) == ("linear", 1_000_000.0, 8.0)


def test_gemma_4_of_the_hub_has_heads_of_two_sizes(tmp_path: Path) -> None:
    keys = {
        "hidden_size_per_layer_input": 0,
        "attention_k_eq_v": True,
        "global_head_dim": 512,
        "num_global_key_value_heads": 1,
        "num_hidden_layers": 6,
        "rope_parameters": None,
    }
    config = read(tmp_path, "Gemma4ForCausalLM", **keys)
    local, everywhere = attention_of(config, 0), attention_of(config, 5)
    assert (local.head_dim, local.num_kv_heads, local.keys_are_values) == (16, 2, False)
    assert (everywhere.head_dim, everywhere.num_kv_heads, everywhere.keys_are_values) == (512, 1, True)
    for key, value in {"num_kv_shared_layers": 6, "vocab_size_per_layer_input": 8, "enable_moe_block": "yes"}.items():
        with pytest.raises(LoadError, match=rf"`{key}`: "):
            read(tmp_path, "Gemma4ForCausalLM", **{**keys, "hidden_size_per_layer_input": 8, key: value})
    experts = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8}
    for key, value in {"num_experts": None, "top_k_experts": 5, "moe_intermediate_size": 0}.items():
        with pytest.raises(LoadError, match=rf"`{key}`: "):
            read(tmp_path, "Gemma4ForCausalLM", **{**keys, **experts, key: value})
    config = read(
        tmp_path, "Gemma4ForCausalLM", **{**keys, "num_kv_shared_layers": 4, "layer_types": [SLIDING, FULL] * 3}
    )
    assert config.decoder.kv_owners == (0, 1, 0, 1, 0, 1)
    with pytest.raises(ConfigError, match=r"--pp\) is 2, and later layers"):
        config.check_pipeline_parallel(2)


def test_olmo_3_stretches_full_attention_alone(tmp_path: Path) -> None:
    """Older files have one rotation."""
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
    config = read(
        tmp_path,
        "Olmo3ForCausalLM",
        absent=("rope_parameters",),
        num_hidden_layers=4,
        rope_theta=5e5,
        rope_scaling=yarn,
    )
    assert [rope_of(config, layer).rope_type for layer in range(4)] == ["default"] * 3 + ["yarn"]
    assert rope_of(config, 0).theta == rope_of(config, 3).theta == 5e5


def test_phi_3_5_moe_of_the_hub(tmp_path: Path) -> None:
    """Its longrope has a factor on cosines and sines for short runs, and one for long runs."""
    keys = {
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "original_max_position_embeddings": 64,
        "rope_scaling": {
            "long_factor": [2.0] * 8,
            "long_mscale": 1.25,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 8,
            "short_mscale": 1.24,
            "type": "longrope",
        },
    }
    config = read(tmp_path, "PhiMoEForCausalLM", absent=("rope_parameters",), rope_theta=10000.0, **keys)
    routing = config.layers[0].routing
    assert routing is not None
    assert (routing.scoring, routing.tolerance) == ("sparsemixer", 0.02)
    assert [rope_frequencies(rope_of(config), 16, positions)[1] for positions in (64, 65)] == [1.24, 1.25]


def test_llama_4_of_the_hub_is_computed_up_to_a_chunk(tmp_path: Path) -> None:
    keys = {
        "num_local_experts": 4,
        "intermediate_size_mlp": 64,
        "num_hidden_layers": 4,
        "max_position_embeddings": 1024,
        "attention_chunk_size": 256,
        "attn_temperature_tuning": 4,
        "no_rope_layers": [],
        "moe_layers": [1, 3],
    }
    config = read(tmp_path, "Llama4ForConditionalGeneration", **keys)
    assert config.max_position_embeddings == 256
    assert [layer.routing is None for layer in config.layers] == [True, False, True, False]
    last = attention_of(config, 3)
    assert (last.rope, last.qk_norm, last.query_scaling is None) == (None, None, False)
    run = RunConfig(model="m", device="cpu", max_model_len=512)
    with pytest.raises(ConfigError, match="512, and nvcli computes m for at most 256 tokens, a chunk"):
        resolve_engine_config(run, tmp_path, config)
    with pytest.raises(LoadError, match="`moe_layers`"):
        read(tmp_path, "Llama4ForCausalLM", **{**keys, "moe_layers": [4]})


@pytest.mark.parametrize(
    "family", ["Beam", "Cwm", "Flint", "Kolibri1", "LaraMini", "Mellum", "MuseGlimmerText", "VaultGemma"]
)
def test_kinds_of_layers_that_are_left_out_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    settings = {"num_hidden_layers": 11, "sliding_window": 20, "rope_parameters": None, "num_experts": 8}
    experts = {"num_experts_per_tok": 2, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 32}
    write_tiny_config(tmp_path, family, **settings, **experts, shared_expert_intermediate_size=32)
    architecture = next(name for name in NAMES if name.startswith(family.removesuffix("Text")))
    edit_json(tmp_path / "config.json", architectures=[architecture])
    config = load_model_config(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    left_out = ("layer_types", "mlp_layer_types", "mlp_only_layers", "layer_rope_theta", "rope_parameters")
    kept = {key: value for key, value in values.items() if key not in left_out}
    (tmp_path / "config.json").write_text(json.dumps(kept))
    assert load_model_config(tmp_path) == config
    assert len(config.decoder.layer_kinds) > 1 or family == "Mellum"


def test_keys_that_hold_positions_are_not_kept_in_fp8(tmp_path: Path) -> None:
    config = read(tmp_path, "BloomForCausalLM", head_dim=None)
    run = RunConfig(model="m", device="cpu", kv_cache_dtype="fp8")
    with pytest.raises(ConfigError, match="would round the positions that keys of this model"):
        resolve_engine_config(run, tmp_path, config)


def test_internlm3_has_names_of_its_own_for_biases(tmp_path: Path) -> None:
    config = read(tmp_path, "InternLM3ForCausalLM", qkv_bias=True, bias=False)
    assert (attention_of(config).qkv_bias, attention_of(config).o_bias) == (True, False)


PYTHIA = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "max_position_embeddings": 2048,
    "hidden_act": "gelu",
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "torch_dtype": "float16",
    "vocab_size": 50304,
}


def write(folder: Path, architecture: str, values: dict[str, Any]) -> Path:
    """Write these keys of a config.json alone."""
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **values}))
    return folder


def test_pythia_of_the_hub(tmp_path: Path) -> None:
    """Its files have names of their own for settings of the rotation."""
    config = load_model_config(write(tmp_path, "GPTNeoXForCausalLM", PYTHIA))
    rope = rope_of(config)
    assert (rope.theta, rope.rotary_dim(64), rope.is_interleaved) == (10_000.0, 16, False)
    assert config.decoder.layer_kinds[0].is_parallel
    assert not config.tie_word_embeddings
    write(tmp_path, "GPTNeoXForCausalLM", {**PYTHIA, "rotary_pct": 1.5})
    with pytest.raises(LoadError, match=r"`rotary_pct`: 1\.5 of 64"):
        load_model_config(tmp_path)
    write(tmp_path, "GPTNeoXForCausalLM", {**PYTHIA, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert rope_of(load_model_config(tmp_path)).rotary_dim(64) == 16


GPT2 = {"n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024, "n_ctx": 1024, "vocab_size": 50257}
OPT = {
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "max_position_embeddings": 2048,
    "activation_function": "relu",
    "do_layer_norm_before": True,
    "word_embed_proj_dim": 768,
    "vocab_size": 50272,
}


FALCON = {
    "hidden_size": 8192,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "new_decoder_architecture": True,
    "vocab_size": 65024,
}


def test_command_r_of_the_hub_has_a_longer_context_beside_that_of_its_first_training(tmp_path: Path) -> None:
    config = read(tmp_path, "CohereForCausalLM", max_position_embeddings=8192, model_max_length=131_072)
    assert config.max_position_embeddings == 131_072
    assert read(tmp_path, "CohereForCausalLM", max_position_embeddings=8192).max_position_embeddings == 8192


def test_falcon_of_the_hub(tmp_path: Path) -> None:
    """The files of Falcon-40B count KV heads; those of Falcon-7B have one, whatever they count."""
    values = {**FALCON, "num_kv_heads": 8, "parallel_attn": True, "alibi": False}
    config = load_model_config(write(tmp_path, "FalconForCausalLM", values))
    assert (attention_of(config).num_kv_heads, config.decoder.layout.qkv_groups) == (8, 8)
    assert (config.max_position_embeddings, config.tie_word_embeddings) == (2048, True)
    assert config.decoder.layer_kinds[0].norms.mlp_skips_mixer
    small = {"hidden_size": 4544, "num_attention_heads": 71, "num_kv_heads": 71, "new_decoder_architecture": False}
    config = load_model_config(write(tmp_path, "FalconForCausalLM", {**values, **small, "multi_query": True}))
    assert (attention_of(config).num_kv_heads, attention_of(config).head_dim) == (1, 64)
    assert config.decoder.layer_kinds[0].norms.before_mlp is None


def test_gpt_2_and_opt_of_the_hub_learned_their_positions(tmp_path: Path) -> None:
    config = load_model_config(write(tmp_path, "GPT2LMHeadModel", GPT2))
    assert config.decoder.learned_positions == LearnedPositions(count=1024)
    assert (config.max_position_embeddings, config.tie_word_embeddings, config.has_head) == (1024, True, True)
    assert not load_model_config(write(tmp_path, "GPT2Model", GPT2)).has_head
    config = load_model_config(write(tmp_path, "OPTForCausalLM", OPT))
    assert config.decoder.learned_positions == LearnedPositions(count=2048, offset=2)
    stages = [{tensor.name for tensor in model_tensors(config, "float16", Stage(index, 2))} for index in range(2)]
    assert ["model.embed_positions.weight" in names for names in stages] == [True, False]


BAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_d_state": 8}
LARGE4 = "MistralLarge4ForConditionalGeneration"
LONGCAT = EXPERT_SHAPES["longcat-flash"][1]
MINIMAX = {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": None}
NEMOTRON_H = {"layer_norm_epsilon": 1e-5, "mlp_hidden_act": "relu2"}


_STEP = {
    "attention_other_setting": {"num_attention_heads": 4, "num_attention_groups": 2},
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "moe_num_experts": 4,
    "moe_top_k": 2,
    "share_expert_dim": 32,
    "sliding_window": 8,
}


@pytest.mark.parametrize(
    ("architecture", "values", "parts"),
    [
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 2]}, ["`no_rope_layers`", "[1, 2]"]),
        (
            "Phi3ForCausalLM",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}},
            ["short_factor", "1 "],
        ),
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, ["`use_bidirectional_attention`"]),
        ("Gemma4ForCausalLM", {"use_bidirectional_attention": "all"}, ["`use_bidirectional_attention`", "vision"]),
        ("Gemma2ForCausalLM", {"hidden_activation": "relu"}, ["`hidden_activation`", "relu", "gelu_pytorch_tanh"]),
        ("Gemma3nForCausalLM", {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.5, 1]}, ["1.0 is not a"]),
        ("Gemma3nForCausalLM", {"altup_active_idx": 1}, ["`altup_active_idx`: 1 is not supported"]),
        ("RecurrentGemmaForCausalLM", {"block_types": [["attention"]]}, ["`block_types`", "recurrent and attention"]),
        ("RecurrentGemmaForCausalLM", {"block_types": []}, ["`block_types`: []"]),
        ("RecurrentGemmaForCausalLM", {"is_causal": False}, ["`is_causal`: false is not supported for the layers of"]),
        (
            "Gemma4ForCausalLM",
            {
                "hidden_size_per_layer_input": 0,
                "attention_k_eq_v": True,
                "num_hidden_layers": 6,
                "rope_parameters": {
                    FULL: {"rope_theta": 1e4, "partial_rotary_factor": 0.5},
                    SLIDING: {"rope_theta": 1e4},
                },
            },
            ["`rope_parameters`", "keys are values"],
        ),
        (
            "BambaForCausalLM",
            {**BAMBA, "attn_layer_indices": [1], "time_step_limit": [0.001, 0.1]},
            ["`time_step_limit`", "0.001"],
        ),
        (
            "BambaForCausalLM",
            {**BAMBA, "attn_layer_indices": [1], "mamba_d_head": 5},
            ["`mamba_d_head`", "of 5 do not"],
        ),
        ("MiniMaxM1ForCausalLM", {**MINIMAX, "attn_type_list": [0, 2]}, ["`attn_type_list`", "[0, 2]", "2 layers"]),
        ("MiniMaxM1ForCausalLM", {**MINIMAX, "postnorm": False}, ["`postnorm`: false"]),
        ("MiniMaxM1ForCausalLM", {**MINIMAX, "hidden_act": "gelu_new"}, ["`hidden_act`", "gelu_new", "silu"]),
        ("MiniMaxM1ForCausalLM", {**MINIMAX, "head_dim": 512}, ["`head_dim`: 512 is too large"]),
        ("MiniMaxM1ForCausalLM", {**MINIMAX, "layernorm_mlp_beta": 0}, ["`layernorm_mlp_beta`: 0"]),
        (
            "DbrxForCausalLM",
            {"ffn_config": {"moe_num_experts": 4, "moe_top_k": 5, "ffn_hidden_size": 8}},
            ["`ffn_config.moe_top_k`: 5 is more than"],
        ),
        ("NemotronHForCausalLM", {**NEMOTRON_H, "hybrid_override_pattern": "-*"}, ["block 0 is mlp"]),
        (
            "NemotronHForCausalLM",
            {**NEMOTRON_H, "hybrid_override_pattern": "*E", "moe_latent_size": 8, "mlp_bias": True},
            ["`mlp_bias`: true is not supported together with `moe_latent_size`"],
        ),
        ("PhimoeForCausalLM", {"num_experts_per_tok": 3}, ["`num_experts_per_tok`", "3"]),
        ("GraniteForCausalLM", {"residual_multiplier": 0}, ["`residual_multiplier`", "0"]),
        ("GraniteSWAForCausalLM", {"layer_rope_theta": [1e4]}, ["`layer_rope_theta`", "for 2 layers"]),
        ("GraniteSWAForCausalLM", {"layer_rope_theta": [0, -1]}, ["`layer_rope_theta.1`", "-1"]),
        ("Cohere2ForCausalLM", {"logit_scale": -1}, ["`logit_scale`", "-1"]),
        ("GPT2LMHeadModel", {**GPT2, "n_head": 0}, ["`n_head`: 0 is not positive"]),
        ("GPT2LMHeadModel", {**GPT2, "n_positions": 0}, ["`n_positions`: 0 is not positive"]),
        ("GPT2LMHeadModel", {**GPT2, "n_inner": "x"}, ["`n_inner`", "x"]),
        ("GPT2LMHeadModel", {**GPT2, "activation_function": "silu"}, ["`activation_function`", "silu", "gelu_new"]),
        ("GPT2LMHeadModel", {**GPT2, "scale_attn_by_inverse_layer_idx": True}, ["inverse_layer_idx`: true"]),
        ("GPTBigCodeForCausalLM", {**GPT2, "multi_query": 1}, ["`multi_query`: 1 is not true or false"]),
        ("GPTNeoForCausalLM", {"num_layers": 2, "attention_types": [["global", 2]]}, ["`attention_types`", "2 layers"]),
        ("GPTNeoForCausalLM", {"num_layers": 2, "attention_types": 7}, ["`attention_types`", "7 does not say"]),
        ("GPTJForCausalLM", {**GPT2, "rotary_dim": 65}, ["`rotary_dim`: 65 is too large; allowed: up to 16"]),
        ("CodeGenForCausalLM", {**GPT2, "n_head": 6}, ["`n_head`: must be a multiple of 4"]),
        ("PhiForCausalLM", {"qk_layernorm": True, "hidden_act": "gelu_new"}, ["`qk_layernorm`", "true", "false"]),
        ("FalconForCausalLM", {**FALCON, "alibi": 1}, ["`alibi`", "1 is not true or false"]),
        ("FalconForCausalLM", {**FALCON, "parallel_attn": False}, ["`parallel_attn`", "together with"]),
        ("FalconForCausalLM", {**FALCON, "n_head_kv": 7}, ["`n_head_kv`: 7 does not divide 128"]),
        ("BloomForCausalLM", {"apply_residual_connection_post_layernorm": True}, ["true is not supported"]),
        ("MPTForCausalLM", {"attn_config": {"alibi": False}}, ["`attn_config.alibi`: false is not supported"]),
        ("OPTForCausalLM", {**OPT, "do_layer_norm_before": False}, ["`do_layer_norm_before`", "false", "true"]),
        ("OPTForCausalLM", {**OPT, "word_embed_proj_dim": 512}, ["`word_embed_proj_dim`: 512", "768"]),
        ("CohereForCausalLM", {"use_qk_norm": 1}, ["`use_qk_norm`", "1 is not true or false"]),
        ("StableLmForCausalLM", {"qk_layernorm": True}, ["`qk_layernorm`", "a norm of its own"]),
        ("Exaone4ForCausalLM", {"sliding_window_pattern": "LX"}, ["`sliding_window_pattern`", "LX"]),
        ("ArceeForCausalLM", {"hidden_act": "silu"}, ["`hidden_act`", "silu", "relu2"]),
        (
            "HunYuanMoEV1ForCausalLM",
            {"num_experts": [4, 8], "moe_topk": 2},
            ["`num_experts`", "[4, 8]", "all 2 layers"],
        ),
        ("LagunaForCausalLM", {"num_attention_heads_per_layer": [4]}, ["`num_attention_heads_per_layer`", "2 layers"]),
        (
            "HYV3ForCausalLM",
            {"mlp_layer_types": ["dense"], "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
            ["`mlp_layer_types`", "2 layers"],
        ),
        (
            "Cohere2MoeForCausalLM",
            {"num_experts": 4, "num_experts_per_tok": 2, "shared_expert_combination_strategy": "max"},
            ["`shared_expert_combination_strategy`", "max"],
        ),
        (
            "JambaForCausalLM",
            {"mamba_d_conv": 4, "attn_layer_offset": 8},
            ["`attn_layer_offset`", "8 is not from 0 to 7"],
        ),
        ("MambaForCausalLM", {"conv_kernel": 4, "state_size": 128}, ["`state_size`", "128 is too large"]),
        ("MambaForCausalLM", {"conv_kernel": 4, "hidden_act": "gelu"}, ["`hidden_act`", "supported: silu"]),
        (
            "Step3p5ForCausalLM",
            {**_STEP, "swiglu_limits": [0, 7], "hidden_act": "gelu_pytorch_tanh"},
            ["`hidden_act`", "only silu", "`swiglu_limits`"],
        ),
        ("Step3p5ForCausalLM", {**_STEP, "swiglu_limits": [0, -7]}, ["`swiglu_limits.1`", "-7"]),
        ("Mistral3ForConditionalGeneration", {"text_config": {"model_type": "x"}}, ["`text_config.model_type`", "x"]),
        ("Gemma3ForConditionalGeneration", {"text_config": "x"}, ["`text_config`", "x", "not an object"]),
    ],
)
def test_refused(tmp_path: Path, architecture: str, values: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(LoadError) as caught:
        read(tmp_path, architecture, **values)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def latent_attention(folder: Path, architecture: str, **changes: Any) -> ModelConfig:
    values = {**LATENTS, "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return read(folder, architecture, **{**values, "n_group": 1, "topk_group": 1, **changes})


def test_hunyuan_v4_of_the_hub(tmp_path: Path) -> None:
    """The names of its files, and layers that choose keys without a list of them."""
    config = latent_attention(tmp_path, "HYV4ForCausalLM", num_hidden_layers=7)
    names = {
        "model.layers.0.hc_attn_layer.hc_pre.hc_fn": "model.layers.0.attn_hc.fn",
        "model.layers.0.hc_mlp_layer.hc_pre.hc_scale": "model.layers.0.ffn_hc.scale",
        "model.hc_head.hc_head_base": "model.hc_head.base",
        "model.layers.0.self_attn.linear_gate.weight": "model.layers.0.self_attn.g_proj.weight",
        "model.layers.0.self_attn.learnable_sink_param": "model.layers.0.self_attn.sinks",
        "model.mtp_layers.0.hnorm.weight": None,
    }
    assert {name: config.decoder.layout.decoder_name(name) for name in names} == names
    tensors = {tensor.name for tensor in model_tensors(config, "bfloat16")}
    assert tensors > {name for name in names.values() if name is not None}
    choosing = [number for number, layer in enumerate(config.layers) if not layer.mixer.reads_earlier_choice]
    assert choosing == [0, 1, 5]


@pytest.mark.parametrize(
    ("section", "lowest"), [({}, -5.0), ({"gate_lower_bound": -3.0}, -3.0), ({"safe_gate": False}, None)]
)
def test_glm_5_3_of_the_hub(section: dict[str, Any], lowest: float | None, tmp_path: Path) -> None:
    """The names of its files, its section for linear attention, and layers without a list of their kinds."""
    of_linear = {"head_dim": 16, "num_heads": 8, "short_conv_kernel_size": 3, "gate_lower_bound": None, **section}
    own = {"qk_rope_head_dim": 0, "num_hidden_layers": 9, "linear_attn_config": of_linear}
    config = latent_attention(tmp_path, "Glm5NextForConditionalGeneration", **own)
    name = "model.language_model.layers.3.{}"
    names = {
        name.format("hc_attn_fn"): "model.layers.3.attn_hc.fn",
        name.format("hc_ffn_scale"): "model.layers.3.ffn_hc.scale",
        name.format("self_attn.indexer.index_kpool_compress_gate"): "model.layers.3.self_attn.indexer_gates.weight",
        name.format("mlp.shared_experts.up_proj.weight"): "model.layers.3.mlp.shared_expert.up_proj.weight",
        "model.language_model.layers.9.eh_proj.weight": None,
    }
    layout = replace(config.decoder.layout, is_part=True)
    assert {stored: layout.decoder_name(stored) for stored in names} == names
    assert {tensor.name for tensor in model_tensors(config, "bfloat16")} > {found for found in names.values() if found}
    mixers = [layer.mixer for layer in config.layers]
    assert [number for number, mixer in enumerate(mixers) if isinstance(mixer, LatentAttentionConfig)] == [3, 7]
    delta = mixers[0]
    assert isinstance(delta, KimiDeltaConfig)
    assert (delta.head_dim, delta.num_heads, delta.conv_taps, delta.lowest_decay) == (16, 8, 3, lowest)


def test_stages_choose_their_own_keys(tmp_path: Path) -> None:
    """Also behind layers that choose none."""
    kinds = [*["full"] * 7, "shared"]
    own = {"qk_rope_head_dim": 0, "num_hidden_layers": 8, "indexer_types": kinds}
    config = latent_attention(tmp_path, "Glm5NextForConditionalGeneration", **own)
    with pytest.raises(ConfigError, match="a layer would attend to keys that an earlier stage has chosen"):
        config.check_pipeline_parallel(2)
    config.for_length(2000).check_pipeline_parallel(2)


def test_deepseek_of_the_hub(tmp_path: Path) -> None:
    """Scores grow with the stretched context; a token keeps 576 numbers in each layer on every rank."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["deepseek-v2-lite"]))
    mixer = load_model_config(tmp_path).layers[0].mixer
    assert isinstance(mixer, LatentAttentionConfig)
    assert mixer.scale == pytest.approx(192**-0.5 * (0.1 * 0.707 * math.log(40) + 1) ** 2)
    assert mixer.rope is not None
    assert (mixer.rope.is_interleaved, mixer.rope.attention_factor) == (True, 1.0)
    for size in (1, 16):
        spec = mixer.kv_spec(size)
        assert (spec.num_heads, spec.head_dim, spec.result_dim) == (16 // size, 576, 512)
        assert spec.token_bytes("bfloat16") == 2 * 576


def test_hunyuan_ocr_of_the_hub(tmp_path: Path) -> None:
    """Its files have no section of the decoder, and other names for its rotation."""
    text = tiny_model_config(tie_word_embeddings=True)
    rope = {"type": "xdrope", "alpha": 50.0, "factor": 1.0, "xdrope_section": [3, 1, 2, 2]}
    del text["rope_parameters"]
    values = {**text, "rope_theta": 10_000.0, "rope_scaling": rope, "image_token_id": 5}
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 24}
    values |= {"architectures": ["HunYuanVLForConditionalGeneration"], "vision_config": sizes | {"patch_size": 16}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = load_model_config(tmp_path)
    assert model.tie_word_embeddings
    assert rope_of(model) == RopeConfig(rope_type="default", theta=10_000.0 * 50 ** (16 / 14))
    assert model.vision is not None
    assert model.vision.axes == (0, 0, 0, 2, 1, 1, 3, 3)
    assert model.decoder.layout.decoder_name("model.norm.weight") == "model.norm.weight"
    (tmp_path / "config.json").write_text(json.dumps({**values, "head_dim": 2}))
    with pytest.raises(LoadError, match="`head_dim`: 2 is too small where `alpha` enlarges"):
        load_model_config(tmp_path)


def test_paligemma_2_reads_prompts_that_no_window_cuts(tmp_path: Path) -> None:
    text = {"model_type": "gemma2", "sliding_window": 4096, "num_hidden_layers": 3, "num_key_value_heads": 2}
    text |= {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 48, "num_attention_heads": 4}
    tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    values = {"architectures": ["PaliGemmaForConditionalGeneration"], "text_config": text}
    for side in (448, 896):
        values["vision_config"] = {**tower, "patch_size": 14, "image_size": side}
        (tmp_path / str(side)).mkdir()
        (tmp_path / str(side) / "config.json").write_text(json.dumps(values))
    model = load_model_config(tmp_path / "448")
    assert model.max_position_embeddings == 4096
    mixers = [layer.mixer for layer in model.layers]
    assert [(mixer.window, mixer.head_dim) for mixer in mixers if isinstance(mixer, AttentionConfig)] == [
        (None, 256)
    ] * 3
    with pytest.raises(LoadError, match=r"`vision_config\.image_size`: images have 4,096 tokens"):
        load_model_config(tmp_path / "896")


def test_nemotron_omni_of_the_hub(tmp_path: Path) -> None:
    """Its files have other names of sections and keys, and leave out the tower's sizes."""
    text = tiny_model_config(**NEMOTRON, mlp_hidden_act="relu2", layer_norm_epsilon=1e-5, conv_kernel=4)
    unquantised = "language_model.backbone.layers.2.mixer.q_proj"
    values = {
        "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
        "img_context_token_id": 18,
        "vit_hidden_size": 1280,
        "llm_config": text,
        "vision_config": {"args": {"min_num_patches": 1024}, "patch_size": 16},
        "quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [unquantised]},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    model = load_model_config(tmp_path)
    vision = model.vision
    assert vision is not None
    assert (vision.hidden_size, vision.depth, vision.num_registers, vision.image_token_id) == (1280, 32, 10, 18)
    assert model.decoder.layout.decoder_name(f"{unquantised}.weight") == "model.layers.1.self_attn.q_proj.weight"
    alone = [name for name in ("q_proj", "k_proj") if model.leaves_alone(f"model.layers.1.self_attn.{name}")]
    assert alone == ["q_proj"]
    text["num_attention_heads"] = 0
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(LoadError, match=r"`llm_config\.num_attention_heads`: 0"):
        load_model_config(tmp_path)


HUB_TOWERS: dict[str, tuple[int, dict[str, Any], dict[str, Any], int]] = {
    "kimi k2.5 with vision": (
        7168,
        {
            "architectures": ["KimiK25ForConditionalGeneration"],
            "media_placeholder_token_id": 163_605,
            "projection_hidden_size": None,
        },
        {
            "init_pos_emb_height": 64,
            "init_pos_emb_width": 64,
            "init_pos_emb_time": 4,
            "patch_size": 14,
            "merge_kernel_size": [2, 2],
            "merge_type": "sd2_tpool",
            "mm_projector_type": "patchmerger",
            "mm_hidden_size": 1152,
            "projector_hidden_act": "gelu",
            "projector_ln_eps": 1e-5,
            "model_type": "",
            "vt_hidden_size": 1152,
            "vt_intermediate_size": 4304,
            "vt_num_attention_heads": 16,
            "vt_num_hidden_layers": 27,
        },
        471_143_920,
    ),
    "llama 4 with vision": (
        5120,
        {},
        {
            "hidden_act": "gelu",
            "hidden_size": 1408,
            "image_size": 336,
            "intermediate_size": 5632,
            "model_type": "llama4_vision_model",
            "multi_modal_projector_bias": False,
            "norm_eps": 1e-5,
            "num_attention_heads": 16,
            "num_channels": 3,
            "num_hidden_layers": 34,
            "patch_size": 14,
            "pixel_shuffle_ratio": 0.5,
            "projector_input_dim": 4096,
            "projector_output_dim": 4096,
            "rope_theta": 10_000,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "vision_output_dim": 4096,
        },
        871_932_416,
    ),
    "step 3.7 with vision": (
        4096,
        {"understand_projector_stride": 2, "projector_bias": False, "image_token_id": 128_001},
        {
            "model_type": "perception_encoder",
            "image_size": 728,
            "patch_size": 14,
            "width": 1536,
            "layers": 47,
            "heads": 16,
            "use_cls_token": False,
            "ls_init_value": 0.1,
            "use_ln_post": False,
            "hidden_act": "quick_gelu",
            "output_dim": None,
            "pool_type": "none",
        },
        1_981_014_784,
    ),
}
"""By the names of `EXPERT_SHAPES`: the hidden size of a published checkpoint, other keys of its config.json, its
section of the tower, and how many weights its files have of that."""


@pytest.mark.parametrize("name", HUB_TOWERS)
def test_towers_of_the_hub(name: str, tmp_path: Path) -> None:
    family, overrides = EXPERT_SHAPES[name]
    hidden_size, own, tower, count = HUB_TOWERS[name]
    write_tiny_config(tmp_path, family, **{**overrides, "hidden_size": hidden_size})
    edit_json(tmp_path / "config.json", **own, vision_config=tower)
    vision = load_model_config(tmp_path).vision
    assert vision is not None
    assert sum(math.prod(tensor.shape) for tensor in tower_tensors(vision, "bfloat16")) == count
    assert own.get("media_placeholder_token_id", vision.image_token_id) == vision.image_token_id


def test_jamba_and_falcon_mamba_of_the_hub(tmp_path: Path) -> None:
    """Falcon Mamba's `intermediate_size` counts, and not what `expand` says; a Jamba of one expert has MLPs."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["falcon-mamba-7b"]))
    config = load_model_config(tmp_path)
    spec = config.layers[0].mixer.kv_spec(2)
    assert isinstance(spec, StateSpec)
    assert (spec.conv_shape, spec.recurrent_shape, spec.key_size) == ((3, 4096), (1, 16, 4096), 16)
    assert spec.kept_bytes(2, 3) == 4 * 16 * 4096 + 3 * (2 * 4096 + 2 * (2 * 16 + 4 * 2 * 4096))
    dense = {**SHAPES["jamba-mini-1.7"], "num_experts": 1}
    for shape, sparse in ((SHAPES["jamba-mini-1.7"], [*range(1, 32, 2)]), (dense, [])):
        (tmp_path / "config.json").write_text(json.dumps(shape))
        layers = load_model_config(tmp_path).layers
        assert [number for number, layer in enumerate(layers) if layer.mlp.routing is not None] == sparse
        assert [n for n, one in enumerate(layers) if isinstance(one.mixer, AttentionConfig)] == [4, 12, 20, 28]


def test_kimi_linear_of_the_hub(tmp_path: Path) -> None:
    """Its lists count layers from 1; nothing is rotated."""
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["kimi-linear-48b-a3b"]))
    config = load_model_config(tmp_path)
    full = [number for number, layer in enumerate(config.layers) if isinstance(layer.mixer, LatentAttentionConfig)]
    assert full == [3, 7, 11, 15, 19, 23, 26]
    assert (config.max_position_embeddings, config.decoder.angles_per_position) == (1 << 20, 0)
    assert [layer.mlp.routing is None for layer in config.layers[:3]] == [True, False, False]
    routing = config.layers[1].mlp.routing
    assert routing is not None
    assert (routing.num_experts, routing.experts_per_token, routing.scale, routing.renormalise) == (256, 8, 2.446, True)
    spec = config.layers[0].mixer.kv_spec(4)
    assert isinstance(spec, StateSpec)
    assert (spec.conv_shape, spec.recurrent_shape, spec.num_decays) == ((3, 3 * 1024), (8, 128, 128), 128)


def test_the_last_experts_of_ling_3_are_clamped(tmp_path: Path) -> None:
    """By lists that transformers does not read; their entries behind the layers are those of another head."""
    shape = EXPERT_SHAPES["ling 3"][1]
    config = read(
        tmp_path,
        "BailingMoeV3ForCausalLM",
        **{**shape, "layer_group_size": 3, "num_experts": 8, "max_position_embeddings": 512},
        expert_swiglu_limit_list=[0, 0, 0, 7, 9],
        share_expert_swiglu_limit_list=[16, 0, 16, 16, 9],
    )
    mlps: list[Any] = [layer.mlp for layer in config.layers]
    clamped = ExpertActivation(kind="clamped_silu", limit=16.0)
    shared = [mlp.shared.activation for mlp in mlps[1:]]
    assert (mlps[0].activation, shared) == (ExpertActivation(), [ExpertActivation(), clamped, clamped])
    assert [(mlp.activation.kind, mlp.activation.limit) for mlp in mlps[1:]] == [
        *[("silu", 0.0)] * 2,
        ("clamped_silu", 7),
    ]
    delta = config.layers[0].mixer
    assert isinstance(delta, KimiDeltaConfig)
    assert delta.lowest_decay == -5


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"attn_res_block_size": 2}, "`attn_res_block_size`: 2 is not supported"),
        ({"mla_use_nope": False}, "`mla_use_nope`: false is not supported"),
        ({"linear_attn_config": {"gate_lower_bound": -5.0}}, "`linear_attn_config.gate_lower_bound`: -5.0 is not"),
        ({"linear_attn_config": {"kda_layers": [1, 2]}}, "`linear_attn_config.full_attn_layers`: null is not a list"),
        (
            {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [1]}},
            "with `full_attn_layers`, it does not name layers 1 to 2",
        ),
        ({"linear_head_dim": 300}, "`linear_head_dim`: 300 is too large"),
        ({"linear_attn_config": {"num_heads": 0}}, "`linear_attn_config.num_heads`: 0 is not positive"),
    ],
)
def test_kimi_linear_that_is_not_computed(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    own = {"linear_num_heads": 4, "linear_head_dim": 8, "linear_conv_kernel_dim": 4, "q_lora_rank": None}
    with pytest.raises(LoadError) as error:
        latent_attention(tmp_path, "KimiLinearForCausalLM", **{**own, **changes})
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"index_block_size": 12}, "`index_block_size`: 12 is no power of 2"),
        ({"index_local_blocks": 5}, "`index_local_blocks`: 5 blocks are not fewer than `index_topk_blocks`, 5"),
        ({"index_n_heads": 4}, "`index_n_heads`: only 2 is supported here"),
        ({"mlp_layer_types": None, "moe_layer_freq": [2]}, "`moe_layer_freq`: [2] is not a list of 0 and 1"),
        (
            {"layer_types": None, "sparse_attention_config": {"sparse_attention_freq": 1}},
            "`sparse_attention_config.sparse_attention_freq`: 1 is not a list of 0 and 1",
        ),
    ],
)
def test_minimax_m3_that_is_not_computed(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError) as error:
        read(tmp_path, "MiniMaxM3VLForCausalLM", **{**EXPERT_SHAPES["minimax m3 with vision"][1], **changes})
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"indexer_kv_heads": 2}, "`indexer_kv_heads`: 2 is not supported"),
        ({"indexer_budget": 13}, "`indexer_budget`: 13 keys are no whole number of pools of 3"),
        ({"indexer_budget": None}, "`indexer_budget`: null"),
        ({"indexer_head_dim": 2}, "`indexer_head_dim`: 2 is too small; allowed: from 4 on"),
        ({"indexer_head_dim": 7}, "`indexer_head_dim`: 7 is odd"),
        ({"output_gate_type": "relu"}, '`output_gate_type`: "relu" is not supported; supported: silu, sigmoid'),
        ({"ple_layer_ids": [5]}, "`ple_layer_ids`: [5] is not a list of numbers from 1 to 4"),
        ({"ple_embed_dim": 25}, "`ple_embed_dim`: 6 hashes of n-grams do not divide 25"),
        ({"eos_token_id": []}, "`eos_token_id`: [] has no id, by which texts are parted"),
        ({"split_ngram_parts": 10**9}, "`split_ngram_parts`: 1000000000 is too large"),
    ],
)
def test_qwen4_that_is_not_computed(changes: dict[str, Any], problem: str, tmp_path: Path) -> None:
    with pytest.raises(LoadError) as error:
        read(tmp_path, "Qwen4ExpForCausalLM", **{**EXPERT_SHAPES["qwen 4-exp with vision"][1], **changes})
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("architecture", "changes", "problem"),
    [
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "`norm_topk_prob`: true is not supported"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, '`topk_method`: "noaux_tc" is not supported'),
        ("DeepseekV3ForCausalLM", {"qk_rope_head_dim": 7}, "`qk_rope_head_dim`: 7 is odd"),
        (
            "DeepseekV3ForCausalLM",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale_all_dim": 1e300}},
            "`rope_parameters.mscale_all_dim`: 1e+300 gives a factor of 1.38629e+299; allowed: above 0, up to 1,000",
        ),
        ("DeepseekV3ForCausalLM", {"kv_lora_rank": None}, "`kv_lora_rank`: null"),
        ("DeepseekV3ForCausalLM", {"q_lora_rank": None, "attention_bias": True}, "`attention_bias`: true is not"),
        ("DeepseekV32ForCausalLM", {"index_head_dim": 8}, "`index_head_dim`: 8 is less than `qk_rope_head_dim`, 16"),
        ("DeepseekV32ForCausalLM", {"q_lora_rank": None}, "`q_lora_rank`: null is not supported together with `index"),
        (
            "GlmMoeDsaForCausalLM",
            {"indexer_types": ["full"]},
            '`indexer_types`: ["full"] does not say full or shared of',
        ),
        (
            "GlmMoeDsaForCausalLM",
            {"num_hidden_layers": 2, "index_topk_pattern": "SF"},
            "`index_topk_pattern`: the first layer has none before",
        ),
        ("Glm5NextForConditionalGeneration", {}, "`qk_rope_head_dim`: only 0 is supported here"),
        (
            "Glm5NextForConditionalGeneration",
            {"qk_rope_head_dim": 0, "index_kpool": 3},
            "`index_topk`: 2048 keys are no whole number of pools of 3",
        ),
        (
            "Glm5NextForConditionalGeneration",
            {"qk_rope_head_dim": 0, "linear_lower_bound": 1.0},
            "`linear_lower_bound`: 1 is not below zero",
        ),
        ("HYV4ForCausalLM", {"hc_mult": 1}, "`hc_mult`: 1 is too small"),
        ("HYV4ForCausalLM", {"hidden_act": "gelu_new"}, "`hidden_act`: only silu is supported together with `swiglu"),
        ("Mistral4ForCausalLM", {"n_group": 2}, "`n_group`: groups of experts are not supported here"),
        ("Mistral4ForCausalLM", {"partial_rotary_factor": 0.5}, "0.5 of 24 dimensions are not the 16"),
        (LARGE4, {"n_group": 2}, "`n_group`: groups of experts are not supported here"),
        (LARGE4, {"no_rope_layers": [1]}, "`no_rope_layers`: [1] is not a list of 0 and 1 for 2 layers"),
        (LARGE4, {"kv_source_layers": [0, True]}, "`kv_source_layers`: [0, true] is not a list of 2 layer numbers"),
        (LARGE4, {"kv_source_layers": [1, 1]}, "`kv_source_layers`: layer 0 reads 1, which has no latent vectors"),
        (LARGE4, {"no_rope_layers": [0, 1], "kv_source_layers": [0, 0]}, "of layers 0 and 1, which share keys, one"),
        ("LongcatFlashForCausalLM", {**LONGCAT, "zero_expert_num": -1}, "`zero_expert_num`: -1 is not between 0 and"),
        ("LongcatFlashForCausalLM", {**LONGCAT, "zero_expert_type": "copy"}, '"copy" is not supported; supported: "id'),
    ],
)
def test_latent_attention_that_is_not_computed(
    architecture: str, changes: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(LoadError) as error:
        latent_attention(tmp_path, architecture, **changes)
    assert problem in str(error.value)
