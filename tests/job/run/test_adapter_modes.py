"""Which adapters of a job are merged into the weights in turn: those of many rows, and what batches cannot serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from adapters import LINEAR, low_rank, write_adapter
from fake_runners import engine_config
from nvcli.core.config import JobConfig, RunConfig
from nvcli.core.lora_config import LoraConfig, adapter_choice
from nvcli.demo import demo_path
from nvcli.errors import LoadError
from nvcli.job.input.reader import RowReader
from nvcli.job.output.manifest import MERGED_FACT, merged_fact
from nvcli.job.planning.adapter_costs import AdapterWork, choose_merged
from nvcli.job.planning.job_time import gpu_speed
from nvcli.job.rows.native_row import ADAPTER_KEY, RowKeys
from nvcli.job.rows.parser import RowParser
from nvcli.job.run import adapter_modes
from nvcli.job.run.adapter_modes import choose_modes, find_modes
from nvcli.models.adapters.adapter import Adapter, read_adapter
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.tools.bench.adapters import write_adapters
from nvcli.tools.bench.shapes import write_shape

NAMES = ("a", "b", "c")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    folder = tmp_path_factory.mktemp("adapters")
    model = load_model_config(demo_path())
    return {name: read_adapter(write_adapter(folder / name, low_rank(demo_path())), model) for name in NAMES}


def test_adapters_of_many_rows_are_merged(tmp_path: Path) -> None:
    """An 8B model on an H200: from about five times as many as run at a time, more where its base is in RAM."""
    model = load_model_config(write_shape("qwen3-8b", tmp_path))
    write_adapters(model, tmp_path, rank=16, num_adapters=1, seed=0)
    adapter = read_adapter(tmp_path / "adapter-1", model)
    config = engine_config(device="cuda", dtype="bfloat16", max_num_seqs=256)

    def merged(num_requests: int, answer_tokens: float, gpu_bytes: int) -> bool:
        work = {1: AdapterWork(num_requests=num_requests, answer_tokens=answer_tokens)}
        speed = gpu_speed("NVIDIA H200")
        return choose_merged(work, {1: adapter}, model, config, speed, gpu_bytes=gpu_bytes) == (1,)

    large, small = 140 << 30, 40 << 30
    assert [merged(num, 512, large) for num in (4, 256, 600, 1_300, 10_000)] == [False, False, False, True, True]
    assert [merged(num, 512, small) for num in (256, 900, 10_000)] == [False, False, True]


def chosen(
    adapters: dict[str, Adapter],
    folder: Path,
    rows: list[Any],
    begun: dict[str, Any] | None = None,
    can_count: bool = True,
    limit: int | None = None,
    **job: Any,
) -> tuple[int, ...]:
    (folder / "in.jsonl").write_text("".join(json.dumps({"prompt": "x", "lora": name}) + "\n" for name in rows))
    run = RunConfig(model="demo", lora=LoraConfig(adapters=dict.fromkeys(NAMES, "path")), job=JobConfig(**job))
    return choose_modes(
        run,
        engine_config(max_num_seqs=8, merged_adapters=(3,)),
        adapters,
        load_model_config(demo_path()),
        lambda: RowReader([str(folder / "in.jsonl")], RowParser({}, RowKeys(adapter=ADAPTER_KEY), adapters=NAMES)),
        begun,
        limit=limit,
        can_count=can_count,
    )


def test_rows_are_counted(adapters: dict[str, Adapter], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where that is possible, and their order is free; what was begun goes on as it was."""
    rows = ["a"] * 500 + ["b"] * 7 + [None] * 500 + ["nobody"]
    assert chosen(adapters, tmp_path, rows) == (1, 3), "what has no other way is merged anyway"
    assert chosen(adapters, tmp_path, rows, limit=7) == (3,)
    assert chosen(adapters, tmp_path, rows, order="input") == (3,)
    assert chosen(adapters, tmp_path, rows, can_count=False) == (3,)
    assert chosen(adapters, tmp_path, rows, begun={MERGED_FACT: "b, c"}) == (2, 3)
    assert chosen(adapters, tmp_path, rows, begun={}) == (3,)
    renamed = dict(zip(("x, a", "a", "c"), adapters.values(), strict=True))
    assert chosen(renamed, tmp_path, rows, begun={MERGED_FACT: merged_fact(["x, a", "c"])}) == (1, 3)
    monkeypatch.setattr(adapter_modes, "_MOST_ROWS", 600)
    assert chosen(adapters, tmp_path, ["a"] * 700 + ["b"]) == (1, 2, 3), "further rows may be of any adapter"


def test_forced_ways(adapters: dict[str, Adapter], tmp_path: Path) -> None:
    model = load_model_config(demo_path())
    dora = low_rank(demo_path(), LINEAR)
    dora |= {
        name.replace("lora_B.weight", "lora_magnitude_vector"): tensor.abs().sum(1) + 1
        for name, tensor in dora.items()
        if "lora_B" in name
    }
    both = [adapters["a"], read_adapter(write_adapter(tmp_path / "dora", dora, use_dora=True), model)]

    def modes(mode: Any, model: ModelConfig = model) -> Any:
        found = find_modes(adapter_choice(LoraConfig(adapters={}, mode=mode)), both, model)
        return found.merged, found.merged_only, found.mergeable

    assert modes("auto") == ((2,), (2,), (1, 2))
    assert modes("merged") == ((1, 2), (2,), (1, 2))
    with pytest.raises(
        LoadError, match=r"`use_dora`: DoRA is not supported in a batch with other rows; with lora.mode"
    ):
        modes("batched")
    both.pop()
    assert modes("batched") == ((), (), (1,))
