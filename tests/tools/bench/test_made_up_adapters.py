"""Made-up adapters are read like those of PEFT, fit the model, and are spread evenly over the rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from nvcli.core.config import RunConfig
from nvcli.errors import ConfigError
from nvcli.models.adapters.adapter import read_adapter
from nvcli.models.adapters.row_adapters import check_row_adapter, linear_tensors
from nvcli.models.config import load_model_config
from nvcli.tools.bench.adapters import in_turns, spread_over_adapters, write_adapters
from nvcli.tools.bench.command import run_bench
from nvcli.tools.bench.options import BenchOptions
from nvcli.tools.bench.shapes import write_shape
from nvcli.tools.bench.workload import Workload


@pytest.mark.parametrize("shape", ["qwen3-0.6b", "gemma-4-26b-a4b", "qwen3.5-35b-a3b"])
def test_every_linear_layer_that_may_differ_by_row_is_changed(tmp_path: Path, shape: str) -> None:
    """Also where the files of a family name modules otherwise than the decoder, and layers have recurrent states."""
    model = load_model_config(write_shape(shape, tmp_path))
    lora = write_adapters(model, tmp_path, rank=3, num_adapters=2, seed=0)
    assert list(lora.adapters) == ["1", "2"]
    adapter = read_adapter(Path(lora.adapters["2"]), model)
    check_row_adapter(adapter, model)
    assert adapter.config.rank == 3
    assert adapter.changes.keys() == {tensor.name for tensor in linear_tensors(model)}
    with (tmp_path / "adapter-1" / "adapter_model.safetensors").open("rb") as first:
        assert first.read() == (tmp_path / "adapter-2" / "adapter_model.safetensors").read_bytes()


def test_rows_are_spread_evenly_with_all_their_samples() -> None:
    requests = [one for request in Workload(num_requests=10, samples=2).requests(100) for one in request.samples()]
    spread = spread_over_adapters(requests, 4, seed=0)
    by_row = {request.row: request.adapter for request in spread}
    assert all(by_row[request.row] == request.adapter for request in spread)
    assert sorted(Counter(by_row.values()).items()) == [(1, 3), (2, 3), (3, 2), (4, 2)]
    assert [request.adapter for request in spread_over_adapters(requests, 4, seed=1)] != [
        request.adapter for request in spread
    ]
    assert [request.adapter for request in in_turns(spread, [1])] == [2] * 6 + [3] * 4 + [4] * 4 + [1] * 6


@pytest.mark.parametrize(
    ("options", "lora", "message"),
    [
        (BenchOptions(num_loras=3), None, "--num-loras 3 is the number of made-up adapters; add their --lora-rank"),
        (BenchOptions(lora_rank=8), "some/adapter", "--lora-rank 8 makes up adapters, and `lora` names others"),
        (BenchOptions(lora_mode="merged"), "some/adapter", "some/adapter is for all requests and always merged"),
    ],
)
def test_what_does_not_go_together_is_refused(options: BenchOptions, lora: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_bench(RunConfig(model="demo", lora=lora), options, say=print)
