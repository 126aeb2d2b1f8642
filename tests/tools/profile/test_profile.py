"""Plans without a GPU: exact where they say so, consistent with what a run would do, advice that keeps its word."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from fake_command import NvcliHere
from model_facts import with_windows
from nvcli.core.byte_sizes import parse_size
from nvcli.core.config import RunConfig, load_run_config
from nvcli.core.engine_config import EngineConfig
from nvcli.core.histogram import Bucket
from nvcli.core.speculation_config import SpeculationConfig
from nvcli.job.run.engine_settings import resolve_engine_config
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.sizing.costs import model_costs
from nvcli.sizing.graph_sizes import launch_bound_tokens, step_graph_sizes
from nvcli.sizing.kv_cache import block_bytes, blocks_of_request, longest_request
from nvcli.sizing.memory import estimate
from nvcli.tools.bench.shapes import write_shape
from nvcli.tools.profile.advice import advise
from nvcli.tools.profile.command import gpu_size
from nvcli.tools.profile.lengths import lengths_of
from nvcli.tools.profile.profile import profile_from_config
from nvcli.tools.profile.report import format_profile, print_bars
from nvcli.worker.distributed.stage import Stage

GIB = 1 << 30


def setting(folder: Path, shape: str = "qwen3-8b", **values: Any) -> tuple[EngineConfig, ModelConfig]:
    path = write_shape(shape, folder)
    model = load_model_config(path)
    run = RunConfig(model=shape, device="cuda", speculation=SpeculationConfig(method="none"), **values)
    return resolve_engine_config(run, path, model), model


def test_weights_and_blocks_of_qwen3_8b(tmp_path: Path) -> None:
    config, model = setting(tmp_path)
    use = estimate(config, model, 80 * GIB)
    assert use.planned["weights"] == sum(use.weights.values()) == 16_381_470_720  # as loaded on a GPU
    assert block_bytes(config, model) == 36 * 2 * 8 * 128 * 2 * 64
    assert use.planned["KV cache"] % block_bytes(config, model) == 0
    assert 0 <= use.budget - sum(use.planned.values()) < block_bytes(config, model)


@pytest.mark.parametrize(
    ("shape", "activations", "graphs"),
    [
        ("qwen3-0.6b", 377_487_360, 442_499_072),
        ("qwen3-8b", 406_847_488, 400_556_032),
        ("qwen3-14b", 490_733_568, 417_333_248),
    ],
)
def test_estimates_are_near_what_an_h200_measured(tmp_path: Path, shape: str, activations: int, graphs: int) -> None:
    config, model = setting(tmp_path, shape, enable_cascade_attention=False)
    planned = estimate(config, model, 140 * GIB).planned
    assert planned["activations"] == pytest.approx(activations, rel=0.1)
    assert planned["CUDA graphs"] == pytest.approx(graphs, rel=0.1)


def test_graphs_of_steps_that_share_are_planned_for(tmp_path: Path) -> None:
    """Ranks set memory aside for one beside each graph of two decode rows or more, which may share segments, and for
    one beside each of these that has chunks and few tokens, which may share prefixes."""
    config, model = setting(tmp_path)
    sizes = step_graph_sizes(config, model)
    num_shared = sum(decode_rows > 1 for decode_rows, _, _ in sizes)
    most_tokens = launch_bound_tokens(model)
    num_small = sum(prefill_rows > 1 and num_tokens <= most_tokens for _, prefill_rows, num_tokens in sizes)
    assert num_shared > 20
    assert num_small == 6
    num_shared += 2 * num_small
    alone = msgspec.structs.replace(config, enable_cascade_attention=False)
    with_shared, without = (estimate(one, model, 140 * GIB).planned["CUDA graphs"] for one in (config, alone))
    assert with_shared - without == num_shared * 1_500_000


def test_weights_of_qwen3_8b_in_fp8(tmp_path: Path) -> None:
    """Layers take half as much and scales of 4 bytes a row; embedding and LM head keep their type."""
    config, model = setting(tmp_path, quantization="fp8")
    model = model.with_quantization(config.quantization)
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288
    rows = 4096 + 2 * 1024 + 4096 + 2 * 12288 + 4096
    use = estimate(config, model, 80 * GIB)
    assert use.planned["weights"] == 16_381_470_720 - 36 * (layer - 4 * rows)
    costs = model_costs(model, "bfloat16")
    assert costs.layers.num_fp8_weights == 36 * layer
    assert costs.layers.operations_per_row == 36 * layer, "two operations for a weight, in half the time"
    profile = profile_from_config(config, model, "qwen3-8b", total=80 * GIB, lengths=None)
    assert not any("quantization" in advice.change for advice in profile.advice)


def test_tensor_parallel_cuts_weights_and_cache(tmp_path: Path) -> None:
    one, model = setting(tmp_path)
    four = msgspec.structs.replace(one, tensor_parallel_size=4)
    assert block_bytes(one, model) == 4 * block_bytes(four, model)
    assert estimate(four, model, 80 * GIB).planned["weights"] < estimate(one, model, 80 * GIB).planned["weights"] / 3.9


def test_stages_share_layers_and_cache(tmp_path: Path) -> None:
    config, model = setting(tmp_path, pipeline_parallel_size=2)
    profile = profile_from_config(config, model, "qwen3-8b", total=24 * GIB, lengths=None)
    first, last = profile.ranks
    assert sum(use.planned["weights"] for use in profile.ranks) == 16_381_470_720
    assert "LM head" not in first.weights
    assert "embeddings" not in last.weights
    assert profile.block_bytes == 18 * 2 * 8 * 128 * 2 * 64
    fewest = min(first.planned["KV cache"], last.planned["KV cache"])
    assert profile.num_blocks == fewest // profile.block_bytes - 1 > 500
    text = format_profile(profile)
    assert "rank 0 of 2 (stage 0)" in text
    assert "rank 1 of 2 (stage 1)" in text
    most = estimate(config, model, 24 * GIB)
    assert all(
        most.planned[item] >= use.planned[item] for use in profile.ranks for item in use.planned if item != "KV cache"
    )


def test_the_first_stage_alone_has_the_tower(tmp_path: Path) -> None:
    config, model = setting(tmp_path, "qwen3-vl-8b", pipeline_parallel_size=2, max_model_len=8192)
    with_tower = msgspec.structs.replace(config, max_image_tokens=4096), model.with_tower()
    for stage, more in (Stage(0, 2), True), (Stage(1, 2), False):
        plain, found = (estimate(*each, 80 * GIB, stage).planned for each in ((config, model), with_tower))
        assert {name for name in plain if found[name] > plain[name]} == (
            {"weights", "buffers", "activations"} if more else set()
        )


def test_advice_keeps_its_word(tmp_path: Path) -> None:
    """What a change is said to give is what the plan with that change gives."""
    config, model = setting(tmp_path)
    use = estimate(config, model, 40 * GIB)
    found = advise(config, model, use, request_len=4096, longest=None)
    assert any(advice.change.startswith("--tp") for advice in found)
    assert any("gpu_memory_utilization" in advice.change for advice in found)
    assert any(advice.change == "--set quantization=fp8" for advice in found)
    for advice in found:
        key, _, value = advice.change.removeprefix("--set ").replace("--tp ", "tensor_parallel_size=").partition("=")
        changed = msgspec.structs.replace(config, **{key: yaml.safe_load(value)})
        cache = estimate(changed, model.with_quantization(changed.quantization), 40 * GIB).planned["KV cache"]
        assert advice.tokens == (cache // block_bytes(changed, model) - 1) * config.block_size
        assert advice.requests == pytest.approx(advice.tokens / 4096)


def test_an_fp8_cache_holds_nearly_twice_as_many_tokens(tmp_path: Path) -> None:
    """The advice gives the plan's own numbers, and is not given where it is followed or cannot be."""
    config, model = setting(tmp_path)
    use = estimate(config, model, 40 * GIB)

    def advised(**changes: Any) -> list[str]:
        changed = msgspec.structs.replace(config, **changes)
        return [one.change for one in advise(changed, model, use, request_len=4096, longest=None)]

    fp8 = msgspec.structs.replace(config, kv_cache_dtype="fp8")
    scratch = estimate(fp8, model, 40 * GIB).planned["buffers"] - use.planned["buffers"]
    assert scratch == 2 * 65_536 * 8 * 128 * 2, "copies of what a step's prompts see, in bfloat16"
    assert estimate(msgspec.structs.replace(fp8, block_size=16), model, 40 * GIB).planned["buffers"] < scratch
    assert block_bytes(fp8, model) == 36 * 2 * 8 * (128 + 2) * 64
    most = [one for one in advise(config, model, use, request_len=4096, longest=None) if "kv_cache" in one.change]
    assert [one.change for one in most] == ["--set kv_cache_dtype=fp8"]
    tokens = estimate(config, model, 40 * GIB).planned["KV cache"] // block_bytes(config, model) * config.block_size
    assert 1.9 * tokens < most[0].tokens < 2 * tokens
    assert "--set kv_cache_dtype=fp8" not in advised(kv_cache_dtype="fp8") + advised(attention_backend="flashinfer")


def test_nothing_is_advised_that_a_run_with_the_same_bits_in_every_batch_refuses(tmp_path: Path) -> None:
    config, model = setting(tmp_path)
    config = msgspec.structs.replace(config, batch_invariant=True)
    found = advise(config, model, estimate(config, model, 40 * GIB), request_len=4096, longest=None)
    assert found
    assert not any("fp8" in advice.change or "w4a16" in advice.change for advice in found)


def test_more_slots_are_advised_where_the_cache_has_room(tmp_path: Path) -> None:
    config, model = setting(tmp_path, "qwen3-0.6b", max_model_len=2048)
    (advice,) = advise(config, model, estimate(config, model, 80 * GIB), request_len=500, longest=None)
    assert advice.change == "--set max_num_seqs=1024"


@pytest.mark.parametrize(
    ("total", "values", "expected"),
    [
        (24 * GIB, {"gpu_memory_utilization": 0.95}, "--set enforce_eager=true"),
        (80 * GIB, {"kv_cache_memory": "20GiB"}, f"--set kv_cache_memory={40 * GIB}"),
        (80 * GIB, {"kv_cache_memory": "40GiB"}, "--set kv_cache_memory=null"),
        (300 * GIB, {"max_model_len": 32}, "--set max_num_seqs=16384 --set max_num_batched_tokens=16384"),
    ],
)
def test_advice_can_be_typed_as_it_is(tmp_path: Path, total: int, values: dict[str, Any], expected: str) -> None:
    config, model = setting(tmp_path, **values)
    found = profile_from_config(config, model, "qwen3-8b", total=total, lengths=None).advice
    assert expected in [advice.change for advice in found]
    for advice in found:
        words = advice.change.split()
        if words[0] == "--set":
            load_run_config(None, [*words[1::2]], needs_model=False)


def test_a_cache_of_a_given_size_must_fit_the_gpu(tmp_path: Path) -> None:
    config, model = setting(tmp_path, kv_cache_memory="20GiB", max_model_len=8192)
    profile = profile_from_config(config, model, "qwen3-8b", total=24 * GIB, lengths=None)
    assert profile.problem is not None
    assert "kv_cache_memory" in profile.problem
    assert [advice.change for advice in profile.advice] == ["--set kv_cache_memory=null"]
    # The budget does not hold for it, and more than all requests can fill is not allocated.
    assert profile_from_config(config, model, "qwen3-8b", total=38 * GIB, lengths=None).problem is None
    small = msgspec.structs.replace(config, max_model_len=256, max_num_seqs=8)
    assert profile_from_config(small, model, "qwen3-8b", total=24 * GIB, lengths=None).problem is None


def test_what_does_not_fit_is_said_with_a_way_out(tmp_path: Path) -> None:
    config, model = setting(tmp_path, "qwen3-32b")
    profile = profile_from_config(config, model, "qwen3-32b", total=40 * GIB, lengths=None)
    assert profile.problem is not None
    assert "missing" in profile.problem
    assert profile.ranks[0].planned["KV cache"] == 0
    assert "over the budget " in format_profile(profile)
    assert [advice.change for advice in profile.advice] == ["--tp 4", "--tp 8"]
    for advice in profile.advice:
        size = int(advice.change.removeprefix("--tp "))
        changed = msgspec.structs.replace(config, tensor_parallel_size=size)
        fits = profile_from_config(changed, model, "qwen3-32b", total=40 * GIB, lengths=None)
        assert (fits.problem, fits.num_tokens) == (None, advice.tokens)
    two = msgspec.structs.replace(config, tensor_parallel_size=2)
    left_out = profile_from_config(two, model, "qwen3-32b", total=40 * GIB, lengths=None)
    assert left_out.full_length_requests < 1
    assert "does not fit" in format_profile(profile)


def test_a_cache_too_small_for_one_request_is_flagged(tmp_path: Path) -> None:
    """The length that is advised fits exactly: a block more does not."""
    config, model = setting(tmp_path, "qwen3-32b")
    profile = profile_from_config(config, model, "qwen3-32b", total=80 * GIB, lengths=None)
    assert profile.full_length_requests < 1
    assert profile.longest_request == profile.num_blocks * 64 < config.max_model_len
    text = format_profile(profile)
    assert f"not even one fits; a request that grows beyond {profile.longest_request:,} tokens" in text
    assert profile.advice[0].change == f"--max-model-len {profile.longest_request}"
    shorter = msgspec.structs.replace(config, max_model_len=profile.longest_request)
    fitting = profile_from_config(shorter, model, "qwen3-32b", total=80 * GIB, lengths=None)
    assert fitting.full_length_requests >= 1
    assert "not even one" not in format_profile(fitting)
    assert not any(advice.change.startswith("--max-model-len") for advice in fitting.advice)


@pytest.mark.parametrize("window", [None, 256])
def test_the_longest_request_of_a_cache(tmp_path: Path, window: int | None) -> None:
    config, model = setting(tmp_path, max_model_len=4096, max_num_batched_tokens=256)
    if window is not None:
        model = with_windows(model, (window, None) * (model.num_layers // 2))
    for num_blocks in range(200):
        longest = longest_request(num_blocks, config, model)
        assert longest == 0 or blocks_of_request(config, model, longest) <= num_blocks
        assert longest == 4096 or blocks_of_request(config, model, longest + 1) > num_blocks


def test_lengths() -> None:
    lengths = lengths_of([(10, 5), (100, 28), (30, 34)], failed_rows=2, block_size=64)
    assert lengths.mean_blocks == pytest.approx((1 + 2 + 1) / 3)
    assert (lengths.longest_total, lengths.longest_prompt, lengths.requests) == (128, 100, 3)
    assert sum(bucket.count for bucket in lengths.histogram) == 3
    assert lengths.histogram[0] == Bucket(first=15, last=29, count=1)
    assert lengths_of([(3, 4)], failed_rows=0, block_size=4).histogram == [Bucket(first=7, last=7, count=1)]


@pytest.mark.parametrize(
    ("environ", "has_marks"),
    [
        ({"TERM": "xterm-256color", "FORCE_COLOR": "1"}, False),
        ({"TERM": "xterm-256color", "FORCE_COLOR": "1", "NO_COLOR": "1"}, True),
        ({"TERM": "dumb", "FORCE_COLOR": "1"}, True),
        ({"TERM": "xterm-256color"}, True),
    ],
    ids=["colours", "NO_COLOR", "dumb", "pipe"],
)
def test_bars_can_be_read_without_colours(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environ: dict[str, str],
    has_marks: bool,
) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    config, model = setting(tmp_path, tensor_parallel_size=2)
    print_bars(profile_from_config(config, model, "m", total=80 * GIB, lengths=None))
    shown = capsys.readouterr().out
    first, second, *legend = shown.splitlines()
    assert ("█" in shown) != has_marks
    if has_marks:
        assert re.fullmatch(r"rank 0 W+B*A*G+O+K+\.+", first)
        assert second == first.replace("0", "1", 1)
        assert len(first) == 79
        assert "K KV cache" in " ".join(legend)
    assert re.search(r"free 8\.00 GiB \(10 %\)", shown)


def test_dry_run_on_the_command_line(nvcli_here: NvcliHere) -> None:
    done = nvcli_here(
        "profile-memory", "--shape", "qwen3-32b", "--dry-run", "--gpu-memory", "80GiB", "--tp", "4", "--json"
    )
    assert done.returncode == 0, done.stderr
    profile = json.loads(done.stdout)
    assert profile["is_estimate"]
    assert len(profile["ranks"]) == 4
    assert profile["num_tokens"] == profile["num_blocks"] * 64 > 100_000
    too_small = nvcli_here("profile-memory", "--shape", "qwen3-32b", "--dry-run", "--gpu-memory", "24GB")
    assert too_small.returncode == 2
    assert "does not fit" in too_small.stdout
    assert "Traceback" not in too_small.stderr


def test_a_cpu_run_is_profiled_by_loading_it(tmp_path: Path, nvcli_here: NvcliHere, warm_engines: None) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "What is 1 + 1?", "sampling": {"max_tokens": 9}}\n{"prompt": 5}\n', encoding="utf-8")
    done = nvcli_here(
        "profile-memory", "-m", "demo", "--input", str(rows), "--plot", str(tmp_path / "m.svg"), "--tp", "2", "--json"
    )
    assert done.returncode == 0, done.stderr
    profile = json.loads(done.stdout)
    assert not profile["is_estimate"]
    assert profile["lengths"]["requests"] == 1
    assert profile["lengths"]["failed_rows"] == 1
    assert profile["file_requests"] == profile["num_blocks"]
    for use in profile["ranks"]:
        assert use["measured"]["weights"] == use["planned"]["weights"] == sum(use["weights"].values()) > 1e6
        assert use["measured"]["KV cache"] == use["planned"]["KV cache"]
        assert use["measured"]["other"] > 0, "of a process with torch"
    assert (tmp_path / "m.svg").read_text(encoding="utf-8").startswith("<?xml")


def test_a_picture_that_cannot_be_written_costs_no_figures(nvcli_here: NvcliHere) -> None:
    done = nvcli_here(
        "profile-memory", "-m", "demo", "--dry-run", "--gpu-memory", "24GB", "--plot", "/proc/memory.svg", "--json"
    )
    assert done.returncode == 2
    assert json.loads(done.stdout)["num_blocks"] > 0
    assert "--plot /proc/memory.svg cannot be written: No such file" in done.stderr


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--shape", "gpt-5", "--dry-run"), "qwen3-0.6b"),
        (("-m", "demo", "--dry-run", "--gpu-memory", "lots"), "--gpu-memory lots: allowed: a size such as 80GiB"),
        (("-m", "demo", "--dry-run", "--gpu-memory", "24MB"), "--gpu-memory 24MB: allowed: a size such as 80GiB"),
        (("-m", "demo", "--gpu-memory", "24GB"), "--dry-run"),
        (("-m", "demo", "--dry-run", "--gpu-memory", "24GB", "--set", "device=cpu"), "device"),
        (("-m", "demo", "--dry-run", "--gpu-memory", "24GB", "--input", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--shape", "qwen3-8b", "--dry-run", "--gpu-memory", "24GB", "--input", "x.jsonl"), "--input"),
        (("-m", "demo", "--plot", "picture.bmp"), "picture.bmp"),
        (("-m", "demo", "--dry-run", "--gpu-memory", "24GB", "--tp", "3"), "tensor_parallel_size"),
    ],
)
def test_wrong_options_are_refused(args: tuple[str, ...], named: str, nvcli_here: NvcliHere) -> None:
    done = nvcli_here("profile-memory", *args)
    assert done.returncode == 2
    assert named in done.stderr
    assert "Traceback" not in done.stderr


def test_sizes_as_they_are_typed() -> None:
    assert parse_size("80GiB") == 80 * GIB


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("24", 24 * GIB),
        ("24G", 24 * GIB),
        ("24g", 24 * GIB),
        ("24GiB", 24 * GIB),
        ("24GB", 24 * 10**9),
        ("25769803776", 24 * GIB),
        (None, None),
    ],
)
def test_sizes_of_gpus(text: str | None, size: int | None) -> None:
    assert gpu_size(text) == size
