"""EAGLE-3 heads compute their published arithmetic, in every form in which they are published: over a prompt in chunks,
and one pass further from the head's own state; on two ranks too."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import RequestState, make_batch
from checkpoints import write_tiny_model
from eagle3_heads import published_logits, write_head
from model_driver import ModelDriver
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from tensor_parallel_ranks import run_ranks

IDS = random.Random(3).choices(range(97), k=30)
SOME = sorted(random.Random(4).sample(range(97), 41))
FORMS: dict[str, dict[str, Any]] = {
    "SafeAILab": {"draft_ids": SOME},
    "SafeAILab without lists": {"has_embedding": False, "has_lm_head": False, "layers": None},
    "speculators": {"layout": "speculators", "draft_ids": SOME, "norm_before_residual": True},
    "speculators 3.1": {"layout": "speculators", "fc_norm": True, "norm_output": True, "has_embedding": False},
    "gpt-oss": {"norm_before_fc": True, "has_embedding": False, "draft_ids": SOME, "layers": (0, 3)},
    "qwen3 layer": {"layout": "speculators", "qk_norm": True, "has_lm_head": False, "norm_before_fc": True},
    "smaller": {"hidden_size": 24, "fc_norm": True, "draft_ids": SOME},
}
LAYERS = (1, 3, 4)
USUAL = (2, 2, 2)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("target") / "model", num_hidden_layers=7)


def head_logits(path: Path, head_path: Path, guess: list[int], group: TensorParallelGroup | None = None) -> Any:
    """Return what `published_logits` does, of this program's head; None on ranks that get no logits."""
    driver = ModelDriver(path, draft_head=head_path, group=group)
    model, request = driver.model, RequestState()
    head, parts, states = model.draft_head, list[Tensor | None](), torch.empty(0)
    assert head is not None
    with torch.inference_mode():
        for start, end in ((0, 7), (7, 8), (8, len(IDS) - 1)):
            batch = make_batch([(request, IDS[start:end])], driver.kv_cache, driver.backend, driver.blocks)
            _, states = model.forward_with_states(batch)
            hidden, states = head(torch.tensor(IDS[start + 1 : end + 1]), head.read(states), batch, None)
            parts.append(driver.group.gather(head.compute_logits(hidden)))
        batch = make_batch([(request, guess)], driver.kv_cache, driver.backend, driver.blocks)
        hidden, _ = head(torch.tensor(guess), states[-1:], batch, torch.tensor([0]))
        further = driver.group.gather(head.compute_logits(hidden))
    if further is None:
        return None
    return torch.cat([part[:, :97] for part in parts if part is not None]), further[:, :97]


@pytest.mark.parametrize("form", FORMS)
def test_logits(target: Path, tmp_path: Path, form: str) -> None:
    settings = {"layers": LAYERS, **FORMS[form]}
    head = write_head(tmp_path / "head", target, **settings)
    layers = settings["layers"] or (2, 3, 4)
    expected, further, guess = published_logits(head, target, IDS, layers, settings.get("draft_ids"))
    results = [head_logits(target, tmp_path / "head", guess)]
    if form == "speculators":
        results.append(run_ranks(2, head_logits_of_rank, tmp_path, target, tmp_path / "head", guess)[0])
    for found, found_further in results:
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found_further, further, atol=1e-4, rtol=1e-4)
    assert expected[:, SOME].std() > 0.3


def head_logits_of_rank(group: TensorParallelGroup, path: Path, head_path: Path, guess: list[int]) -> Any:
    return head_logits(path, head_path, guess, group)
