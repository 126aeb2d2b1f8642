"""Steps whose graphs are in two parts, because masks come between them: every answer is what it is in one part."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from late_masks import use_late_masks
from launched_graphs import LaunchedGraphs

from constrained_requests import found_in, load_vocabulary, make_requests
from late_worker import LateMasks
from nvcli.attention.forward_batch import BatchShape
from nvcli.demo import demo_path
from nvcli.engine.request import Request
from nvcli.worker.runner import masked_choice
from nvcli.worker.runner.masked_choice import MaskedChoice
from one_rank import make_core, make_runner, run_core

CONFIG: dict[str, Any] = {"max_model_len": 400, "block_size": 4, "kv_cache_memory": 64 << 20, "max_num_seqs": 12}


def asks_for_no_more(request: Request) -> bool:
    """Whether a request asks for no more than a mask, temperatures and limits."""
    sampling = request.sampling
    return sampling.logprobs is None and sampling.presence_penalty == 0 and sampling.min_tokens == 0


def test_answers_are_the_same_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows that are held, rows without constraints, and rows that ask for more than masks."""
    requests = make_requests(load_vocabulary())
    others = [each for each in requests if not asks_for_no_more(each)]
    requests = [*others[:4], *filter(asks_for_no_more, requests)]
    shapes = [
        BatchShape(decode_rows=decodes, prefill_rows=chunks, prefill_tokens=64 * chunks)
        for decodes in (2, 4, 8, 12)
        for chunks in (0, 1)
    ]

    def answer(*, is_split: bool) -> tuple[dict[int, Any], LaunchedGraphs]:
        monkeypatch.setattr(masked_choice, "_STEPS_BEFORE", 1 if is_split else 100_000)
        runner = make_runner(demo_path(), "cpu", **CONFIG)
        graphs = LaunchedGraphs(shapes, runner.steps)
        graphs.captured += shapes
        runner.steps.graphs = graphs
        return found_in(run_core(make_core(runner), requests)), graphs

    num_chosen = 0
    choose = MaskedChoice._choose_in_second_graph

    def counted(self: MaskedChoice, *arguments: Any) -> Any:
        nonlocal num_chosen
        num_chosen += 1
        return choose(self, *arguments)

    monkeypatch.setattr(MaskedChoice, "_choose_in_second_graph", counted)
    expected, graphs = answer(is_split=False)
    assert not num_chosen
    assert graphs.captured == shapes
    late = use_late_masks(monkeypatch, LateMasks(share=0.2, seconds=0.02))
    found, graphs = answer(is_split=True)
    assert found == expected
    assert late.num_held > 5
    assert num_chosen > 12
    anew = graphs.captured[len(shapes) :]
    assert len(anew) > 1
    assert len(set(anew)) == len(anew)


def test_a_shape_stays_in_one_part_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [each for each in make_requests(load_vocabulary()) if asks_for_no_more(each)][:6]
    shape = BatchShape(decode_rows=8, prefill_rows=1, prefill_tokens=48)
    tries = 0

    def fail(*arguments: Any) -> None:
        nonlocal tries
        tries += 1
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 MiB")

    add = MaskedChoice._add

    def add_and_fail(*arguments: Any) -> None:
        add(*arguments)
        fail()

    def answer() -> dict[int, Any]:
        runner = make_runner(demo_path(), "cpu", **CONFIG)
        graphs = LaunchedGraphs([shape], runner.steps)
        graphs.captured.append(shape)
        runner.steps.graphs = graphs
        return found_in(run_core(make_core(runner), requests))

    expected = answer()
    monkeypatch.setattr(masked_choice, "_STEPS_BEFORE", 1)
    for owner, name, failing in ((LaunchedGraphs, "capture_late", fail), (MaskedChoice, "_add", add_and_fail)):
        tries = 0
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, failing)
            patch.delattr(MaskedChoice, "_choose_in_second_graph")
            assert answer() == expected
        assert tries == 1
