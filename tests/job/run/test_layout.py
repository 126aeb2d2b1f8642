"""Which layout is chosen for which model, machine and job: without a GPU, from what nvidia-smi would say."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest

from nvcli.core.config import RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.system.nvidia_smi import SmiGpu, SmiReport
from nvcli.errors import CapacityError, ConfigError
from nvcli.job.planning.job_time import Lengths
from nvcli.job.planning.layout import Layout, choose_layout, estimate_layout, layout_as_given, resolve_layout
from nvcli.job.run.engine_settings import resolve_engine_config
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.tools.bench.shapes import write_shape

GIB = 1 << 30
H200 = ("NVIDIA H200", 141 * 10**9)
H100 = ("NVIDIA H100 80GB HBM3", 80 * GIB)
RTX_4090 = ("NVIDIA GeForce RTX 4090", 24 * GIB)


def machine(count: int, kind: tuple[str, int] = H200, held_gib: dict[int, int] | None = None) -> list[SmiGpu]:
    return [
        SmiGpu(
            index=index,
            uuid=f"uuid-{index}",
            name=kind[0],
            driver="580",
            total_bytes=kind[1],
            used_bytes=(held_gib or {}).get(index, 0) * GIB,
            mig=False,
        )
        for index in range(count)
    ]


@pytest.fixture
def shapes(tmp_path: Path) -> Any:
    def shape(name: str, **keys: Any) -> tuple[ModelConfig, EngineConfig]:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        model = load_model_config(write_shape(name, folder))
        return model, resolve_engine_config(RunConfig(model=name, device="cuda", **keys), folder, model)

    return shape


def sizes(layout: Layout) -> tuple[int, int]:
    return layout.data_parallel_size, layout.tensor_parallel_size


@pytest.mark.parametrize(
    ("shape", "kind", "expected"),
    [
        # dp, tp on 1, 2, 4 and 8 GPUs
        ("qwen3-0.6b", H200, [(1, 1), (2, 1), (4, 1), (8, 1)]),
        ("qwen3-8b", H200, [(1, 1), (2, 1), (4, 1), (8, 1)]),
        ("qwen3-32b", H200, [(1, 1), (2, 1), (4, 1), (8, 1)]),
        ("qwen3-0.6b", H100, [(1, 1), (2, 1), (4, 1), (8, 1)]),
        ("qwen3-8b", H100, [(1, 1), (2, 1), (4, 1), (8, 1)]),
        ("qwen3-32b", H100, [(1, 1), (1, 2), (2, 2), (4, 2)]),  # one has no room for a request of full length
        ("qwen3-0.6b", RTX_4090, [(1, 1), (2, 1), (4, 1), (8, 1)]),
        ("qwen3-8b", RTX_4090, [(1, 1), (1, 2), (2, 2), (4, 2)]),
        ("qwen3-32b", RTX_4090, [None, None, (1, 4), (2, 4)]),  # over PCIe, eight lose more than they gain
    ],
)
def test_a_large_job(shapes: Any, shape: str, kind: tuple[str, int], expected: list[Any]) -> None:
    """A model that fits comfortably wants replicas; one that leaves too little room for KV wants several GPUs."""
    model, config = shapes(shape)
    for count, wanted in zip((1, 2, 4, 8), expected, strict=True):
        if wanted is None:
            with pytest.raises(CapacityError):
                choose_layout(machine(count, kind), model, config, num_requests=None)
            continue
        layout = choose_layout(machine(count, kind), model, config, num_requests=None)
        assert sizes(layout) == wanted, (count, layout.why)
        assert f"--dp {wanted[0]} --tp {wanted[1]}" in layout.why
        assert "\n" not in layout.why


def test_a_small_job_does_not_want_many_copies(shapes: Any) -> None:
    model, config = shapes("qwen3-8b")
    dp = {
        count: choose_layout(machine(8), model, config, num_requests=count).data_parallel_size
        for count in (1, 16, 1024, 100_000)
    }
    assert dp[1] == 1
    assert dp[16] <= 2
    assert dp[16] <= dp[1024] <= dp[100_000] == 8


@pytest.mark.parametrize(
    ("shape", "count", "num_requests", "seconds"),
    [
        # Measured on H200s with `nvcli bench --shape … --num-requests N`: by (dp, tp), of the generation alone.
        ("qwen3-0.6b", 2, 512, {(2, 1): 5.1, (1, 2): 6.8}),
        ("qwen3-0.6b", 4, 1024, {(4, 1): 5.0, (2, 2): 6.4, (1, 4): 9.2}),
        ("qwen3-8b", 2, 512, {(2, 1): 13.7, (1, 2): 15.4}),
        ("qwen3-8b", 4, 256, {(1, 4): 5.8, (2, 2): 5.9}),
        ("qwen3-8b", 4, 1024, {(4, 1): 13.6, (2, 2): 15.4}),
        ("qwen3-32b", 2, 512, {(2, 1): 46.0, (1, 2): 50.0}),
        ("qwen3-32b", 4, 256, {(1, 4): 15.6}),
        ("qwen3-32b", 4, 512, {(2, 2): 25.1, (1, 4): 29.3, (4, 1): 30.4}),
    ],
)
def test_what_was_measured_to_be_fastest_is_chosen(
    shapes: Any, shape: str, count: int, num_requests: int, seconds: dict[tuple[int, int], float]
) -> None:
    model, config = shapes(shape, max_model_len=4096)
    chosen = sizes(choose_layout(machine(count), model, config, num_requests=num_requests))
    assert chosen == min(seconds, key=seconds.__getitem__)


@pytest.mark.parametrize(("count", "num_requests"), [(2, 512), (4, 1024)])
def test_a_share_that_fills_each_gpu_wants_copies(shapes: Any, count: int, num_requests: int) -> None:
    model, config = shapes("qwen3-8b", max_model_len=4096)
    assert sizes(choose_layout(machine(count), model, config, num_requests=num_requests)) == (count, 1)


def test_a_model_that_fits_nowhere_is_an_error_with_the_plan(shapes: Any) -> None:
    model, config = shapes("qwen3-32b")
    with pytest.raises(CapacityError) as caught:
        choose_layout(machine(2, RTX_4090), model, config, num_requests=None)
    message = str(caught.value)
    for part in ("2 GPUs", "--dp 1 --tp 2", "budget is 21.60 GiB", "weights 30.", "activations", "are missing"):
        assert part in message, message
    assert "held by" not in message
    with pytest.raises(CapacityError, match=r"held by other programs and the driver 120\.00 GiB"):
        choose_layout(machine(1, H200, {0: 120}), model, config, num_requests=None)
    model, config = shapes("qwen3-8b", kv_cache_memory="100GiB")
    with pytest.raises(CapacityError, match="or larger ones, lower kv_cache_memory"):
        choose_layout(machine(2, H100), model, config, num_requests=None)


def test_what_an_estimate_may_get_wrong_is_left_to_the_ranks(shapes: Any) -> None:
    model, config = shapes("qwen3-8b", max_model_len=4096)
    sizes_tried = list(range(18 * GIB, 26 * GIB, GIB // 8))
    outcomes = []
    for total in sizes_tried:
        try:
            layout = choose_layout(machine(1, ("NVIDIA A10", total)), model, config, num_requests=None)
            outcomes.append("tight" if "about 0 tokens" in layout.why else "fits")
        except CapacityError:
            outcomes.append("no")
    assert outcomes == sorted(outcomes, key=["no", "tight", "fits"].index)
    assert set(outcomes) == {"no", "tight", "fits"}


def test_gpus_that_others_use_are_passed_over(shapes: Any) -> None:
    model, config = shapes("qwen3-8b")
    layout = choose_layout(machine(4, H200, {0: 130, 2: 125}), model, config, num_requests=None)
    assert (sizes(layout), layout.gpus) == ((2, 1), (1, 3))
    assert "(GPU 1, 3)" in layout.why
    applied = layout.apply(config)
    assert [EngineConfig.gpu_index(applied, 0)] == [1]
    model, config = shapes("qwen3-32b")
    layout = choose_layout(machine(4, H100, {1: 70}), model, config, num_requests=None)
    assert (sizes(layout), layout.gpus) == ((1, 2), (0, 2))


def test_a_gpu_that_is_partly_used_still_counts(shapes: Any) -> None:
    model, config = shapes("qwen3-0.6b")
    layout = choose_layout(machine(2, H200, {0: 40}), model, config, num_requests=None)
    assert (sizes(layout), layout.gpus) == ((2, 1), ())


def test_one_given_and_one_chosen(shapes: Any) -> None:
    model, config = shapes("qwen3-8b")
    gpus = machine(4)

    def chosen(**given: Any) -> tuple[int, int]:
        return sizes(choose_layout(gpus, model, config, num_requests=None, **given))

    assert chosen(tensor_parallel_size=2) == (2, 2)
    assert chosen(tensor_parallel_size=4) == (1, 4)
    assert chosen(data_parallel_size=2) == (2, 2)
    assert chosen(data_parallel_size=4) == (4, 1)
    with pytest.raises(ConfigError, match=r"data_parallel_size \(--dp\) is 5, and the run has 4 GPUs"):
        chosen(data_parallel_size=5)
    with pytest.raises(ConfigError, match=r"tensor_parallel_size \(--tp\) is 8, and the run has 4 GPUs"):
        chosen(tensor_parallel_size=8)


def test_stages_are_kept_and_the_rest_is_chosen_around_them(shapes: Any) -> None:
    model, config = shapes("qwen3-8b", pipeline_parallel_size=2)
    layout = choose_layout(machine(4), model, config, num_requests=None)
    assert (layout.pipeline_parallel_size, *sizes(layout), layout.num_ranks) == (2, 2, 1, 4)
    assert "--dp 2 --pp 2 --tp 1: 2 copies of the model, each on 2 of 4 GPUs" in layout.why
    layout = choose_layout(machine(5, held_gib={1: 100}), model, config, num_requests=None, data_parallel_size=1)
    assert 1 not in (layout.gpus or range(layout.num_ranks))
    assert layout.apply(config).gpu_index(1) == 2
    assert layout.apply(config).num_ranks_here == 4
    with pytest.raises(ConfigError, match=r"\(--tp\) is 2 and pipeline_parallel_size \(--pp\) is 2, and the run has 3"):
        choose_layout(machine(3), model, config, num_requests=None, tensor_parallel_size=2)


def test_stages_make_a_model_fit(shapes: Any) -> None:
    """Four GPUs of 24 GiB hold 32 billion parameters as stages too."""
    model, config = shapes("qwen3-32b", pipeline_parallel_size=4, max_model_len=8192)
    assert sizes(choose_layout(machine(4, RTX_4090), model, config, num_requests=None)) == (1, 1)
    model, config = shapes("qwen3-32b", pipeline_parallel_size=2, max_model_len=8192)
    assert sizes(choose_layout(machine(4, RTX_4090), model, config, num_requests=None)) == (1, 2)
    with pytest.raises(CapacityError, match="--pp 2"):
        choose_layout(machine(2, RTX_4090), model, config, num_requests=None)


def test_a_model_is_cut_only_where_its_heads_divide(shapes: Any) -> None:
    model, config = shapes("qwen3-14b")  # 40 heads, 8 KV heads: 1, 2, 4, 8, not 3, 5, 6 or 7
    for count in range(1, 8):
        layout = choose_layout(machine(count, RTX_4090) if count > 1 else machine(1), model, config, num_requests=None)
        assert model.divides_by(layout.tensor_parallel_size)
        assert layout.tensor_parallel_size in (1, 2, 4)
    three = choose_layout(machine(3, RTX_4090), model, config, num_requests=None)
    assert sizes(three) == (1, 2)


def test_room_for_a_long_request_goes_before_speed(shapes: Any) -> None:
    model, config = shapes("qwen3-32b")
    layout = choose_layout(machine(2, H100), model, config, num_requests=None)
    assert "no other choice holds a request of 40,960 tokens" in layout.why


def report(gpus: list[SmiGpu], failure: str = "") -> SmiReport:
    return SmiReport(gpus={gpu.uuid: gpu for gpu in gpus}, processes=(), links={}, failure=failure)


def test_the_run_gets_numbers(shapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, config = shapes("qwen3-0.6b")
    auto = RunConfig(model="m")

    def resolved(run: RunConfig, found: SmiReport) -> Layout:
        return resolve_layout(run, config, model, report=found)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert sizes(resolved(auto, report(machine(4)))) == (4, 1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,0")
    assert sizes(resolved(auto, report(machine(4)))) == (2, 1)
    unknown = resolved(auto, report([], failure="nvidia-smi failed: no driver"))
    assert (sizes(unknown), "could not choose a layout: nvidia-smi failed" in unknown.why) == ((1, 1), True)
    given = RunConfig(model="m", tensor_parallel_size=2, data_parallel_size=3)
    assert resolved(given, report([])) == Layout(tensor_parallel_size=2, data_parallel_size=3)


@pytest.mark.parametrize("tp", ["auto", 1, 2])
def test_attention_by_rows_needs_ranks_that_share_it(shapes: Any, tp: int | Literal["auto"]) -> None:
    """Without them a run drafts as any other does."""
    model, _ = shapes("qwen3-0.6b")
    run = RunConfig(model="m", device="cpu", tensor_parallel_size=tp, enable_attention_dp=True)
    config = layout_as_given(run).apply(resolve_engine_config(run, Path("/m"), model))
    assert (config.enable_attention_dp, config.max_draft_tokens) == ((True, 0) if tp == 2 else (False, 7))


def test_on_a_cpu_auto_is_one(shapes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = shapes("qwen3-0.6b")
    run = RunConfig(model="m", device="cpu", tensor_parallel_size=2)
    config = resolve_engine_config(run, Path("/m"), model)
    monkeypatch.setattr("nvcli.core.system.nvidia_smi.ask_for_gpus", lambda: pytest.fail("nvidia-smi was asked"))
    assert resolve_layout(run, config, model) == Layout(tensor_parallel_size=2, data_parallel_size=1)


@pytest.mark.parametrize(
    ("shape", "count", "num_requests", "tokens_per_second"),
    [
        # Measured on H200s: scripts/results has some of them. Mean prompts and answers are about 560 tokens.
        ("qwen3-0.6b", 1, 256, 26_719),
        ("qwen3-0.6b", 1, 1024, 28_902),
        ("qwen3-8b", 1, 256, 9_601),
        ("qwen3-8b", 2, 512, 19_665),
        ("qwen3-8b", 4, 1024, 40_137),
        ("qwen3-32b", 2, 512, 5_947),
    ],
)
def test_the_time_of_a_job_is_near_what_was_measured(
    shapes: Any, shape: str, count: int, num_requests: int, tokens_per_second: float
) -> None:
    model, config = shapes(shape, max_model_len=4096)
    lengths = Lengths(prompt=560, computed=560, answer=560)
    layout = Layout(tensor_parallel_size=1, data_parallel_size=count)
    estimated = estimate_layout(layout, machine(count), model, config, num_requests=num_requests, lengths=lengths)
    assert estimated.seconds == pytest.approx(560 * num_requests / tokens_per_second, rel=0.2)


def test_long_and_cached_prompts_count_in_the_time_of_a_job(shapes: Any) -> None:
    model, config = shapes("qwen3-8b")
    layout = Layout(tensor_parallel_size=1, data_parallel_size=1)

    def seconds(prompt: float, computed: float) -> float:
        lengths = Lengths(prompt=prompt, computed=computed, answer=1)
        return estimate_layout(layout, machine(1), model, config, num_requests=1000, lengths=lengths).seconds

    assert seconds(1000, 1000) < 10 * seconds(1000, 100) * 1.01
    assert seconds(20_000, 20_000) > 1.3 * 10 * seconds(2000, 2000)  # attention grows with the square


def test_of_a_cache_with_states_their_share_is_told(shapes: Any) -> None:
    """Qwen3.5-35B-A3B keeps 61 MiB of each request, and an H200 has room for about 52 GiB beside its weights."""
    model, config = shapes("qwen3.5-35b-a3b", max_num_seqs=256)
    why = choose_layout(machine(1), model, config, num_requests=None).why
    assert "tokens a copy, of which the recurrent states of 256 requests take 31%" in why
    model, config = shapes("qwen3-8b")
    assert "recurrent" not in choose_layout(machine(1), model, config, num_requests=None).why
