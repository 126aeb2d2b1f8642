"""The shapes of steps that a rank captures."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch

from checkpoints import write_tiny_model
from expert_shapes import EXPERT_SHAPES
from fake_runners import engine_config
from nvcli.attention.backend import AttentionBackend
from nvcli.attention.forward_batch import BatchShape
from nvcli.attention.kv_cache import KVCacheSpec
from nvcli.models.config import load_model_config
from nvcli.worker.runner.graph_shapes import GraphShapes
from nvcli.worker.runner.rank_attention import RankAttention


class Projects:
    """An attention backend, as far as the choice asks it."""

    projected = object()

    def can_capture(self, shape: BatchShape) -> bool:
        return True


def test_steps_that_project_latents(tmp_path: Path) -> None:
    """Steps with chunks project latents, and those that do not are captured later; chunks that share a prefix never
    do."""
    family, overrides = EXPERT_SHAPES["glm 4.7 flash"]
    path = write_tiny_model(tmp_path, family, **overrides)
    settings: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 256}
    config = engine_config(model_path=path, device="cuda", dtype="bfloat16", **settings)
    attention = RankAttention(
        backend=cast(AttentionBackend, Projects()),
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
    shapes = GraphShapes.choose(config, load_model_config(path), attention, torch.device("cuda"))
    assert all(shape.projects_latents == (shape.prefill_rows > 0) for shape in shapes.at_start)
    plain = {shape for shape in shapes.late if not any(shape.traits)}
    assert {shape.prefill_tokens for shape in plain} == {s.prefill_tokens for s in shapes.at_start if s.prefill_rows}
    assert any(shape.shares_prefixes for shape in shapes.late)
    assert not any(shape.shares_prefixes and shape.projects_latents for shape in shapes.late)
    everything = [*shapes.at_start, *shapes.late]
    assert len(set(everything)) == len(everything)
