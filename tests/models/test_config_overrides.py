"""`hf_overrides`: the model is that of a config.json with these keys, and an override without effect is an error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nvcli.demo import demo_path
from nvcli.errors import ConfigError, LoadError
from nvcli.models.config import load_model_config
from nvcli.tools.bench.shapes import SHAPES

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("spelling", ["rope_type", "type"])
def test_yarn_by_overrides_is_yarn_of_the_file(tmp_path: Path, key: str, spelling: str) -> None:
    """Under either name of the section; the theta of the file stays."""
    config = config_of(demo_path())
    config["rope_parameters"] |= {**YARN, "rope_theta": 5e5}
    of_file = load_model_config(write(tmp_path / "file", config))
    plain = {**config_of(demo_path()), "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    yarn = {spelling if name == "rope_type" else name: value for name, value in YARN.items()}
    assert load_model_config(write(tmp_path / "plain", plain), overrides={key: yarn}) == of_file


@pytest.mark.parametrize(
    "name",
    [name for name, config in SHAPES.items() if "max_position_embeddings" in config.get("text_config", config)],
)
def test_shapes_take_overrides_where_they_have_the_key(tmp_path: Path, name: str) -> None:
    config = SHAPES[name]
    folder = write(tmp_path / "a", config)
    text = config.get("text_config", config)
    overrides: dict[str, Any] = {"max_position_embeddings": text["max_position_embeddings"] * 2}
    if text is not config:
        overrides = {"text_config": overrides}
    plain, changed = load_model_config(folder), load_model_config(folder, overrides=overrides)
    assert changed.max_position_embeddings == 2 * plain.max_position_embeddings


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"rope_scalling": YARN},
            "`rope_scalling.rope_type` changes nothing: .*did you mean `rope_parameters.rope_type`",
        ),
        ({"rope_scaling": {**YARN, "factr": 2}}, "`rope_scaling.factr` changes nothing"),
        ({"rope_theta": 5.0}, "`rope_theta` changes nothing: .*did you mean `rope_parameters.rope_theta`"),
        ({"max_position_embedings": 64}, "did you mean `max_position_embeddings`"),
        ({"initializer_range": 0.1}, "`initializer_range` changes nothing"),
        ({"use_bidirectional_attention": True}, "`use_bidirectional_attention` changes nothing"),
    ],
)
def test_overrides_without_effect_are_refused(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_model_config(demo_path(), overrides=overrides)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rope_scaling": {**YARN, "factor": -1}}, r"`rope_parameters\.factor`: -1\.0 is not a number above zero"),
        ({"rope_scaling": "yarn"}, '`rope_parameters`: "yarn" is not an object'),
        ({"vocab_size": "many"}, '`vocab_size`: "many" is not an integer'),
        ({"hidden_size": None}, "`hidden_size`: null where"),
    ],
)
def test_wrong_values_are_refused_as_those_of_the_file(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=r"config\.json, changed by `hf_overrides`: " + message):
        load_model_config(demo_path(), overrides=overrides)


def test_errors_of_keys_that_nobody_changed_do_not_blame_the_overrides(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", {**config_of(demo_path()), "vocab_size": 0})
    with pytest.raises(LoadError, match=r"config\.json: `vocab_size`"):
        load_model_config(folder, overrides={"max_position_embeddings": 64})


def test_a_value_that_the_file_has_already_is_no_error() -> None:
    assert load_model_config(demo_path(), overrides={"max_position_embeddings": 2048}) == load_model_config(demo_path())
