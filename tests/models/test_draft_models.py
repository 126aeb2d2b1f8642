"""Models that cannot draft for another are refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkpoints import edit_json, write_tiny_model, write_tiny_qwen3
from expert_shapes import EXPERT_SHAPES
from family_shapes import HYBRID, SHAPES
from nvcli.demo import demo_path
from nvcli.errors import ConfigError, LoadError
from nvcli.models.config import load_model_config
from nvcli.models.draft_model_config import read_draft_model
from nvcli.models.same_tokens import check_same_tokens


def test_models_that_cannot_draft_are_refused(tmp_path: Path) -> None:
    target = load_model_config(write_tiny_qwen3(tmp_path / "target"))
    assert read_draft_model(tmp_path / "target", target).tensor_infos
    with pytest.raises(ConfigError, match="recurrent states"):
        read_draft_model(write_tiny_model(tmp_path / "hybrid", "Qwen3_5Text", **HYBRID), target)
    compressed = {**EXPERT_SHAPES["deepseek v4"][1], "layer_types": ["heavily_compressed_attention"] * 4}
    with pytest.raises(ConfigError, match="cannot draft"):
        read_draft_model(write_tiny_model(tmp_path / "compressed", "DeepseekV4", **compressed), target)
    short = write_tiny_model(tmp_path / "short", "GPT2", **SHAPES["gpt 2"][1], max_position_embeddings=256)
    with pytest.raises(ConfigError, match="a model that knows 256 positions, and the model's sequences may have 512"):
        read_draft_model(short, target)
    with pytest.raises(ConfigError, match="a model with 640 tokens, and the model's are 97"):
        read_draft_model(demo_path(), target)
    edit_json(tmp_path / "target" / "config.json", intermediate_size=64)
    with pytest.raises(LoadError, match="has shape"):
        read_draft_model(tmp_path / "target", target)


def test_ids_must_stand_for_the_same_tokens(tmp_path: Path) -> None:
    check_same_tokens(demo_path(), tmp_path)  # it has no tokenizer
    values = json.loads((demo_path() / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    check_same_tokens(demo_path(), tmp_path)
    vocabulary = values["model"]["vocab"]
    one, other = list(vocabulary)[40:42]
    vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
    (tmp_path / "tokenizer.json").write_text(json.dumps(values))
    with pytest.raises(ConfigError, match="only for one with the same tokens"):
        check_same_tokens(demo_path(), tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match="download it again"):
        check_same_tokens(demo_path(), tmp_path)
