"""Which runs draft by the checkpoint's head for multi-token prediction although they ask for no method."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from checkpoints import edit_weights, write_tiny_model
from family_shapes import SHAPES
from mtp_heads import add_mtp_head
from nvcli.core.config import RunConfig
from nvcli.core.speculation_config import SpeculationConfig
from nvcli.job.run.engine_settings import load_checkpoint, resolve_engines

FEW: dict[str, Any] = {"device": "cuda", "max_num_seqs": 16, "max_model_len": 64}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    family, overrides = SHAPES["qwen 3.5"]
    path = tmp_path_factory.mktemp("model")
    write_tiny_model(path, family, **overrides)
    return add_mtp_head(path)


def head_of(path: Path, **settings: Any) -> str | None:
    run = RunConfig(model=str(path), **{**FEW, **settings})
    return resolve_engines(run, path, load_checkpoint(run, path)).config.draft_head


def test_runs_of_few_requests_use_it(checkpoint: Path) -> None:
    assert head_of(checkpoint) == "mtp"


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_seqs": 17},
        {"device": "cpu"},
        {"speculation": SpeculationConfig(method="lookup")},
        {"attention_backend": "flash-attn"},
    ],
)
def test_other_runs_do_not(checkpoint: Path, settings: dict[str, Any]) -> None:
    assert head_of(checkpoint, **settings) is None
    assert head_of(checkpoint, speculation=SpeculationConfig(method="mtp")) == "mtp"


def test_files_without_it_are_enough(checkpoint: Path) -> None:
    """As conversions to other formats leave them."""
    names: list[str] = []
    edit_weights(checkpoint, lambda weights: names.extend(name for name in weights if name.startswith("mtp.")))
    edit_weights(checkpoint, lambda weights: [weights.pop(name) for name in names])
    assert len(names) > 5
    assert head_of(checkpoint) is None
