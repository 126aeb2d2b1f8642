"""LoRA adapters of single rows on a real GPU, in CUDA graphs and beside each other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters import low_rank, merge, write_adapter
from nvcli.demo import demo_path
from nvcli.engine.request import Request
from one_rank import make_runner, run_requests
from requests_factory import make_request

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("memory_is_given_back")]

RANKS = (16, 40, 8)


def requests_of(adapters: Sequence[int], count: int = 30) -> list[Request]:
    """Prompts of 1 to 150 tokens, with these adapters in turn."""
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 640) for _ in range(rng.randint(1, 150))] for _ in range(count)]
    return [make_request(i, prompt, 40, adapter=adapters[i % len(adapters)]) for i, prompt in enumerate(prompts)]


def answers(requests: list[Request], path: Path, **config: Any) -> dict[int, list[int]]:
    return run_requests(make_runner(path, max_num_seqs=16, **config), requests)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    """Adapters of the built-in model, each with the checkpoint that it makes."""
    folder, made = tmp_path_factory.mktemp("adapters"), []
    for number, rank in enumerate(RANKS, 1):
        tensors = low_rank(demo_path(), rank=rank, seed=number, size=0.05)
        adapter = write_adapter(folder / f"adapter {number}", tensors, r=rank, lora_alpha=2 * rank)
        made.append((adapter, merge(demo_path(), tensors, folder / f"merged {number}")))
    return made


def test_mixed_in_graphs_is_as_alone(folders: list[tuple[Path, Path]]) -> None:
    """Bit for bit, with two places for three adapters."""
    paths = tuple(adapter for adapter, _ in folders)
    requests = requests_of((1, 0, 3, 2, 2))
    mixed = answers(requests, demo_path(), lora_paths=paths, max_loaded_adapters=2, batch_invariant=True)
    for adapter in range(4):
        mine = [request for request in requests if request.adapter == adapter]
        alone = answers(mine, demo_path(), lora_paths=paths, batch_invariant=True, enforce_eager=True)
        assert alone == {request.request_id: mixed[request.request_id] for request in mine}


def test_mixed_is_as_merged(folders: list[tuple[Path, Path]]) -> None:
    """As far as the rounding of weights in bfloat16 lets it: most answers begin alike."""
    requests = requests_of((1, 2, 3))
    mixed = answers(requests, demo_path(), lora_paths=tuple(adapter for adapter, _ in folders))
    num_equal = num_as_base = 0
    base = answers(requests_of((0,)), demo_path())
    for adapter, (_, merged) in enumerate(folders, 1):
        found = answers(requests_of((0,)), merged)
        mine = [request.request_id for request in requests if request.adapter == adapter]
        num_equal += sum(found[i][:3] == mixed[i][:3] for i in mine)
        num_as_base += sum(base[i][:3] == mixed[i][:3] for i in mine)
    assert num_equal >= 0.8 * len(requests)
    assert num_as_base < 0.5 * len(requests)


def test_merged_in_turn_is_as_alone(folders: list[tuple[Path, Path]]) -> None:
    """Bit for bit, in graphs, also after another adapter was merged."""
    paths = tuple(adapter for adapter, _ in folders)
    requests = requests_of((1, 0, 3, 2, 2))
    ways = {"lora_paths": paths, "merged_adapters": (1, 2, 3), "merged_only_adapters": (1, 2, 3)}
    mixed = answers(requests, demo_path(), batch_invariant=True, **ways)
    for adapter in (0, 2):
        mine = [request for request in requests if request.adapter == adapter]
        alone = answers(mine, demo_path(), batch_invariant=True, enforce_eager=True, **ways)
        assert alone == {request.request_id: mixed[request.request_id] for request in mine}


def test_tails_overlap_in_graphs(folders: list[tuple[Path, Path]]) -> None:
    """Rows that begin merged and end at a place, and the other way round, stay close to the merged checkpoints."""
    requests = sorted(requests_of((1, 2, 3), 60), key=lambda request: request.adapter)
    paths = tuple(adapter for adapter, _ in folders)
    mixed = answers(requests, demo_path(), lora_paths=paths, merged_adapters=(1, 2, 3))
    for adapter, (_, path) in enumerate(folders[1:], 2):
        plain = [msgspec.structs.replace(each, adapter=0) for each in requests if each.adapter == adapter]
        merged = answers(plain, path)
        num_equal = sum(merged[number][:3] == mixed[number][:3] for number in merged)
        assert num_equal >= 0.8 * len(plain)
