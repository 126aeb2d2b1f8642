"""A model cut over ranks gives the logits of the whole model, and the group's collectives do what they say.

The same on GPUs with the memory that they share, in one shot and in two.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import RequestState, make_batch
from checkpoints import write_tiny_model
from model_driver import ModelDriver
from nvcli.kernels.peer_memory import PeerLayout
from nvcli.worker.distributed.peer_memory import open_peer_memory
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup
from tensor_parallel_ranks import run_ranks

SHAPES: dict[str, dict[str, Any]] = {
    "untied, biased": {"attention_bias": True},  # the bias of a row-parallel layer must enter the sum once
    "tied, one KV head": {"tie_word_embeddings": True, "num_key_value_heads": 1},
    "vocabulary smaller than the ranks need": {"vocab_size": 9, "tie_word_embeddings": True},  # tp 4 pads 9 to 12
    "biases cut by rows and added once": {"family": "Llama", "attention_bias": True, "mlp_bias": True},
    "biases of shared KV heads": {"family": "Qwen2"},
    "a window": {"family": "Mistral", "sliding_window": 12},
}
PROMPT = [id % 9 for id in random.Random(3).choices(range(97), k=40)]


def model_logits(driver: ModelDriver) -> Tensor:
    """Of a prompt in two chunks and three decode steps: [40, vocab_size], or nothing on ranks other than 0."""
    request = RequestState()
    parts = [PROMPT[:20], PROMPT[20:37], *([token] for token in PROMPT[37:])]
    outputs = [logits for part in parts for logits in driver.step((request, part))]
    return torch.cat(outputs) if outputs else torch.empty(0)


def run_rank(group: TensorParallelGroup, paths: list[Path]) -> dict[str, Any]:
    drivers = [ModelDriver(path, group=group) for path in paths]
    return {
        "logits": [model_logits(driver) for driver in drivers],
        "bytes": [driver.num_bytes for driver in drivers],
        "min": group.min(10 - group.rank),
        "broadcast": group.broadcast(torch.tensor([group.rank + 7, group.rank])).tolist(),
        "gather": group.gather(torch.full((2, 1), group.rank)),
        "max": group.max(torch.tensor([group.rank << 40, -group.rank, 7])).tolist(),
        "norm": norm_of_sum(group),
        "behind attention": rows_behind_attention(drivers[0]),
    }


@torch.inference_mode()
def rows_behind_attention(driver: ModelDriver) -> dict[str, Any]:
    """Two chunks, of which one token each needs logits: the rows that each layer's MLP computes, the hidden states, and
    what they are where all tokens need logits."""
    work = [(RequestState(), PROMPT[:20]), (RequestState(), PROMPT[:17])]
    batch = make_batch(work, driver.kv_cache, driver.backend, driver.blocks)
    expected = driver.model(batch)[[19, 36]]
    rows: list[int] = []
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
        for layer in driver.model.model.layers.values()
    ]
    hidden = driver.model(replace(batch, logits_rows=torch.tensor([19, 36])))
    for hook in hooks:
        hook.remove()
    return {"rows": rows, "hidden": hidden, "expected": expected}


def norm_of_sum(group: TensorParallelGroup) -> tuple[Tensor, Tensor]:
    """Rank r's part is r + 1 times the first one: (the norm, the residual)."""
    generator = torch.Generator().manual_seed(0)
    part, residual = torch.randn(2, 3, 8, generator=generator)
    place = group.partial_sum_buffer(part.shape, part.dtype)
    assert place is None
    return group.add_rms_norm(part * (group.rank + 1), residual, torch.full((8,), 0.5), 1e-6), residual


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    return [write_tiny_model(folder / str(i), **overrides) for i, overrides in enumerate(SHAPES.values())]


@pytest.mark.parametrize("size", [2, 4])  # 4 ranks share the two KV heads of some of the models
def test_same_logits_and_collectives(size: int, checkpoints: list[Path], tmp_path: Path) -> None:
    ranks = run_ranks(size, run_rank, tmp_path, checkpoints)
    for i, path in enumerate(checkpoints):
        whole = ModelDriver(path)
        torch.testing.assert_close(ranks[0]["logits"][i], model_logits(whole), atol=2e-4, rtol=1e-4)
        assert all(rank["bytes"][i] < 0.9 * whole.num_bytes for rank in ranks), "each rank holds its part only"
    assert [rank["min"] for rank in ranks] == [11 - size] * size
    assert [rank["broadcast"] for rank in ranks] == [[7, 0]] * size
    assert ranks[0]["gather"].tolist() == [list(range(size))] * 2
    assert [rank["gather"] for rank in ranks[1:]] == [None] * (size - 1)
    assert [rank["max"] for rank in ranks] == [[(size - 1) << 40, 0, 7]] * size
    part, residual = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    residual += part * (size * (size + 1) // 2)
    expected = residual * torch.rsqrt(residual.square().mean(-1, keepdim=True) + 1e-6) * 0.5
    for rank in ranks:
        torch.testing.assert_close(rank["norm"], (expected, residual))
        behind = rank["behind attention"]
        assert behind["rows"] == [37] * (len(behind["rows"]) - 1) + [2], "the last MLP computes what is read alone"
        torch.testing.assert_close(behind["hidden"], behind["expected"])


def gpu_logits(group: TensorParallelGroup, paths: list[Path], hidden_size: int) -> list[list[Tensor]]:
    """Of each model by the process group alone, by one-shot sums, and by two-shot sums."""
    torch.backends.cuda.matmul.allow_tf32 = False
    memory = open_peer_memory(
        group, PeerLayout(num_ranks=group.size, max_rows=20, hidden_size=hidden_size, dtype=torch.float32)
    )
    group.min(0)  # all have it
    results = []
    for path in paths:
        driver = ModelDriver(path, group=group, device=group.device)
        of_model = []
        for two_shot_rows in (None, 21, 1):
            group.peer_memory = None if two_shot_rows is None else memory
            memory.two_shot_rows = two_shot_rows or 0
            of_model.append(model_logits(driver).cpu())
        results.append(of_model)
    return results


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_same_logits_through_shared_memory(size: int, checkpoints: list[Path], tmp_path: Path) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    ranks = run_ranks(size, gpu_logits, tmp_path, checkpoints, 32, device="cuda")
    for path, (by_group, one_shot, two_shot) in zip(checkpoints, ranks[0], strict=True):
        expected = model_logits(ModelDriver(path))
        for logits in (by_group, one_shot, two_shot):
            torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)
        assert torch.equal(one_shot, two_shot)


def test_single_group_needs_no_communication() -> None:
    group = TensorParallelGroup.single()
    x = torch.arange(3.0)
    assert (group.rank, group.size, group.min(5)) == (0, 1, 5)
    assert group.sum(x) is x
    assert group.max(x) is x
    assert group.gather(x) is x
    assert group.broadcast(x) is x
