"""What a checkpoint's files say about embeddings, and what is wrong with files that say something else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nvcli.errors import LoadError
from nvcli.models.embedding_files import EmbeddingFiles, read_embedding_files

DENSE = {"in_features": 8, "out_features": 16, "bias": False, "activation_function": "torch.nn.modules.linear.Identity"}


def write(folder: Path, pooling: dict[str, Any] | None, /, *kinds: str, **config: Any) -> Path:
    kinds = ("models.Transformer", "models.Pooling", *kinds) if pooling is not None else kinds
    if kinds:
        modules = [{"type": f"sentence_transformers.{kind}", "path": f"{i}_M"} for i, kind in enumerate(kinds)]
        (folder / "modules.json").write_text(json.dumps(modules))
    of_modules = {"1_M": pooling or {}, "2_M": DENSE, "3_M": {**DENSE, "in_features": 16, **config.pop("dense", {})}}
    for name, settings in of_modules.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


CASES = [
    (None, (), EmbeddingFiles()),
    ({"pooling_mode_lasttoken": True}, ("models.Normalize",), EmbeddingFiles(pooling="last", normalizes=True)),
    (
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": 0},
        (),
        EmbeddingFiles(pooling="mean", normalizes=False),
    ),
    ({"pooling_mode": "cls", "embedding_dimension": 8}, (), EmbeddingFiles(pooling="cls", normalizes=False)),
]


@pytest.mark.parametrize(("pooling", "kinds", "expected"), CASES)
def test_poolings(tmp_path: Path, pooling: dict[str, Any] | None, kinds: Any, expected: EmbeddingFiles) -> None:
    assert read_embedding_files(write(tmp_path, pooling, *kinds)) == expected


MEAN, TWO_DENSE = {"pooling_mode": "mean"}, ("models.Dense", "models.Dense")


def test_linear_layers_after_the_pooling(tmp_path: Path) -> None:
    found = read_embedding_files(write(tmp_path, MEAN, *TWO_DENSE, dense={"activation_function": None})).dense
    assert [(each.folder.name, each.in_size, each.out_size) for each in found] == [("2_M", 8, 16), ("3_M", 16, 16)]
    assert [each.activation for each in found] == ["identity", "tanh"]  # sentence-transformers' default


BAD: list[tuple[dict[str, Any] | None, tuple[str, ...], dict[str, Any], str]] = [
    ({"pooling_mode_max_tokens": True}, (), {}, '`pooling_mode_max_tokens`.* "max" is not supported; .* last'),
    ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, (), {}, "pooling_mode_lasttoken and pooling"),
    ({}, (), {}, "no pooling selected"),
    (MEAN, ("models.Dropout",), {}, "modules.json: `type` is .*Dropout.*not supported; supported: Transformer, Pool"),
    (MEAN, ("models.Normalize", "models.Dense"), {}, "modules.json: `type` is .*Dense.*not supported there"),
    (MEAN, TWO_DENSE, {"dense": {"in_features": 8}}, "3_M/config.json: `in_features`.*8 is not the size of .*, 16"),
    (MEAN, TWO_DENSE, {"dense": {"activation_function": "x.Mish"}}, '`activation_function`: "x.Mish" is not supported'),
    (None, (), {"pooling": "weighted_avg"}, '`pooling`: "weighted_avg" is not supported; supported: avg'),
]


@pytest.mark.parametrize(("pooling", "kinds", "config", "message"), BAD)
def test_what_is_not_served_is_named(
    tmp_path: Path, pooling: dict[str, Any] | None, kinds: tuple[str, ...], config: dict[str, Any], message: str
) -> None:
    with pytest.raises(LoadError, match=message):
        read_embedding_files(write(tmp_path, pooling, *kinds, **config))


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", 5])
def test_no_file_outside_of_the_folder_is_read(tmp_path: Path, path: Any) -> None:
    write(tmp_path, {"pooling_mode": "mean"})
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": path}]))
    with pytest.raises(LoadError, match="names no folder of the checkpoint"):
        read_embedding_files(tmp_path)


def test_a_file_that_is_no_list_of_modules(tmp_path: Path) -> None:
    write(tmp_path, None)
    (tmp_path / "modules.json").write_text('{"type": "Pooling"}')
    with pytest.raises(LoadError, match=r"modules\.json: holds no list of modules"):
        read_embedding_files(tmp_path)
