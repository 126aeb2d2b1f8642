"""`nvcli bench`: the figures come from a real engine, each option changes what it should, wrong ones are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from fake_command import NvcliHere
from nvcli import __version__
from nvcli.tools.bench.ceilings import Ceilings
from nvcli.tools.bench.workload import Workload
from vision_model import write_vision_model

pytestmark = pytest.mark.usefixtures("warm_engines")


@pytest.fixture
def known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares a test the process that measures what this machine can do."""
    ceilings = Ceilings(bytes_per_second=1e10, flops_per_second=1e11)
    monkeypatch.setattr("nvcli.tools.bench.bench.measure_ceilings", lambda config: ceilings)


@pytest.fixture
def bench(nvcli_here: NvcliHere) -> Callable[..., dict[str, Any]]:
    """Runs `nvcli bench` with the built-in model, and returns its result."""

    def run(*args: str) -> dict[str, Any]:
        done = nvcli_here("bench", "-m", "demo", *args, "--json")
        assert done.returncode == 0, done.stderr
        result: dict[str, Any] = json.loads(done.stdout)
        return result

    return run


def test_measures_a_real_engine(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench("--num-requests", "6", "--input-len", "5:20", "--output-len", "4:12")
    assert abs(datetime.fromisoformat(result["date"]) - datetime.now(UTC)) < timedelta(minutes=5)
    assert result["versions"]["nvcli"] == __version__
    assert result["versions"]["torch"]
    assert result["layout"] == {
        "device": "CPU",
        "gpus": [],
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "tensor_parallel_size": 1,
        "enable_expert_parallel": False,
        "enable_attention_dp": False,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
    }
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
    assert {"engine process", "spawn", "import", "load weights", "warm up"} <= result["ready_parts"].keys()
    assert sum(result["ready_parts"].values()) == pytest.approx(result["ready_seconds"])
    phases = run["phases"]
    assert phases["prefill"]["seconds"] == pytest.approx(run["steps"]["EXTEND"]["total"] / 1e3)
    assert phases["prefill"]["seconds"] + phases["decode"]["seconds"] + run["idle_seconds"] == pytest.approx(
        run["seconds"]
    )
    assert run["steps"]["EXTEND"]["idle_p99"] == 0  # what came before the pass is not counted
    ((peak,),) = result["peak_bytes"]
    assert peak > result["ready"]["weight_bytes"]
    assert result["ready"]["memory"][0]["planned"]["weights"] == result["ready"]["weight_bytes"]


@pytest.mark.usefixtures("known_ceilings")
def test_requests_are_spread_over_made_up_adapters(bench: Callable[..., dict[str, Any]]) -> None:
    """Three adapters, of which two are on the device at a time."""
    few = ("--num-requests", "6", "--input-len", "5", "--output-len", "4", "--lora-rank", "4", "--num-loras", "3")
    result = bench(*few, "--set", "max_num_seqs=2")
    assert result["adapters"] == {"num_adapters": 3, "made_up_rank": 4, "num_merged": 0}
    assert result["ready"]["max_loaded_adapters"] == 2
    assert result["runs"][0]["output_tokens"] == 24


@pytest.mark.usefixtures("known_ceilings")
def test_requests_run_adapter_by_adapter_where_that_costs_less(bench: Callable[..., dict[str, Any]]) -> None:
    """With many requests of each adapter, which have a few steps of their own; never beside others then."""
    many = ("--num-requests", "40", "--input-len", "5", "--output-len", "4", "--lora-rank", "4", "--num-loras", "2")
    result = bench(*many, "--set", "max_num_seqs=10", "--lora-mode", "merged")
    assert result["adapters"]["num_merged"] == 2
    assert result["runs"][0]["output_tokens"] == 160
    assert result["runs"][0]["steps"]["DECODE"]["count"] == 12


@pytest.mark.usefixtures("known_ceilings")
def test_a_shared_prefix_is_found_in_the_cache_anew_in_each_pass(bench: Callable[..., dict[str, Any]]) -> None:
    options = ("--num-requests", "5", "--input-len", "8", "--output-len", "2", "--set", "block_size=16")
    result = bench(
        *options,
        "--shared-prefix",
        "36",
        "--set",
        "max_num_batched_tokens=64",
        "--repeat",
        "2",
        "--set",
        "max_num_seqs=8",
    )
    # The first step computes one prompt and part of the next; the others find two full blocks of the prefix.
    first, second = (run["cached_tokens"] for run in result["runs"])
    assert first == second
    assert 3 * 32 <= first <= 4 * 32


@pytest.mark.usefixtures("known_ceilings")
def test_groups_of_prompts_and_samples(nvcli_here: NvcliHere) -> None:
    options = ("--num-requests", "4", "--input-len", "8", "--output-len", "3", "--set", "block_size=16")
    done = nvcli_here("bench", "-m", "demo", *options, "--shared-prefix", "16,16:2", "--samples", "2")
    assert done.returncode == 0, done.stderr
    # The shared block is computed once, each group's once, and of all eight answers the last eight prompt tokens.
    assert "demo: 8 requests, 160 prompt tokens, 24 output tokens" in done.stdout
    assert f"{8 * 40 - 112} prompt tokens found, not computed (65.0 %), 112 computed" in done.stdout


@pytest.mark.usefixtures("known_ceilings")
def test_requests_of_two_tokens_are_measured(bench: Callable[..., dict[str, Any]]) -> None:
    result = bench("--num-requests", "1", "--input-len", "1", "--output-len", "1", "--set", "max_model_len=2")
    assert result["runs"][0]["output_tokens"] == 1


@pytest.mark.usefixtures("known_ceilings")
def test_copies_and_ranks_share_the_work(bench: Callable[..., dict[str, Any]]) -> None:
    options = ("--num-requests", "4", "--input-len", "8", "--output-len", "6", "--tp", "2", "--dp", "2")
    result = bench(*options)
    (run,) = result["runs"]
    assert run["num_requests"] == 4
    assert run["steps"]["DECODE"]["count"] == 2 * 5
    assert [[peak > 0 for peak in ranks] for ranks in result["peak_bytes"]] == [[True, True], [True, True]]


@pytest.mark.usefixtures("known_ceilings")
def test_a_files_rows_are_the_workload(tmp_path: Path, bench: Callable[..., dict[str, Any]]) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt_token_ids": [5] * 10, "sampling": {"max_tokens": 3}}, {"prompt_token_ids": [6, 7]}]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = bench("--input", str(file), "--output-len", "5")
    (run,) = result["runs"]
    assert (run["num_requests"], run["prompt_tokens"], run["output_tokens"]) == (2, 12, 3 + 5)


@pytest.mark.usefixtures("known_ceilings")
def test_images_are_made_up(tmp_path: Path, nvcli_here: NvcliHere, known_ceilings: None) -> None:
    model = write_vision_model(tmp_path / "model")
    sizes = ("--num-requests", 5, "--input-len", 4, "--output-len", 3, "--images", 2, "--image-size", "60x33")
    done = nvcli_here("bench", "-m", model, *sizes, "--set", "max_num_seqs=4", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    (run,) = result["runs"]
    images = result["images"]
    assert (images["per_prompt"], images["size"], images["num_tokens"]) == (2, [60, 33], 32)
    assert images["prepared_per_second"] > 0
    assert run["prompt_tokens"] == 5 * (2 * 32 + 4)
    assert run["cached_tokens"] == 0
    assert result["images_per_second"] == pytest.approx(2 * result["requests_per_second"])


def test_ablations_run_each_in_engines_of_their_own(nvcli_here: NvcliHere) -> None:
    options = ("--num-requests", "3", "--input-len", "8", "--output-len", "4")
    done = nvcli_here("bench", "-m", "demo", *options, "--ablate", "overlap,backend=flashinfer")
    assert done.returncode == 0, done.stderr
    table = done.stdout[done.stdout.index("as configured") :].splitlines()
    assert table[1].startswith("without overlap")
    assert table[1].endswith("%")
    assert "left out: attention_backend flashinfer" in table[2]
    assert done.stderr.count("ready in") == 2


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--shape", "gpt-5"), "qwen3-0.6b"),
        (("-m", "demo", "--shape", "qwen3-0.6b"), "exclude each other"),
        (("-m", "demo", "--input-len", "9:1"), "--input-len"),
        (("-m", "demo", "--input-len", "4000"), "max_model_len"),
        (("-m", "demo", "--shared-prefix", "-1"), "--shared-prefix"),
        (("-m", "demo", "--repeat", "0"), "--repeat"),
        (("-m", "demo", "--ablate", "magic"), "--ablate"),
        (("-m", "demo", "--plot", "run.gif"), "--plot"),
        (("-m", "demo", "--lora-mode", "merged"), "--lora-mode merged is for adapters, and there are none"),
        (("-m", "demo", "--input", "no-such-file.jsonl"), "no-such-file.jsonl"),
        (("-m", "demo", "--input", "rows.jsonl", "--input-len", "5"), "--input-len"),
        (
            ("-m", "demo", "--images", "1"),
            "--images 1: this model (Qwen3ForCausalLM) is read as one of text",
        ),
        (("-m", "demo", "--image-size", "9x9"), "add --images"),
        (("-m", "demo", "--images", "1", "--image-size", "9"), "--image-size 9: allowed"),
        (("-m", "demo", "--dp", "0"), "--dp"),
        (("-m", "demo", "--set", "kv_cache_memory=250KB", "--set", "block_size=16"), "KV cache"),
        ((), "--model"),
    ],
)
def test_wrong_options_are_refused(args: tuple[str, ...], named: str, nvcli_here: NvcliHere) -> None:
    done = nvcli_here("bench", *args)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr
