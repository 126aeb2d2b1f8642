"""Sizes that are said without building a model are those of the model that is built."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from checkpoints import FAMILIES, write_tiny_model
from fake_runners import engine_config
from nvcli.attention.spec import AttentionSpec
from nvcli.models.config import load_model_config
from nvcli.models.geometry import model_tensors
from nvcli.models.kv_groups import block_bytes
from nvcli.models.registry import build_model
from nvcli.sizing.costs import model_costs
from nvcli.sizing.kv_cache import tokens_in
from nvcli.sizing.memory import estimate, with_affordable_drafts
from nvcli.sizing.weights import largest_stage, weight_bytes
from nvcli.tools.bench.shapes import write_shape
from nvcli.worker.distributed.stage import WHOLE, Stage
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup


def group_of(rank: int, size: int) -> TensorParallelGroup:
    group = TensorParallelGroup.single()
    group.rank, group.size = rank, size
    return group


def assert_same(path: Path, tp: int, rank: int, stage: Stage = WHOLE, dtype: torch.dtype = torch.bfloat16) -> None:
    """What is planned is what each item of the built model takes, and all of its parameters."""
    config = load_model_config(path)
    model = build_model(config, group_of(rank, tp), dtype, stage=stage)
    name: Any = str(dtype).removeprefix("torch.")
    planned = weight_bytes(config, name, tensor_parallel_size=tp, stage=stage)
    assert planned == model.weight_bytes()
    assert sum(planned.values()) == sum(p.numel() * p.element_size() for p in model.parameters())
    by_name = {"embed_tokens": "embeddings", "mixer": "attention", "mlp": "MLP", "lm_head": "LM head"}
    experts = planned.get("experts", 0)
    for key, part in by_name.items():
        found = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if f".{key}." in f".{n}")
        assert planned.get(part, 0) + (experts if part == "MLP" else 0) == found, part
    specs = [spec for spec in model.cache_layers if isinstance(spec, AttentionSpec)]
    kv_bytes = sum(2 * spec.num_kv_heads * spec.head_dim * dtype.itemsize for spec in specs)
    assert block_bytes(config, name, block_size=16, tensor_parallel_size=tp, stage=stage) == 16 * kv_bytes


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-14b", "qwen3-30b-a3b"])
def test_known_shapes(name: str, tp: int, tmp_path: Path) -> None:
    assert_same(write_shape(name, tmp_path), tp, rank=tp - 1)


@pytest.mark.parametrize(
    "changes",
    [{"attention_bias": True}, {"tie_word_embeddings": True}, {"num_key_value_heads": 2, "vocab_size": 101}],
)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_biases_ties_shared_heads_and_padding(changes: dict[str, Any], tp: int, tmp_path: Path) -> None:
    shape = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 64}
    path = write_tiny_model(tmp_path / "tiny", **{**shape, **changes})
    for dtype in (torch.bfloat16, torch.float32):
        assert_same(path, tp, rank=0, dtype=dtype)


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "gpt-oss-20b", "gemma-4-26b-a4b"])
def test_whole_experts(name: str, tmp_path: Path) -> None:
    path = write_shape(name, tmp_path)
    parts, whole = load_model_config(path), load_model_config(path, expert_parallel=True)
    planned = weight_bytes(whole, "bfloat16", tensor_parallel_size=8)
    assert planned == build_model(whole, group_of(7, 8), torch.bfloat16).weight_bytes()
    of_parts = weight_bytes(parts, "bfloat16", tensor_parallel_size=8)
    biases = 24 * 32 * 2880 * 2 if name.startswith("gpt-oss") else 0  # those of down projections, which are not cut
    assert planned == {**of_parts, "experts": of_parts["experts"] - biases * 7 // 8}
    # All pairs may be one rank's: its experts' hidden rows are as many and as wide as those of a rank alone.
    config = engine_config(tensor_parallel_size=8, dtype="bfloat16", device="cuda", max_num_batched_tokens=8192)
    less, more = (estimate(config, model, 80 << 30).planned["activations"] for model in (parts, whole))
    size = whole.layers[-1].mlp.intermediate_size
    assert more - less == 8192 * 2 * whole.layers[-1].mlp.routing.experts_per_token * size * 7 // 8


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "qwen3-30b-a3b"])
def test_attention_by_rows(name: str, tmp_path: Path) -> None:
    """Each rank has the attention of one alone, and the rest of one of eight; an eighth of the requests is its own."""
    path = write_shape(name, tmp_path)
    cut = load_model_config(path, expert_parallel=True)
    by_rows = load_model_config(path, expert_parallel=True, attention_dp=True)
    planned, alone = weight_bytes(by_rows, "bfloat16", tensor_parallel_size=8), weight_bytes(cut, "bfloat16")
    model = build_model(by_rows, group_of(7, 8), torch.bfloat16)
    assert planned == model.weight_bytes()
    assert planned == {**weight_bytes(cut, "bfloat16", tensor_parallel_size=8), "attention": alone["attention"]}
    assert model.cache_layers == build_model(cut, group_of(0, 1), torch.bfloat16).cache_layers
    one_block = block_bytes(cut, "bfloat16", block_size=64)
    assert block_bytes(by_rows, "bfloat16", block_size=64, tensor_parallel_size=8) == one_block
    config = engine_config(tensor_parallel_size=8, enable_attention_dp=True, dtype="bfloat16", max_num_seqs=256)
    config = msgspec.structs.replace(config, max_model_len=4096, block_size=64)
    assert tokens_in(101 * one_block, config, by_rows) == 8 * 100 * 64
    costs, of_one = model_costs(by_rows, "bfloat16", tensor_parallel_size=8), model_costs(cut, "bfloat16")
    assert costs.kv_read_bytes(1000) == of_one.kv_read_bytes(1000) / 8
    assert costs.layers.num_bytes > of_one.layers.num_bytes / 8
    assert costs.operations_per_token < of_one.operations_per_token / 4


def test_several_residual_streams(tmp_path: Path) -> None:
    """Their weights and activations count, in each stage, and what a stage sends to the next."""
    model = load_model_config(write_shape("hy4-preview", tmp_path), overrides={"num_hidden_layers": 2})
    for stage in (Stage(0, 2), Stage(1, 2)):
        built = build_model(model, group_of(1, 2), torch.bfloat16, stage=stage)
        assert weight_bytes(model, "bfloat16", tensor_parallel_size=2, stage=stage) == built.weight_bytes()
    alone = replace(model, decoder=replace(model.decoder, streams=None))
    config = engine_config(device="cuda", dtype="bfloat16", max_num_batched_tokens=2048, pipeline_parallel_size=2)
    several, one = (estimate(config, each, 80 << 30, Stage(0, 2)).planned for each in (model, alone))
    assert several["activations"] - one["activations"] == 2048 * 3 * 2816 * 2
    assert several["buffers"] - one["buffers"] == config.max_padded_tokens * 3 * 2816 * 2
    costs, of_one = (model_costs(each, "bfloat16") for each in (model, alone))
    assert costs.num_kernels == of_one.num_kernels + 2 * 2
    assert costs.layers.num_weights - of_one.layers.num_weights == (2 * 2 * 8 + 4) * 4 * 2816


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    assert_same(write_tiny_model(tmp_path / "tiny", family), tp=2, rank=1)


def test_gates_that_are_cut(tmp_path: Path) -> None:
    """No kernel multiplies gate and up with an activation that reads all gates."""
    model = load_model_config(write_shape("gemma-3n-e4b", tmp_path))
    config = engine_config(device="cuda", dtype="bfloat16", max_num_batched_tokens=2048)
    kinds = tuple(replace(layer, mlp=model.layers[-1].mlp) for layer in model.decoder.layer_kinds)
    models = model, replace(model, decoder=replace(model.decoder, layer_kinds=kinds))
    cut, whole = (estimate(config, each, 80 << 30).planned["activations"] for each in models)
    assert cut - whole == 2048 * 2 * 16384 * 2


@pytest.mark.parametrize("tp", [1, 2])
def test_norms_that_are_kept_in_float32_and_those_of_all_heads(tp: int, tmp_path: Path) -> None:
    for family in ("Gemma3Text", "Olmo3", "Granite"):
        overrides = {"rope_parameters": None} if family == "Gemma3Text" else {}
        path = write_tiny_model(tmp_path / family, family, layer_types=["full_attention"] * 2, **overrides)
        assert_same(path, tp, rank=tp - 1)


@pytest.mark.parametrize("is_tied", [False, True])
def test_stages(is_tied: bool, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny", num_hidden_layers=5, tie_word_embeddings=is_tied)
    for number in range(3):
        assert_same(path, tp=2, rank=0, stage=Stage(number, 3))


def test_the_largest_stage(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny", num_hidden_layers=5, tie_word_embeddings=False)
    model = load_model_config(path)
    assert largest_stage(model, 1) == WHOLE
    assert largest_stage(model, 3) == Stage(0, 3), "two layers and the embedding"


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("qwen3-0.6b", 0.60),
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.76),
        ("qwen3-vl-8b", 8.19),
        ("qwen2.5-vl-7b", 7.62),
        ("qwen3-30b-a3b", 30.53),
        ("qwen3-235b-a22b", 235.09),
        ("gpt-oss-20b", 20.91),
        ("gpt-oss-120b", 116.83),
        ("kimi-linear-48b-a3b", 49.12),
        ("qwen3-next-80b-a3b", 79.67),
        ("qwen3.5-9b", 8.95),
        ("qwen3.5-27b", 26.90),
        ("qwen3.5-35b-a3b", 34.66),
        ("deepseek-v2-lite", 15.71),
        ("deepseek-v3", 671.03),
        ("deepseek-v3.2", 671.91),
        ("deepseek-v4-flash", 284.38),
        ("longcat-flash", 560.67),
        ("glm-4.7-flash", 29.94),
        ("glm-5", 743.93),
        ("glm-5.3-flash", 313.36),
        ("hy4-preview", 58.28),
        ("mixtral-8x7b", 46.70),
        ("mixtral-8x22b", 140.63),
        ("qwen1.5-moe-a2.7b", 14.32),
        ("qwen2-57b-a14b", 57.41),
        ("olmoe-1b-7b", 6.92),
        ("gemma-4-26b-a4b", 25.23),
        ("gemma-3n-e4b", 6.84),
        ("recurrentgemma-2b", 2.68),
        ("bloomz-7b1", 7.07),
        ("mpt-7b-8k", 6.65),
        ("gemma-4-e4b", 7.46),
        ("llama-3.1-8b", 8.03),
        ("llama-3.1-70b", 70.55),
        ("llama-3.2-1b", 1.24),
        ("llama-3.2-3b", 3.21),
        ("smollm3-3b", 3.08),
        ("qwen2.5-0.5b", 0.49),
        ("qwen2.5-7b", 7.62),
        ("qwen2.5-14b", 14.77),
        ("qwen2.5-32b", 32.76),
        ("qwen2.5-72b", 72.71),
        ("mistral-7b", 7.25),
        ("mistral-nemo-12b", 12.25),
        ("mistral-small-24b", 23.57),
        ("gemma-7b", 8.54),
        ("gemma-2-2b", 2.61),
        ("gemma-2-9b", 9.24),
        ("gemma-2-27b", 27.23),
        ("gemma-3-4b", 3.88),
        ("gemma-3-12b", 11.77),
        ("gemma-3-27b", 27.01),
        ("phi-4", 14.66),
        ("olmo-2-7b", 7.30),
        ("olmo-2-13b", 13.72),
        ("olmo-2-32b", 32.23),
        ("olmo-3-7b", 7.30),
        ("granite-3.3-8b", 8.17),
        ("granite-4.0-h-small", 32.21),
        ("mamba-codestral-7b", 7.29),
        ("jamba-mini-1.7", 51.57),
        ("falcon-mamba-7b", 7.28),
        ("nemotron-3-nano-30b-a3b", 31.58),
        ("glm-4-9b", 9.40),
        ("glm-4-32b", 32.57),
        ("seed-oss-36b", 36.15),
        ("command-r7b", 8.03),
    ],
)
def test_published_sizes(name: str, billions: float, tmp_path: Path) -> None:
    weights = weight_bytes(load_model_config(write_shape(name, tmp_path)), "bfloat16")
    assert sum(weights.values()) / 2e9 == pytest.approx(billions, abs=0.005)


def test_every_tensor_has_one_name(tmp_path: Path) -> None:
    config = load_model_config(write_tiny_model(tmp_path / "tiny", num_hidden_layers=3, tie_word_embeddings=True))
    names = [tensor.name for tensor in model_tensors(config, "float32")]
    assert len(set(names)) == len(names)
    in_stages = [t.name for index in range(2) for t in model_tensors(config, "float32", Stage(index, 2))]
    assert sorted(in_stages) == sorted([*names, "model.embed_tokens.weight"]), "each once; the tied head in both"


@pytest.mark.parametrize(("gigabytes", "tokens"), [(22, (8, 30)), (24, (8, 40)), (80, (300, 700)), (150, (1024, 1024))])
def test_drafts_take_a_small_share_of_the_cache(tmp_path: Path, gigabytes: int, tokens: tuple[int, int]) -> None:
    """Whether a GPU has little room beside the weights or much. A lone request may have as many as it can."""
    path = write_shape("qwen3-8b", tmp_path)
    model, total = load_model_config(path), gigabytes * 10**9
    plain = engine_config(
        model_path=path,
        device="cuda",
        dtype="bfloat16",
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        max_model_len=4096,
        block_size=64,
    )
    drafting = msgspec.structs.replace(plain, max_draft_tokens=7)
    left = int(0.9 * total) - sum(weight_bytes(model, "bfloat16").values())
    assert tokens[0] <= with_affordable_drafts(drafting, model, left).max_draft_step_tokens <= tokens[1]
    without, with_drafts = (estimate(config, model, total).planned["KV cache"] for config in (plain, drafting))
    assert 0.95 * without < with_drafts < without
