"""Folders of EAGLE-3 heads: what config.json and the files say is used, or refused by the name of the key or tensor."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from checkpoints import edit_json, edit_weights, write_tiny_model
from eagle3_heads import write_head
from nvcli.errors import ConfigError, LoadError
from nvcli.kernels.stream_settings import StreamSettings
from nvcli.models.config import load_model_config
from nvcli.models.draft_heads.eagle3_files import is_eagle3, read_eagle3
from nvcli.models.draft_heads.own_files import find_head, with_draft_head
from nvcli.models.json_file import JsonFile

SOME = sorted(random.Random(4).sample(range(97), 41))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target") / "model", num_hidden_layers=7)


def read(folder: Path, target: Path) -> Any:
    return read_eagle3(folder, load_model_config(target))


def test_layers_are_counted_as_each_layout_counts_them(target: Path, tmp_path: Path) -> None:
    for layout in ("SafeAILab", "speculators"):
        write_head(tmp_path / layout, target, layout=layout, layers=(0, 2, 6), norm_before_residual=True)
        config = json.loads((tmp_path / layout / "config.json").read_text())
        listed = config.get("eagle_config", config)["eagle_aux_hidden_state_layer_ids"]
        assert listed == ([0, 2, 6] if layout == "speculators" else [-1, 1, 5])
        assert read(tmp_path / layout, target).aux_layers == (0, 2, 6)
        assert is_eagle3(JsonFile.read(tmp_path / layout / "config.json"))
    assert not is_eagle3(JsonFile.read(target / "config.json"))


WRONG_KEYS: dict[str, tuple[str, dict[str, Any], str]] = {
    "another kind": (
        "speculators",
        {"speculators_model_type": "dflash", "architectures": []},
        "speculators_model_type",
    ),
    "not a head": ("SafeAILab", {"architectures": ["LlamaForCausalLM"]}, "`architectures`.*not an EAGLE-3 head"),
    "several layers": ("SafeAILab", {"num_hidden_layers": 2}, "`num_hidden_layers`: 2: only heads of one layer"),
    "a window": ("SafeAILab", {"layer_types": ["sliding_attention"]}, "`layer_types`.*only full_attention"),
    "a kind of layer": ("SafeAILab", {"model_type": "gemma3"}, '`model_type`: "gemma3" is not supported'),
    "quantised": ("SafeAILab", {"quantization_config": {"quant_method": "fp8"}}, "`quantization_config`: quantised"),
    "no states": (
        "SafeAILab",
        {"eagle_config": {"use_aux_hidden_state": False}},
        "`eagle_config.use_aux_hidden_state`",
    ),
    "a scale": ("SafeAILab", {"logit_scale": 0.5}, "`logit_scale`: 0.5"),
    "a section": ("SafeAILab", {"eagle_config": [1]}, "`eagle_config`.*not an object"),
    "other tokens": ("SafeAILab", {"vocab_size": 98}, "`vocab_size`: 98, and the model's is 97"),
    "other size": ("SafeAILab", {"hidden_size": 64}, "`hidden_size`: 64, and the model's is 32"),
    "other target": ("SafeAILab", {"target_hidden_size": 64}, "`target_hidden_size`: 64, and the model's is 32"),
    "no list": (
        "speculators",
        {"eagle_aux_hidden_state_layer_ids": "1"},
        "eagle_aux_hidden_state_layer_ids`.*not a list",
    ),
    "far layer": ("speculators", {"eagle_aux_hidden_state_layer_ids": [1, 7]}, "`: 7, .* 7 layers: allowed are 0 to 6"),
    "far output": ("SafeAILab", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [6]}}, "allowed are -1 to 5"),
    "twice": ("speculators", {"eagle_aux_hidden_state_layer_ids": [3, 3, 4]}, "names a layer twice"),
    "no default": ("speculators", {"norm_before_residual": None}, "`norm_before_residual`: null"),
    "no flag": ("SafeAILab", {"fc_norm": 3}, "`fc_norm`: 3 is not true or false"),
    "more tokens": ("SafeAILab", {"draft_vocab_size": 98}, "`draft_vocab_size`: 98 is more than the model's 97"),
    "some tokens": ("SafeAILab", {"draft_vocab_size": 41}, "`draft_vocab_size`: 41 of 97 tokens, and no tensor d2t"),
}


@pytest.mark.parametrize("case", WRONG_KEYS)
def test_wrong_keys_are_named(target: Path, tmp_path: Path, case: str) -> None:
    layout, keys, message = WRONG_KEYS[case]
    write_head(tmp_path / "head", target, layout=layout, config=keys)
    with pytest.raises(LoadError, match=message) as raised:
        read(tmp_path / "head", target)
    assert str(tmp_path / "head" / "config.json") in str(raised.value)


def _unsorted(weights: dict[str, Tensor]) -> None:
    weights["d2t"][[0, 1]] = weights["d2t"][[1, 0]] + torch.tensor([1, -1])


WRONG_TENSORS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str]] = {
    "unknown": (lambda weights: weights.update(other=torch.ones(2)), "other: no tensor of the head"),
    "another size": (lambda weights: weights.update(d2t=torch.zeros(40, dtype=torch.int64)), r"d2t has shape \[40\]"),
    "another type": (lambda weights: weights.update(d2t=torch.zeros(41)), "d2t has shape .* in F32"),
    "far tokens": (lambda weights: weights["d2t"].add_(60), "d2t gives no ascending tokens below 97"),
    "unsorted": (_unsorted, "d2t gives no ascending tokens"),
    "other tokens": (lambda weights: weights["t2d"].logical_not_(), "(d2t and t2d name different|t2d has)"),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_wrong_tensors_are_named(target: Path, tmp_path: Path, case: str) -> None:
    change, message = WRONG_TENSORS[case]
    write_head(tmp_path, target, draft_ids=SOME)
    edit_weights(tmp_path, change)
    with pytest.raises(LoadError, match=message):
        read(tmp_path, target)


LACKING: dict[str, tuple[str, dict[str, Any], str]] = {
    "embedding of another size": ("embed_tokens", {"hidden_size": 24}, "`hidden_size`: 24.*embed_tokens.weight"),
    "LM head of another size": ("lm_head", {"hidden_size": 24}, "`hidden_size`: 24.*lm_head.weight"),
    "LM head of some tokens": (
        "lm_head",
        {"config": {"draft_vocab_size": 41}},
        "`draft_vocab_size`: 41.*lm_head.weight",
    ),
}


@pytest.mark.parametrize("case", LACKING)
def test_parts_that_cannot_be_shared_have_to_be_there(target: Path, tmp_path: Path, case: str) -> None:
    part, settings, message = LACKING[case]
    sizes = {} if "config" in settings else {"target_hidden_size": 32}
    write_head(tmp_path, target, **settings)
    edit_json(tmp_path / "config.json", **sizes)
    edit_weights(tmp_path, lambda weights: weights.pop(f"{part}.weight"))
    with pytest.raises(LoadError, match=message):
        read(tmp_path, target)


def test_scaled_embeddings_are_not_shared(tmp_path: Path) -> None:
    gemma = write_tiny_model(tmp_path / "gemma", "Gemma2", num_hidden_layers=7)
    write_head(tmp_path / "head", gemma, has_embedding=False)
    with pytest.raises(LoadError, match=r"embeddings: the head needs embed_tokens.weight of its own"):
        read(tmp_path / "head", gemma)


def test_models_with_several_residual_streams_have_no_heads(target: Path, tmp_path: Path) -> None:
    write_head(tmp_path, target)
    model = load_model_config(target)
    streams = StreamSettings(count=4, norm_eps=1e-6, eps=1e-6, factor=2.0)
    with pytest.raises(LoadError, match=r"`architectures`: the model has several residual streams"):
        read_eagle3(tmp_path, replace(model, decoder=replace(model.decoder, streams=streams)))


def test_heads_are_found_by_name(target: Path, tmp_path: Path) -> None:
    write_head(tmp_path / "head", target)
    assert find_head("mtp") == "mtp"
    assert find_head(str(tmp_path / "head")) == str(tmp_path / "head")
    for name in ("lokup", str(tmp_path / "none"), str(tmp_path / "head" / "config.json"), str(tmp_path)):
        with pytest.raises(ConfigError, match=r"`speculation.method` \(--speculate\) is .* neither auto, none"):
            find_head(name)


def test_heads_in_torchs_own_files(target: Path, tmp_path: Path) -> None:
    write_head(tmp_path, target)
    from_safetensors = read(tmp_path, target)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    assert read(tmp_path, target).draft_ids == from_safetensors.draft_ids


def test_a_head_has_to_divide_among_ranks(target: Path, tmp_path: Path) -> None:
    write_head(tmp_path, target, num_heads=3, num_kv_heads=1, intermediate_size=45)
    model = with_draft_head(load_model_config(target), str(tmp_path))
    with pytest.raises(ConfigError, match="3 attention heads do not divide by 2 in the head that drafts"):
        model.check_tensor_parallel(2)


def test_random_heads_need_no_files(target: Path, tmp_path: Path) -> None:
    """As benchmarks with made-up weights take them, which know the head's config.json alone."""
    write_head(tmp_path, target, draft_ids=SOME)
    (tmp_path / "model.safetensors").unlink()
    head = read_eagle3(tmp_path, load_model_config(target), is_random=True)
    assert head.has_lm_head
    assert not head.has_embedding
    assert head.draft_ids is not None
    assert len(set(head.draft_ids)) == len(SOME)
    assert max(head.draft_ids) < 97
