"""The planned memory of LoRA adapters is what ranks allocate for them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from fake_runners import engine_config
from nvcli.core.engine_config import EngineConfig
from nvcli.core.lora_config import AdapterSizes
from nvcli.models.adapter_bank import LoadedAdapters
from nvcli.models.adapters.adapter import Adapter, read_adapter
from nvcli.models.adapters.row_adapters import sizes_of
from nvcli.models.config import load_model_config
from nvcli.models.registry import build_model
from nvcli.sizing.adapters import adapter_memory
from nvcli.sizing.kv_cache import max_blocks
from nvcli.sizing.memory import estimate, planned_adapters
from nvcli.tools.bench.adapters import write_adapters
from nvcli.tools.bench.shapes import write_shape
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup

GIB = 2**30


def adapters_of(folder: Path, *ranks: int) -> list[Adapter]:
    """Made-up adapters of the model in a folder."""
    adapters = []
    for rank in ranks:
        (folder / f"rank {rank}").mkdir()
        model = load_model_config(folder)
        lora = write_adapters(model, folder / f"rank {rank}", rank=rank, num_adapters=1, seed=0)
        adapters.append(read_adapter(Path(lora.adapters["1"]), model))
    return adapters


def config_of(folder: Path, sizes: AdapterSizes, **values: object) -> EngineConfig:
    paths = (folder,) * len(sizes.ranks)
    return engine_config(model_path=folder, dtype="bfloat16", lora_paths=paths, lora_sizes=sizes, **values)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("shape", ["qwen3-0.6b", "qwen3.5-9b", "gpt-oss-20b"])
def test_bytes_are_those_of_the_bank(tmp_path: Path, shape: str, tp: int) -> None:
    model = load_model_config(write_shape(shape, tmp_path))
    adapters = adapters_of(tmp_path, 1, 20)
    group = TensorParallelGroup.single()
    group.size = tp
    built = build_model(model, group, torch.bfloat16, has_adapters=True)
    allocated = LoadedAdapters(built, dict(enumerate(adapters, 1)), torch.bfloat16, max_host_bytes=0).num_bytes(2)
    planned = adapter_memory(config_of(tmp_path, sizes_of(adapters), tensor_parallel_size=tp), model, None)
    assert planned.num_places == 2
    assert planned.device_bytes == planned.host_bytes == pytest.approx(allocated, rel=1e-4)


def test_projections_that_no_adapter_changes_take_nothing_unless_they_are_fused(tmp_path: Path) -> None:
    model = load_model_config(write_shape("qwen3-0.6b", tmp_path))
    features = {"qkv": 3 * 1024 + 2048 + 2 * 1024, "down": 3072 + 1024}
    for projections, expected in (("q_proj", "v_proj"), ["qkv"]), (("down_proj", "q_proj"), ["qkv", "down"]):
        sizes = AdapterSizes(ranks=(16,), projections=projections)
        planned = adapter_memory(config_of(tmp_path, sizes), model, None)
        assert planned.device_bytes == 28 * 16 * 2 * sum(features[name] for name in expected)


def test_a_small_share_of_the_memory_bounds_the_adapters_on_a_gpu(tmp_path: Path) -> None:
    """Unless the job says how many; what they take is missing from the KV cache."""
    model = load_model_config(write_shape("qwen3-0.6b", tmp_path))
    sizes = AdapterSizes(ranks=(16,) * 500, projections=("down_proj",))
    config = config_of(tmp_path, sizes, max_num_seqs=512, max_num_batched_tokens=2048, enforce_eager=True)
    planned = planned_adapters(config, model, 4 * GIB)
    assert 1 < planned.num_places < 500
    assert 0.12 * 2 * GIB < planned.device_bytes < 0.15 * 4 * GIB
    assert planned.host_bytes == 500 * planned.device_bytes / planned.num_places
    few = msgspec.structs.replace(config, max_loaded_adapters=2)
    assert planned_adapters(few, model, 4 * GIB).num_places == 2
    none = msgspec.structs.replace(config, lora_paths=(), lora_sizes=AdapterSizes())
    room = [estimate(one, model, 4 * GIB).beside_cache for one in (config, none)]
    assert room[0] - room[1] == planned.device_bytes == estimate(config, model, 4 * GIB).planned["LoRA adapters"]
    assert "LoRA adapters" not in estimate(none, model, 4 * GIB).planned


def test_the_cache_may_hold_a_group_at_rest(tmp_path: Path) -> None:
    """While adapters are merged in turn, as many requests may rest as run, unless they have recurrent states."""
    sizes = AdapterSizes(ranks=(16,), projections=("down_proj",))
    for shape, share in ("qwen3-0.6b", 2), ("qwen3.5-9b", 1):
        model = load_model_config(write_shape(shape, tmp_path))
        config = config_of(tmp_path, sizes, max_num_seqs=64, max_model_len=512)
        in_turn = msgspec.structs.replace(config, merged_adapters=(1,))
        assert max_blocks(in_turn, model) - 1 == share * (max_blocks(config, model) - 1)
