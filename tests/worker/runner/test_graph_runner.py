"""Steps padded to the shape of a graph, on the CPU: the graphs' static inputs without the graphs."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import segment_answers
import torch
from launched_graphs import LaunchedGraphs

from checkpoints import write_tiny_model
from family_shapes import SHAPES
from nvcli.attention.forward_batch import BatchShape
from nvcli.core.messages import StepInput
from nvcli.core.sampling_params import SamplingParams
from nvcli.demo import demo_path
from nvcli.sizing.graph_sizes import decode_sizes, graph_sizes, may_share
from nvcli.worker.runner.graph_runner import GraphRunner, shapes_to_run
from nvcli.worker.runner.input_buffers import StepBatch
from nvcli.worker.runner.model_runner import ModelRunner
from one_rank import make_runner, run_requests
from requests_factory import make_request


@pytest.fixture(scope="module", params=["qwen 3", "qwen 3.5"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose layers all attend, and one with recurrent states."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    family, overrides = SHAPES.get(request.param, ("Qwen3", {}))
    return write_tiny_model(folder, family, **overrides)


def answers(runner: ModelRunner) -> dict[int, list[int]]:
    """Requests of all kinds that come and go, so that steps hold any number of decode rows, chunks and tokens."""
    rng = random.Random(3)
    kinds = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9, top_k=8, top_p=0.9),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, logprobs=1),
    ]
    requests = [
        make_request(
            i, [rng.randrange(2, 97) for _ in range(rng.randrange(1, 60))], rng.randrange(1, 12), sampling=kinds[i % 3]
        )
        for i in range(40)
    ]
    return run_requests(runner, requests)


def test_padded_steps_answer_like_exact_ones(path: Path) -> None:
    options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 6, "max_num_batched_tokens": 70, "block_size": 4}
    runner = make_runner(path, **options)
    expected = answers(runner)
    shapes = [
        BatchShape(decode_rows=d, prefill_rows=p, prefill_tokens=t)
        for d, p, t in graph_sizes(
            max_num_seqs=6, max_num_decodes=6, max_num_batched_tokens=70, launch_bound_tokens=1000
        )
    ]
    padded = make_runner(path, **options)
    graphs = LaunchedGraphs(shapes, padded.steps)
    padded.steps.graphs = graphs
    assert answers(padded) == expected
    run = graphs.replayed
    assert {(shape.decode_rows > 0, shape.prefill_rows > 0) for shape in run} == {(True, True), (True, False)}
    assert len(run) > 10
    # Padding leaves every block but the null block alone, which stays finite.
    blocks_dim = 2 if runner.kv_cache.spec.is_uniform else 0
    found, expected_blocks = (one.kv_cache.data.movedim(blocks_dim, 0) for one in (padded, runner))
    torch.testing.assert_close(found[1:], expected_blocks[1:], atol=1e-4, rtol=1e-4)
    assert found[0].isfinite().all()


def test_padded_steps_whose_chunks_share_prefixes() -> None:
    """With decode rows before them, and rows of padding between and behind."""
    options: dict[str, Any] = {"device": "cpu", "max_num_seqs": 12, "block_size": 16, "max_model_len": 256}
    prompts = [[5] * 96 + [i] * (1 + i % 7) for i in range(40)]
    runner = make_runner(demo_path(), **options)
    expected, _, _ = segment_answers.answers(runner, prompts, 3, num_blocks=100, costs=None)
    graphs = LaunchedGraphs(
        [
            BatchShape(decode_rows=12, prefill_rows=rows, prefill_tokens=tokens, shares_prefixes=shares)
            for rows, tokens in ((6, 40), (12, 300))
            for shares in (False, True)
        ],
        runner.steps,
    )
    graphs.captured += graphs.shapes
    runner.steps.graphs = graphs
    found, num_steps, _ = segment_answers.answers(
        runner, prompts, 3, num_blocks=100, costs=None, prefix_costs=segment_answers.EAGER_PREFIX_COSTS
    )
    assert found == expected
    assert num_steps == sum(shape.shares_prefixes for shape in graphs.replayed) > 3


def test_steps_that_share_segments_have_graphs_of_their_own(tmp_path: Path) -> None:
    """They are captured when a step first needs one. A capture stages no rows of its own: those of steps in flight may
    not have been read yet."""
    path = write_tiny_model(tmp_path / "model", "Qwen3")
    prompts = segment_answers.prompts_of_a_tree(random.Random(4), 16, 97, lengths=(8, 20))
    runner = make_runner(
        path, "cpu", max_num_seqs=6, max_model_len=128, block_size=4, max_num_batched_tokens=70, kv_cache_memory=1 << 22
    )
    num_blocks = runner.ready.num_blocks
    expected, _, _ = segment_answers.answers(runner, prompts, 8, num_blocks=num_blocks, costs=None)
    plain = [
        BatchShape(decode_rows=d, prefill_rows=p, prefill_tokens=t)
        for d, p, t in graph_sizes(max_num_seqs=6, max_num_decodes=6, max_num_batched_tokens=70, launch_bound_tokens=0)
    ]
    shared = [replace(shape, shares_segments=True) for shape in plain if may_share(shape.decode_rows, 6)]
    graphs = LaunchedGraphs(plain + shared, runner.steps)
    graphs.captured += plain
    runner.steps.graphs = graphs
    staged, stage = [], runner.steps._buffers.stage

    def counted(step: StepInput, batch: StepBatch, *of_drafts: np.ndarray | None) -> StepBatch:
        staged.append(step.step_id)
        return stage(step, batch, *of_drafts)

    runner.steps._buffers.stage = counted  # type: ignore[method-assign]
    found, num_steps, _ = segment_answers.answers(
        runner, prompts, 8, num_blocks=num_blocks, costs=segment_answers.EAGER_COSTS
    )
    assert found == expected
    assert num_steps > 5
    late = graphs.captured[len(plain) :]
    assert {shape.prefill_rows > 0 for shape in late} == {True, False}
    assert set(late) == {shape for shape in graphs.replayed if shape.shares_segments}
    assert len(set(late)) == len(late)
    assert len(set(staged)) == len(staged)


class FakeCuda:
    """What torch does with graphs and streams, noted."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
        self.calls.append(f"capture {capture_error_mode}")

    def capture_end(self) -> None:
        self.calls.append("end")

    def wait_stream(self, stream: object) -> None:
        self.calls.append("wait for a stream")

    def synchronize(self) -> None:
        self.calls.append("wait for the device")


def test_a_late_capture_takes_the_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the start a step runs before it is captured. In a run it does not: the device would work for nothing, behind
    the steps that were launched, and the next step would wait for it."""
    cuda = FakeCuda()
    for name in ("CUDAGraph", "Stream", "graph_pool_handle", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: cuda)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", cuda.synchronize)
    first, second = BatchShape(decode_rows=2), BatchShape(decode_rows=2, shares_segments=True)

    def run(shape: BatchShape) -> Any:
        cuda.calls.append(f"run {shape.shares_segments}")
        return shape

    graphs = GraphRunner[Any]([first, second], run, prepare=lambda shape: cuda.calls.append("prepare"))
    graphs.capture([first])
    assert cuda.calls == [
        "prepare", "wait for a stream", "run False", "wait for a stream", "capture thread_local", "run False", "end",
        "wait for the device",
    ]  # fmt: skip
    assert graphs.has_captured(first)
    assert not graphs.has_captured(second)
    cuda.calls.clear()
    graphs.capture_late(second)
    assert cuda.calls == ["capture relaxed", "run True", "end"]
    assert graphs.has_captured(second)


def test_a_step_takes_the_shape_with_the_fewest_tokens() -> None:
    shapes = [
        BatchShape(decode_rows=8, prefill_rows=4, prefill_tokens=64),
        BatchShape(decode_rows=2, prefill_rows=4, prefill_tokens=64),
        BatchShape(decode_rows=8),
        BatchShape(decode_rows=2),
    ]
    graphs = GraphRunner[Any](shapes, lambda shape: None)

    def chosen(decodes: int, chunks: int = 0, tokens: int = 0) -> BatchShape | None:
        return graphs.padded_shape(BatchShape(decode_rows=decodes, prefill_rows=chunks, prefill_tokens=tokens))

    assert chosen(1) == shapes[3]
    assert chosen(3) == shapes[2]
    assert chosen(0, 1, 10) == shapes[1]
    assert chosen(3, 4, 64) == shapes[0]
    assert chosen(9) is None
    assert chosen(1, 5, 10) is None
    assert chosen(1, 1, 65) is None
    assert graphs.padded_shape(BatchShape(decode_rows=1, tokens_per_row=2)) is None


def test_a_head_takes_in_prompts_in_vain_rather_than_a_graph_is_captured() -> None:
    """Until that has cost about as much."""
    plain = BatchShape(decode_rows=2, prefill_rows=4, prefill_tokens=64)
    extended = replace(plain, extends_drafts=True)
    graphs = GraphRunner[Any]([extended, plain], lambda shape: None)
    graphs._graphs[extended] = Mock()
    found = [graphs.padded_shape(plain) for _ in range(70)]
    assert set(found[:60]) == {extended}
    assert found[-1] == plain
    graphs._graphs[plain] = Mock()
    assert graphs.padded_shape(plain) == plain
    assert graphs.padded_shape(extended) == extended


def test_a_graph_for_more_rows_serves_rather_than_another_is_captured() -> None:
    """Until that has cost about as much, for the drafts of a head."""

    def shape(rows: int, width: int = 2) -> BatchShape:
        return BatchShape(decode_rows=rows, tokens_per_row=width, extends_drafts=True)

    graphs = GraphRunner[Any](
        [shape(rows, width) for width in (2, 4) for rows in (256, 128, 96, 48)], lambda shape: None
    )
    graphs._graphs[shape(128)] = graphs._graphs[shape(256)] = Mock()
    found = [graphs.padded_shape(shape(90)) for _ in range(70)]
    assert set(found[:60]) == {shape(128)}
    assert found[-1] == shape(96)
    assert graphs.padded_shape(shape(40)) == shape(48), "far fewer rows"
    assert graphs.padded_shape(shape(90, 4)) == shape(96, 4), "others have fewer drafts"


def test_a_step_whose_rows_have_different_numbers_of_drafts_takes_the_shape_that_has_room_for_its_padding() -> None:
    even, few, many = (
        BatchShape(decode_rows=8, tokens_per_row=4),
        BatchShape(decode_rows=8, tokens_per_row=4, uneven_tokens=12),
        BatchShape(decode_rows=16, tokens_per_row=4, uneven_tokens=24),
    )
    graphs = GraphRunner[Any]([even, few, many], lambda shape: None)

    def chosen(rows: int, tokens: int, most: int = 4) -> BatchShape | None:
        return graphs.padded_shape(BatchShape(decode_rows=rows, tokens_per_row=most, uneven_tokens=tokens))

    assert chosen(8, 12) == few
    assert chosen(7, 8, most=2) == few
    assert chosen(8, 11) == many, "no row for the padding"
    assert chosen(7, 7) == many, "one row for 5 tokens of padding"
    assert chosen(9, 20) == many
    assert chosen(15, 19) is None
    assert chosen(8, 25) is None
    assert chosen(4, 9, most=5) is None
    assert graphs.padded_shape(BatchShape(decode_rows=5, tokens_per_row=4)) == even


@pytest.mark.parametrize("most", [1, 3, 8, 21, 64, 100, 256, 1000])
def test_decode_sizes_reach_the_most_rows_and_pad_by_a_quarter_at_most(most: int) -> None:
    sizes = decode_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    assert all(after <= 1.25 * before + 8 for before, after in itertools.pairwise(sizes))


def test_sizes_with_prompts_fit_the_limits() -> None:
    for tokens, seqs, bound in (
        (8192, 256, 11_000),
        (8192, 1024, 900),
        (400, 100, 900),
        (1, 1, 10),
        (2048, 256, 100_000),
    ):
        sizes = graph_sizes(
            max_num_seqs=seqs, max_num_decodes=seqs, max_num_batched_tokens=tokens, launch_bound_tokens=bound
        )
        assert len(set(sizes)) == len(sizes)
        assert [d + t for d, _, t in sizes] == sorted((d + t for d, _, t in sizes), reverse=True)
        with_prompts = [(d, p, t) for d, p, t in sizes if t]
        assert all(d <= seqs and 1 <= p <= seqs and t <= tokens for d, p, t in with_prompts)
        if bound >= tokens > 1:  # a step as large as may be has a graph, however many of its rows decode
            assert all(any(d >= n and t >= tokens - n for d, _, t in with_prompts) for n in range(1, seqs + 1))


def test_jobs_of_few_requests_capture_few_sizes() -> None:
    """Graphs of steps with prompts take time to capture: one request needs none, a few need no large ones."""

    def largest_prefill(seqs: int) -> int:
        return max(
            t
            for _, _, t in graph_sizes(
                max_num_seqs=seqs, max_num_decodes=seqs, max_num_batched_tokens=8192, launch_bound_tokens=11_000
            )
        )

    assert [largest_prefill(n) for n in (1, 2, 63, 64)] == [0, 2048, 2048, 8192]


def test_one_shape_of_each_range_of_tokens_runs_before_its_capture() -> None:
    decode = [BatchShape(decode_rows=rows) for rows in (64, 56, 40, 33, 32, 24, 8, 4, 2, 1)]
    mixed = [BatchShape(decode_rows=64, prefill_rows=8, prefill_tokens=tokens) for tokens in (512, 448, 256, 64)]
    found = shapes_to_run(mixed + decode)
    assert [shape.decode_rows for shape in decode if shape in found] == [64, 32, 8, 4, 2, 1]
    assert [shape.prefill_tokens for shape in mixed if shape in found] == [512, 448, 64]
