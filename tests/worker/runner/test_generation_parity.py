"""Random checkpoints: the tokens are transformers' own, however they are computed.

Whole engines with processes of their own answer for one checkpoint, engines in this process for the others. Each
circumstance (chunked prefill, prefix hits, preemption, tensor parallelism) answers the same requests, and must
give the same greedy continuations as transformers, and the same sampled ones as every other circumstance. Every kind
of layer meets all of them at once; each of them alone, which says more of what is wrong, runs with --all.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from generation import assert_greedy, fewer_requests, generate, generate_here, requests, tokens_of

from checkpoints import is_too_old, write_tiny_config, write_tiny_model
from combinations import full
from family_shapes import SHAPES
from nvcli.attention.spec import AttentionSpec
from nvcli.models.config import load_model_config
from nvcli.models.mixers.mixer import ChoosingMixer, ConvolvedMixer, Mixer, RecurrentMixer


def shape_of(name: str, **changes: Any) -> dict[str, Any]:
    family, shape = SHAPES[name]
    return {"family": family, **shape, **changes}


CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen-3.5": {
        "family": "Qwen3_5MoeText",
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2,  # one of two stages has no attention
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "seed": 4,
    },
    "nemotron-h": shape_of(
        "nemotron-h",
        num_hidden_layers=5,
        layers_block_type=["linear_attention", "moe", "full_attention", "linear_attention", "mlp"],
        seed=5,
    ),
    "kimi-linear": shape_of(
        "kimi linear", num_hidden_layers=3, layer_types=["linear_attention", "full_attention", "linear_attention"]
    ),
    "jamba": shape_of("jamba", num_hidden_layers=3, seed=13),
    "recurrentgemma": shape_of(
        "recurrentgemma", num_hidden_layers=2, block_types=["recurrent", "attention"], sliding_window=150
    ),
    "zamba-2": shape_of(
        "zamba 2, shared blocks",
        num_hidden_layers=2,
        layers_block_type=["linear_attention", "hybrid"],
        seed=16,
    ),
    "mamba-2": shape_of("mamba 2", num_hidden_layers=2, seed=10),
    "minimax-text-01": shape_of(
        "minimax text 01", num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], seed=11
    ),
    "falcon-h1": shape_of("falcon-h1 without norms", num_hidden_layers=1, seed=6),
    "inkling": shape_of(
        "inkling", num_hidden_layers=2, layer_types=["hybrid_sliding", "hybrid"], sliding_window_size=45, seed=16
    ),
    "lfm2": shape_of("lfm2", num_hidden_layers=2, layer_types=["conv", "full_attention"], seed=7),
    "mimo": shape_of("mimo v2 flash", seed=8),
    "gemma-2": shape_of("gemma 2", num_hidden_layers=2, seed=9),
    "untied-mha": {"num_key_value_heads": 4, "max_shard_size": "30KB"},
    "longcat-flash": shape_of("longcat-flash", seed=3),
    "hunyuan-v4": shape_of("hunyuan v4", num_hidden_layers=3, indexer_types=["full"] * 3, seed=12),
    "minimax-m3": shape_of(
        "minimax m3 with vision",
        num_hidden_layers=2,
        layer_types=["minimax_m3_sparse"] * 2,
        mlp_layer_types=["dense"] * 2,
        seed=15,
    ),
    "qwen-4-exp": shape_of(
        "qwen 4-exp with vision",
        num_hidden_layers=2,
        layer_types=["linear_attention", "indexed_attention"],
        ple_layer_ids=[1],
        seed=16,
    ),
    "mistral-large-4": shape_of(
        "mistral large 4 with vision, shared keys",
        num_hidden_layers=2,
        no_rope_layers=[1, 1],
        kv_source_layers=[0, 0],
        indexer_types=["full", "full"],
        first_k_dense_replace=2,
        seed=14,
    ),
    "deepseek-v4": shape_of("deepseek v4", num_hidden_layers=3, sliding_window=100, seed=14),
    "mistral": {"family": "Mistral", "sliding_window": 45, "seed": 1},
    "gemma-4": {
        "family": "Gemma4Text",
        "num_hidden_layers": 5,
        "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 2,
        "sliding_window": 40,
        "rope_parameters": None,
        "attention_k_eq_v": True,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 97,
        "tie_word_embeddings": True,
        "seed": 2,
    },
}
PLAIN: dict[str, Any] = {"max_num_batched_tokens": 4096, "max_num_seqs": 64, "enable_prefix_caching": False}
TOGETHER: dict[str, Any] = {"max_num_batched_tokens": 32, "max_num_seqs": 16, "num_kv_tokens": 380}
ALONE: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 9, "max_num_seqs": 8},
    "prefix-hits": {"max_num_seqs": 6, "max_num_batched_tokens": 512},
    "preempted": {"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_kv_tokens": 380},
}
ATTENTION = {one.name for one in fields(AttentionSpec) if one.default is None or one.default is False} - {"both_ways"}
"""What some kinds of attention have and others have not; models that attend both ways write no answers."""
OF_NEWER_FAMILIES = {"ResultConvolutions", "bias_extent", "NGramLookupConfig", "shares_choice"}
"""Kinds that only checkpoints of newer versions of transformers have."""
TWO_RANKS = {"tensor_parallel_size": 2, "max_num_seqs": 16, "max_num_batched_tokens": 64}
"""How the layers of other checkpoints are cut is a test of models."""


def kinds_of_layers(path: Path) -> set[str]:
    """What an engine has to tell apart: whatever a token leaves behind, and what later tokens see of it."""
    kinds = set()
    for layer in load_model_config(path).layers:
        for mixer in layer.mixers:
            spec = mixer.kv_spec()
            kinds |= {type(mixer).__name__, *({"shared keys"} if mixer.reads_kv_of is not None else ())}
            kinds |= {name for name in ATTENTION if isinstance(spec, AttentionSpec) and getattr(spec, name)}
        kinds |= {"two mixers"} if layer.beside else set()
        kinds |= {"shortcut"} if layer.shortcut else set()
    kinds |= {"streams"} if load_model_config(path).decoder.streams else set()
    return kinds


def test_every_kind_of_layer_is_in_some_checkpoint(tmp_path: Path) -> None:
    known = [shape for shape in CHECKPOINTS.values() if not is_too_old(shape.get("family", "").removesuffix("Text"))]
    found = [kinds_of_layers(write_tiny_config(tmp_path, **shape)) for shape in known]
    if len(known) < len(CHECKPOINTS):
        found.append(OF_NEWER_FAMILIES)
    bases = Mixer, ChoosingMixer, RecurrentMixer, ConvolvedMixer
    kinds = [kind for base in bases for kind in base.__subclasses__() if kind.__module__.startswith("nvcli.")]
    mixers = {kind.__name__ for kind in kinds} - {base.__name__ for base in bases}
    assert set().union(*found) == {*mixers, *ATTENTION, "shared keys", "two mixers", "shortcut", "streams"}


@dataclass(frozen=True)
class Answered:
    """A checkpoint, and its answers by request, of one step a token."""

    path: Path
    plain: dict[int, list[int]]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Answered]:
    @cache
    def answer(name: str) -> Answered:
        path = write_tiny_model(tmp_path_factory.mktemp("models") / name, **CHECKPOINTS[name])
        done, stats = generate_here(path, requests(), **PLAIN)
        assert stats.cached_tokens == 0
        return Answered(path, tokens_of(done))

    return answer


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_plain(answered: Callable[[str], Answered], name: str) -> None:
    model = answered(name)
    assert_greedy(model.path, model.plain)
    answers = [tuple(tokens) for i, tokens in model.plain.items() if i >= 1000]
    assert len(set(answers)) > len(answers) // 2  # sampled answers do differ


@pytest.mark.parametrize(
    "config",
    [
        pytest.param(TOGETHER, id="together"),
        *(pytest.param(config, id=name, marks=pytest.mark.full) for name, config in ALONE.items()),
        # The next test but one has two ranks in each stage.
        pytest.param(TWO_RANKS, id="tp2", marks=pytest.mark.full),
    ],
)
def test_whole_engines_give_the_same_answers(answered: Callable[[str], Answered], config: dict[str, Any]) -> None:
    model = answered("qwen-3.5")
    done, stats = generate(model.path, requests(), **config)
    assert tokens_of(done) == model.plain
    assert stats.cached_tokens > 0


@pytest.mark.parametrize("config", [TOGETHER, *map(full, ALONE.values())], ids=["together", *ALONE])
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_circumstances_do_not_change_the_answers(
    answered: Callable[[str], Answered], name: str, config: dict[str, Any]
) -> None:
    batch = requests()
    random.Random(str(config)).shuffle(batch)
    if "num_kv_tokens" in config and name in ("gemma-4", "mimo"):
        config = {**config, "num_kv_tokens": 410}  # their groups share the blocks: the longest prompt needs these
    model = answered(name)
    done, stats = generate_here(model.path, batch, **config)
    assert (stats.num_preemptions > 0) == ("num_kv_tokens" in config and name != "mamba-2")  # whose requests never grow
    assert stats.cached_tokens > 50
    assert tokens_of(done) == model.plain


def test_states_in_two_stages_of_two_ranks(answered: Callable[[str], Answered]) -> None:
    """All at once: chunks, prefix hits and preemption. No drafts, although they are wanted."""
    model = answered("qwen-3.5")
    config: dict[str, Any] = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "max_num_seqs": 16}
    config |= {"max_num_batched_tokens": 40, "max_draft_tokens": 3, "draft_policy": "always"}
    done, stats = generate(model.path, fewer_requests(), **config, num_kv_tokens=380)
    assert tokens_of(done) == {number: model.plain[number] for number in done}
    assert stats.num_preemptions > 0
    assert stats.cached_tokens > 0
    assert stats.drafted_tokens == 0
