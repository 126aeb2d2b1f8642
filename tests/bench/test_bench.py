"""`nvcli bench`: the workload is the published one, the figures come from a real engine, wrong options are refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from nvcli.bench.command import parse_range
from nvcli.bench.shapes import SHAPES, write_shape
from nvcli.bench.workload import Workload
from nvcli.errors import ConfigError
from nvcli.messages import unpack
from nvcli.models.config import load_model_config


def nvcli_bench(*args: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-P", "-m", "nvcli", "bench", *args]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


def test_default_workload_is_nano_vllms() -> None:
    requests = Workload().requests(151936)
    assert len(requests) == 256
    assert sum(len(unpack(request.prompt_ids)) for request in requests) == 142_827
    assert sum(request.max_tokens for request in requests) == 133_966


def test_prompts_stay_in_a_small_vocabulary() -> None:
    requests = Workload(num_requests=5).requests(640)
    assert max(max(unpack(request.prompt_ids)) for request in requests) < 640


@pytest.mark.parametrize(("text", "ends"), [("100:1024", (100, 1024)), ("7", (7, 7))])
def test_ranges(text: str, ends: tuple[int, int]) -> None:
    assert parse_range("--input-len", text) == ends


@pytest.mark.parametrize("text", ["", "a", "5:3", "0:9", "-1", "1:2:3"])
def test_bad_ranges_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--input-len"):
        parse_range("--input-len", text)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_models_that_can_be_built(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = load_model_config(write_shape(name, tmp_path_factory.mktemp(name)))
    config.check_tensor_parallel(2)
    assert config.dtype == "bfloat16"


def test_measures_a_real_engine() -> None:
    done = nvcli_bench("-m", "demo", "--num-requests", "6", "--input-len", "5:20", "--output-len", "4:12", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    (run,) = result["runs"]
    workload = Workload(num_requests=6, input_len=(5, 20), output_len=(4, 12)).requests(640)
    assert run["output_tokens"] == sum(request.max_tokens for request in workload)
    assert run["prompt_tokens"] == sum(len(request.prompt_ids) // 4 for request in workload)
    longest = max(request.max_tokens for request in workload)
    assert run["steps"]["DECODE"]["count"] == longest - 1
    assert run["steps"]["EXTEND"]["count"] == 1
    assert result["output_tokens_per_second"] == pytest.approx(run["output_tokens"] / run["seconds"])
    assert 0 < run["peak_kv_share"] < 1
    assert 0 < run["roofline_share"] < 1
    assert 0 < run["limits"]["DECODE"]["limit_seconds"] < run["limits"]["DECODE"]["seconds"]
    assert result["ceilings"]["bytes_per_second"] > 1e8
    assert {"spawn and import", "load weights", "warm up"} <= result["ready"]["seconds"].keys()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--shape", "gpt-5"), "qwen3-0.6b"),
        (("-m", "demo", "--input-len", "9:1"), "--input-len"),
        (("-m", "demo", "--input-len", "4000"), "max_model_len"),
        ((), "--model"),
    ],
)
def test_wrong_options_are_refused(args: tuple[str, ...], named: str) -> None:
    done = nvcli_bench(*args)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
