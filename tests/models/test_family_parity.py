"""The logits of every family are those of transformers: of whole prompts, in chunks, behind a shared prefix, token by
token, in stages, and cut over ranks, with parts of every expert and with whole experts."""

from __future__ import annotations

import copy
import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from rank_weights import load_model
from torch import Tensor

from batches import RequestState, make_batch
from checkpoints import edit_weights, is_too_old, reference_logits_of, reference_model, write_tiny_model
from combinations import full
from expert_shapes import EXPERT_SHAPES
from family_shapes import FULL, LONGEST_SHORT_RUN, SHAPES, SLIDING
from model_driver import ModelDriver
from nvcli.models.checkpoint_layout import PLAIN_LAYOUT
from nvcli.models.config import load_model_config
from nvcli.models.experts import Router
from nvcli.models.stored_tensors import with_stored_tensors
from nvcli.worker.distributed.stage import Stage
from nvcli.worker.distributed.tensor_parallel import StageState, TensorParallelGroup
from tensor_parallel_ranks import run_ranks

LENGTH = LONGEST_SHORT_RUN
PROMPT = random.Random(0).choices(range(97), k=LENGTH)
OTHER = [*PROMPT[:32], *random.Random(1).choices(range(97), k=20)]
"""A prompt with the same first 32 tokens."""


WIDE_ROUTERS = (
    *("deepseek v2, best groups", "deepseek v3", "dots 1", "ernie 4.5 moe", "glm 4.5", "longcat-flash", "solar open"),
    *("hunyuan v3", "kimi linear", "nemotron-h"),
)
"""Families whose routers transformers computes in float32."""

TABLES = ("slope_rate", "query_decay", "key_decay", "diagonal_decay")
"""Buffers that transformers writes beside the weights of MiniMax-Text-01."""

PUBLISHED: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "hyperclova x with vision": (
        {r"model\.language_model\.": "model.language_model.model.", r"model\.projector": "model.vision_projector"},
        {},
    ),
    "deepseek v4": (
        {},
        {
            "layer_types": None,
            "compress_ratios": [0, 4, 128, 4, 0],
            "compress_rates": None,
            "compress_rate_csa": 2,
            "compress_rate_hca": 8,
            "mlp_layer_types": None,
            "num_hash_layers": 1,
            "partial_rotary_factor": None,
            "qk_rope_head_dim": 8,
            "rope_parameters": None,
            "rope_theta": 10000,
            "compress_rope_theta": 160000,
            "rope_scaling": {"type": "yarn", "factor": 4, "original_max_position_embeddings": 64},
        },
    ),
    "mimo v2 flash": (
        {r"self_attn\.sinks": "self_attn.attention_sink_bias"},
        {
            "layer_types": None,
            "mlp_layer_types": None,
            "rope_parameters": None,
            "rms_norm_eps": None,
            "hybrid_layer_pattern": [0, 1, 1, 0],
            "moe_layer_freq": [0, 0, 1, 1],
            "layernorm_epsilon": 1e-6,
            "rope_theta": 10000,
            "swa_rope_theta": 100,
            "partial_rotary_factor": 0.5,
            "sliding_window": 19,
            "sliding_window_size": 19,
            "swa_num_key_value_heads": 2,
            "swa_v_head_dim": 32,
            "n_shared_experts": None,
        },
    ),
    "minimax m3 with vision": (
        {},
        {
            "layer_types": None,
            "mlp_layer_types": None,
            **dict.fromkeys(f"index_{key}" for key in ("n_heads", "head_dim", "block_size", "topk_blocks")),
            "index_local_blocks": None,
            "moe_layer_freq": [0, 1, 1],
            "sparse_attention_config": {
                "use_sparse_attention": True,
                "sparse_num_index_heads": 2,
                "sparse_index_dim": 16,
                "sparse_block_size": 4,
                "sparse_topk_blocks": 5,
                "sparse_local_block": 2,
                "sparse_attention_freq": [1, 0, 1],
            },
            "rope_parameters": None,
            "rope_theta": 10000,
        },
    ),
    "inkling with vision": (
        {},
        {
            "layer_types": None,
            "mlp_layer_types": None,
            "dense_mlp_idx": 1,
            "moe_intermediate_size": None,
            "intermediate_size": 32,
            "dense_intermediate_size": 48,
            "conv_kernel_size": None,
            "sconv_kernel_size": 4,
            "max_position_embeddings": None,
            "model_max_length": 512,
        },
    ),
    "ling 3": (
        {
            r"model\.embed_tokens": "model.word_embeddings",
            r"gate\.e_score_correction_bias": "gate.expert_bias",
            r"layers\.([23])\.(self_attn|attention)\.o_proj": r"layers.\1.attention.dense",
            r"\.self_attn\.(forget_gate\.)?": ".attention.",
        },
        {
            "architectures": ["BailingMoeV3ForCausalLM"],
            "layer_types": None,
            "mlp_layer_types": None,
            "layer_group_size": 3,
            "rope_parameters": None,
            "rope_theta": 10000,
            "partial_rotary_factor": 0.5,
            "head_dim": 8,
            "linear_head_dim": None,
            "num_experts_per_tok": 3,
            "num_experts_per_token": None,
        },
    ),
    "step 3.7 with vision": (
        {},
        {
            "layer_types": [FULL, SLIDING, SLIDING, FULL, SLIDING],
            "mlp_layer_types": None,
            "moe_layers_enum": "1,2,3",
            "num_key_value_heads": None,
            "num_attention_groups": 2,
            "n_routed_experts": None,
            "moe_num_experts": 8,
            "num_experts_per_tok": None,
            "moe_top_k": 3,
            "num_nextn_predict_layers": 1,
            "num_sliding_attention_heads": None,
            "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2},
            "rope_parameters": None,
            "rope_theta": [10000.0, 100.0, 100.0, 10000.0, 100.0],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5, 1.0],
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "swiglu_limits": [0.0, 0.0, 0.4, 0.0, 0.0],
            "swiglu_limits_shared": [0.5, 0.0, 0.0, 0.6, 0.0],
        },
    ),
}
"""Names of tensors in published files, and keys of their config.json, where transformers writes others."""

Checkpoints = Callable[[str], Path]


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """Gives the checkpoint of a shape, which is written when it is first asked for."""
    folder = tmp_path_factory.mktemp("families")

    @cache
    def write(name: str) -> Path:
        family, overrides = SHAPES[name]
        return write_tiny_model(folder / name, family, **overrides)

    return write


@cache
def published_logits(path: Path) -> list[Tensor]:
    """The logits of `PROMPT` and of `OTHER` by transformers."""
    return reference_logits_of(path, [PROMPT, OTHER])


def logits_in_steps(driver: ModelDriver, ids: list[int], *lengths: int) -> Tensor:
    """The logits of a request whose tokens are computed in steps of these lengths, and then one by one."""
    request, start, parts = RequestState(), 0, []
    for length in (*lengths, *[1] * (len(ids) - sum(lengths))):
        parts += driver.step((request, ids[start : start + length]))
        start += length
    return torch.cat(parts) if parts else torch.empty(0)


def assert_close(found: Tensor, expected: Tensor, *, name: str = "") -> None:
    # Delta nets of random weights enlarge rounding: with Qwen3-Next the two forms of transformers differ by 4e-4. So do
    # blocks that read embeddings beside the stream: float32 and float64 of transformers' Zamba 2 differ by 2e-4.
    atol = 3e-3 if name.startswith(("qwen 3-next", "qwen 3.5", "minicpm-", "zamba")) else 2e-4
    torch.testing.assert_close(found, expected, atol=atol, rtol=1e-4)
    assert expected.std() > 0.3, "the reference must not be so flat that everything agrees"


@pytest.mark.parametrize("name", WIDE_ROUTERS)
def test_routers_stored_in_float32_choose_as_published(name: str, checkpoint_of: Checkpoints) -> None:
    """All of 4,096 tokens in bfloat16 get the same experts."""
    path = checkpoint_of(name)
    published = [
        module for module in reference_model(path).modules() if type(module).__name__.lower().endswith("router")
    ]
    modules = load_model(path, dtype=torch.bfloat16).modules()
    router: Any = [module for module in modules if isinstance(module, Router)][-1]
    assert router.weight.dtype == torch.float32
    x = torch.randn(4096, router.weight.shape[1], generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        correction = (router.e_score_correction_bias,) if name == "hunyuan v3" else ()
        results = published[-1](x.float(), *correction)
        if len(results) != 3:
            pytest.skip("the router of this version of transformers does not return weights and experts")
        _, weights, experts = results
        routes = router(x)
    (found, places), (expected, others) = routes.experts.sort(1), experts.sort(1)
    assert torch.equal(found, expected)
    torch.testing.assert_close(routes.weights.gather(1, places), weights.gather(1, others), atol=1e-5, rtol=1e-5)


def test_routers_stored_in_bfloat16_stay_so(checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    """Whatever they are called in the files, and however many files there are."""
    path = checkpoint_of("longcat-flash")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    config = load_model_config(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert not with_stored_tensors(config, tmp_path).stores_wide_routers
    assert with_stored_tensors(config, path).stores_wide_routers


@pytest.mark.parametrize("name", SHAPES)
def test_logits(name: str, checkpoint_of: Checkpoints) -> None:
    path = checkpoint_of(name)
    expected, expected_other = published_logits(path)
    driver = ModelDriver(path, max_positions=LENGTH)
    assert_close(logits_in_steps(driver, PROMPT, LENGTH), expected, name=name)
    assert_close(logits_in_steps(driver, PROMPT, 7, 40, 20), expected, name=name)
    # Two requests read the same blocks for their common prefix, one of them in the step that fills these blocks.
    first = RequestState()
    for group in range(driver.kv_cache.spec.num_groups):
        driver.blocks.grow(first.tables[group], 32, 4 * driver.blocks.spans.get(group, 1))
    second = RequestState(length=32, tables={group: list(table) for group, table in first.tables.items()})
    steps = [((first, PROMPT),), ((second, OTHER[32:]),)]
    if not name.startswith("qwen 4"):  # which reads ids from states as they are before a step, as kernels do
        steps = [sum(steps, ())]
    found, found_other = (logits for work in steps for logits in driver.step(*work))
    assert_close(found, expected, name=name)
    assert_close(found_other, expected_other[32:], name=name)
    if "with vision" in name:
        assert "left on disk" in driver.notes[0]
    if name.endswith("-omni"):
        assert "other parts (talker, audio_tower, visual)" in driver.notes[0]
    if not re.search("shared (keys|blocks)|loops", name):  # its layers cannot be parted
        assert_close(logits_in_stages(path, PROMPT), expected, name=name)


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_in_published_files(name: str, checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    path, (names, keys) = shutil.copytree(checkpoint_of(name), tmp_path / "model"), PUBLISHED[name]

    def rename(weights: dict[str, Tensor]) -> None:
        for own in list(weights):
            published = own
            for found, wanted in names.items():
                published = re.sub(found, wanted, published)
            weights[published] = weights.pop(own)

    edit_weights(path, rename)
    values = json.loads((path / "config.json").read_text())
    section = values.get("text_config", values)
    section |= keys
    for key in [key for key, value in section.items() if value is None]:
        del section[key]
    (path / "config.json").write_text(json.dumps(values))
    expected = published_logits(checkpoint_of(name))[0]
    assert_close(logits_in_steps(ModelDriver(path, max_positions=LENGTH), PROMPT, LENGTH), expected)


def test_a_x_k1_of_the_hub_corrects_no_scores(checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    """Its files have no numbers for it, and a norm of dense layers that nothing reads."""
    path = shutil.copytree(checkpoint_of("a.x-k1"), tmp_path / "model")

    def as_published(weights: dict[str, Tensor]) -> None:
        for name in [name for name in weights if name.endswith("e_score_correction_bias")]:
            del weights[name]
        weights["model.layers.0.post_mlp_layernorm.weight"] = torch.ones(32)

    edit_weights(path, as_published)
    expected = reference_logits_of(path, [PROMPT])[0]
    assert not torch.allclose(expected, published_logits(checkpoint_of("a.x-k1"))[0], atol=0.1)
    assert_close(logits_in_steps(ModelDriver(path, max_positions=LENGTH), PROMPT, LENGTH), expected)


def test_minimax_m1_of_the_hub(checkpoint_of: Checkpoints, tmp_path: Path) -> None:
    """Its files have other names in config.json, no tables of decays, and `rotary_dim`, which transformers ignores: its
    rotation of whole heads, whose other half stands still, turns the same numbers in another order."""
    path = shutil.copytree(checkpoint_of("minimax text 01"), tmp_path / "model")
    edit_weights(path, lambda weights: [weights.pop(name) for name in list(weights) if name.endswith(TABLES)])
    model = copy.deepcopy(reference_model(checkpoint_of("minimax text 01")))
    model.model.rotary_emb.inv_freq = torch.cat((10000.0 ** -(torch.arange(0, 8, 2) / 8), torch.zeros(4)))
    order = torch.tensor([0, 1, 2, 3, *range(8, 12), 4, 5, 6, 7, *range(12, 16)])
    attention = model.model.layers[1].self_attn
    for projection in (attention.q_proj, attention.k_proj):
        rows = projection.weight.data.unflatten(0, (-1, 16))
        projection.weight.data = rows[:, order].flatten(0, 1)
    values = json.loads((path / "config.json").read_text())
    for key in [key for key in values if key.endswith("_factor") and key != "router_aux_loss_coef"]:
        block, kind = key.removesuffix("_factor").rsplit("_", 1)
        values[f"layernorm_{block.replace('attn', 'attention')}_{kind}"] = values.pop(key)
    del values["layer_types"]
    values |= {"architectures": ["MiniMaxM1ForCausalLM"], "attn_type_list": [0, 1, 0], "rotary_dim": 8}
    values |= {"postnorm": True, "shared_intermediate_size": 0}
    (path / "config.json").write_text(json.dumps(values))
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT])).logits[0]
    assert not torch.allclose(expected, published_logits(checkpoint_of("minimax text 01"))[0], atol=0.1)
    assert_close(logits_in_steps(ModelDriver(path, max_positions=LENGTH), PROMPT, 30, 39), expected)


def logits_in_stages(path: Path, ids: list[int]) -> Tensor:
    """The logits of a prompt in two steps, by a pipeline of two stages."""
    stages = [ModelDriver(path, stage=Stage(index, 2), max_positions=LENGTH) for index in range(2)]
    requests = [RequestState() for _ in stages]
    logits = []
    for tokens in (ids[:40], ids[40:]):
        state: StageState | None = None
        for request, stage in zip(requests, stages, strict=True):
            batch = make_batch([(request, tokens)], stage.kv_cache, stage.backend, stage.blocks)
            with torch.inference_mode():
                state = stage.model(batch, state)
        with torch.inference_mode():
            logits.append(stages[-1].model.compute_logits(state))
    return torch.cat(logits)


def rank_logits(group: TensorParallelGroup, models: list[tuple[Path, bool]]) -> list[Tensor]:
    """The logits of each model, which is given by its folder and whether ranks hold whole experts."""
    drivers = (
        ModelDriver(path, group=group, max_positions=LENGTH, expert_parallel=expert_parallel)
        for path, expert_parallel in models
    )
    return [logits_in_steps(driver, PROMPT, LENGTH - 1) for driver in drivers]


def form(value: object) -> object:
    """A setting without its size, of which it only matters here whether two ranks can share it."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value % 2
    if isinstance(value, float):
        return value in (0.0, 1.0)
    if isinstance(value, tuple):
        return frozenset(map(form, value))
    return type(value) if is_dataclass(value) else value


def pairs(value: object) -> Iterator[object]:
    """Every two settings of a layer, and of each of its blocks."""
    if is_dataclass(value):
        found = {one.name: getattr(value, one.name) for one in fields(value)}
        yield from ((type(value), *two) for two in combinations(((name, form(one)) for name, one in found.items()), 2))
        for one in found.values():
            yield from pairs(one)


def distinct_shapes(checkpoint_of: Checkpoints) -> Iterator[str]:
    """Those with two settings of a layer or of a block that no shape before them has together, or with a setting of the
    decoder: many families that read images have the decoder of another one."""
    seen: set[object] = set()
    for name, (family, _) in SHAPES.items():
        if is_too_old(family.removesuffix("Text")):
            continue
        decoder = load_model_config(checkpoint_of(name)).decoder
        others = replace(decoder, layer_kinds=(), kind_of_layer=(), layout=PLAIN_LAYOUT)
        found = {(one.name, form(getattr(others, one.name))) for one in fields(others)}
        found |= {pair for layer in decoder.layer_kinds for pair in pairs(layer)}
        if not found <= seen:
            yield name
        seen |= found


@pytest.mark.parametrize("in_both_ways", [False, full(True)])
def test_same_logits_of_two_ranks(checkpoint_of: Checkpoints, tmp_path: Path, in_both_ways: bool) -> None:
    """Of a prompt and then of a token. Experts are cut, or whole: in both ways, or every second model's in each."""
    expected = {name: published_logits(checkpoint_of(name))[0] for name in distinct_shapes(checkpoint_of)}
    names = [*expected]
    with_experts = [name for name in names if has_experts(checkpoint_of(name))]
    assert set(EXPERT_SHAPES) & set(names) < set(with_experts)
    whole = with_experts if in_both_ways else with_experts[::2]
    cut = names if in_both_ways else [name for name in names if name not in whole]
    cases = [*((name, False) for name in cut), *((name, True) for name in whole)]
    first_rank, _ = run_ranks(2, rank_logits, tmp_path, [(checkpoint_of(name), whole) for name, whole in cases])
    for found, (name, _) in zip(first_rank, cases, strict=True):
        assert_close(found, expected[name], name=name)


def has_experts(path: Path) -> bool:
    return load_model_config(path).has_experts


def test_a_long_run_takes_longrope_s_long_factors(checkpoint_of: Checkpoints) -> None:
    path = checkpoint_of("phi 4, longrope of short runs")
    ids = [*PROMPT, *OTHER]
    driver = ModelDriver(path)
    assert_close(logits_in_steps(driver, ids, len(ids)), reference_logits_of(path, [ids])[0])
