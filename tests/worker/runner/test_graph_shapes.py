"""The shapes of steps that a rank captures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from checkpoints import write_tiny_model
from expert_shapes import EXPERT_SHAPES
from fake_runners import engine_config
from nvcli.attention.backend import AttentionBackend
from nvcli.attention.forward_batch import BatchShape
from nvcli.attention.kv_cache import KVCacheSpec
from nvcli.models.config import load_model_config
from nvcli.worker.runner import graph_shapes
from nvcli.worker.runner.graph_shapes import GraphShapes
from nvcli.worker.runner.rank_attention import RankAttention


class Backend:
    """An attention backend, as far as the choice asks it."""

    def __init__(self, projected: object) -> None:
        self.projected = projected

    def can_capture(self, shape: BatchShape) -> bool:
        return True


def shapes_of(tmp_path: Path, *, projects: bool, num_stages: int = 1) -> GraphShapes:
    family, overrides = EXPERT_SHAPES["glm 4.7 flash"]
    path = write_tiny_model(tmp_path, family, **overrides)
    settings: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    settings["pipeline_parallel_size"] = num_stages
    config = engine_config(model_path=path, device="cuda", dtype="bfloat16", **settings)
    attention = RankAttention(
        backend=cast(AttentionBackend, Backend(object() if projects else None)),
        notes=[],
        max_shared_rows=8,
        projects_latents=True,
        chooses_keys=False,
        prefix_tile_tokens=16,
        kv_groups=(),
        kv_spec=cast(KVCacheSpec, None),
        why_no_drafts="",
        draft_widths=(),
    )
    return GraphShapes.choose(config, load_model_config(path), attention, torch.device("cuda"))


def test_steps_that_project_latents(tmp_path: Path) -> None:
    """Steps with chunks project latents, and those that do not are captured later; chunks that share a prefix never
    do."""
    shapes = shapes_of(tmp_path, projects=True)
    assert all(shape.projects_latents == (shape.prefill_rows > 0) for shape in shapes.at_start)
    plain = {shape for shape in shapes.late if not any(shape.traits)}
    assert {shape.prefill_tokens for shape in plain} == {s.prefill_tokens for s in shapes.at_start if s.prefill_rows}
    assert any(shape.shares_prefixes for shape in shapes.late)
    assert not any(shape.shares_prefixes and shape.projects_latents for shape in shapes.late)
    everything = [*shapes.at_start, *shapes.late]
    assert len(set(everything)) == len(everything)


def test_a_step_is_padded_alike_in_all_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a stage projects latents, of a step or at all, as stages receive as many rows as others send."""
    monkeypatch.setattr(graph_shapes, "bound_tokens_of_home", lambda config, model: 64)
    projecting, other = (shapes_of(tmp_path, projects=projects, num_stages=2) for projects in (True, False))
    expected = {*other.at_start, *other.late}
    found = {*projecting.at_start, *projecting.late}
    assert {shape for shape in found if not shape.projects_latents} == expected
    may_project = {shape for shape in expected if shape.prefill_rows and not shape.shares_prefixes}
    assert {replace(shape, projects_latents=False) for shape in found if shape.projects_latents} == may_project
