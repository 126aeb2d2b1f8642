"""Answers with drafts by a head of the model are those without: every way to choose a token, structured answers, with
little room, in chunks, behind shared prefixes, in graphs, and by two ranks."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from generation import generate
from launched_graphs import LaunchedGraphs
from mixed_requests import assert_equal, mixed_requests, samples_of
from torch import Tensor

from batches import RequestState, make_batch
from checkpoints import edit_weights, write_tiny_model
from combinations import full
from family_shapes import SHAPES
from model_driver import ModelDriver
from mtp_heads import add_mtp_head
from nvcli.attention.forward_batch import BatchShape
from nvcli.core.messages import DRAFT_SOURCES, unpack
from nvcli.demo import demo_path
from nvcli.engine.request import EngineStats, RequestOutput
from nvcli.models.config import load_model_config
from nvcli.worker.runner.input_buffers import StepBatch
from nvcli.worker.runner.model_drafter import ModelDrafter
from one_rank import make_core, make_runner, make_scheduler, run_core
from rank_in_process import draw_widths
from requests_factory import make_request

NARROW = {"max_num_batched_tokens": 18, "max_num_seqs": 3}
HEAD = DRAFT_SOURCES.index("head")
DRAFTS: dict[str, Any] = {"draft_policy": "always", "max_draft_tokens": 4, "draft_head": "mtp"}
AUTO: dict[str, Any] = {"max_draft_tokens": 2, "draft_policy": "auto"}
REQUESTS = samples_of(mixed_requests(16))


def write_checkpoint(path: Path, name: str, **settings: Any) -> Path:
    """Write a tiny model with a head, and with the vocabulary of the built-in model."""
    family, overrides = SHAPES[name]
    vocab_size = json.loads((demo_path() / "config.json").read_text())["vocab_size"]
    write_tiny_model(path, family, **{**overrides, "vocab_size": vocab_size, **settings})
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_path() / file, path)
    return add_mtp_head(path)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with recurrent states and experts."""
    return write_checkpoint(tmp_path_factory.mktemp("heads") / "model", "qwen 3.5 mixture of experts")


def run_here(
    path: Path,
    num_blocks: int | None = None,
    *,
    draws: bool = False,
    shapes: list[BatchShape] | None = None,
    device: str = "cpu",
    **config: Any,
) -> tuple[dict[int, RequestOutput], EngineStats]:
    """Answer the requests by one rank in this process. `draws`: each row has a number of tokens drawn anew in each
    step. `shapes`: of graphs, which are launched rather than captured."""
    own = {"max_model_len": 160, "block_size": 4, "kv_cache_memory": 64 << 20, "max_num_batched_tokens": 64}
    runner = make_runner(path, device, dtype="float32", **{**own, **config})
    scheduler = make_scheduler(runner, num_blocks)
    if shapes is not None:
        graphs = LaunchedGraphs(shapes, runner.steps)
        graphs.captured += shapes
        runner.steps.graphs = graphs
    if draws:
        draw_widths(scheduler, random.Random(1))
    core = make_core(runner, scheduler)
    return run_core(core, REQUESTS), core.scheduler.stats


@pytest.fixture(scope="module")
def expected(hybrid: Path) -> dict[int, RequestOutput]:
    return run_here(hybrid)[0]


GRAPHS = [
    *(BatchShape(decode_rows=8, tokens_per_row=width, extends_drafts=True) for width in (2, 3, 5)),
    BatchShape(decode_rows=8, prefill_rows=8, prefill_tokens=32, extends_drafts=True),
]


@pytest.mark.parametrize(
    ("config", "num_blocks"),
    [
        full(({}, None), in_parts=True),
        ({"max_num_seqs": 12, "draws": True}, 64),
        ({**AUTO, "max_num_batched_tokens": 9, "max_num_seqs": 7}, None),
        ({"shapes": GRAPHS}, None),
    ],
    ids=["plain", "few blocks", "auto, short chunks", "graphs"],
)
def test_answers_are_those_without_drafts(
    hybrid: Path, expected: dict[int, RequestOutput], config: dict[str, Any], num_blocks: int | None
) -> None:
    found, stats = run_here(hybrid, num_blocks, **{**DRAFTS, **config})
    assert_equal(found, expected)
    assert stats.drafted[HEAD] > 0
    if num_blocks is not None:
        assert stats.num_preemptions > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen 3-next", "qwen 3.5 mixture of experts", "deepseek v3", "glm 5, shared choices"])
@pytest.mark.parametrize("config", [{}, {"enforce_eager": True, "max_num_seqs": 24, "draws": True}, AUTO])
@pytest.mark.usefixtures("memory_is_given_back")
def test_answers_on_a_gpu(name: str, config: dict[str, Any], tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    path = write_checkpoint(tmp_path / "model", name)
    settings = {"device": "cuda", "block_size": 16, "max_num_batched_tokens": 256}
    expected, _ = run_here(path, **settings)
    found, stats = run_here(path, **{**settings, **DRAFTS, **config})
    assert_equal(found, expected)
    assert stats.drafted[HEAD] > 0


def test_two_ranks_draft_alike(hybrid: Path, expected: dict[int, RequestOutput]) -> None:
    settings = {"tensor_parallel_size": 2, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    short = [request for request in REQUESTS if 1 < request.max_tokens < 10]
    found, stats = generate(hybrid, short, **DRAFTS, **settings)
    assert_equal(found, {number: expected[number] for number in found})
    assert stats.drafted[HEAD] > 0


def test_a_head_that_knows_the_model_is_always_right(tmp_path: Path) -> None:
    """Both predict from the last token alone, so all drafts are right, sampled ones too: they take the noise that the
    model will take."""
    path = write_checkpoint(tmp_path / "model", "glm 4.5")

    def simplify(weights: dict[str, Tensor]) -> None:
        layer = f"model.layers.{load_model_config(path).num_layers}."
        for name, weight in weights.items():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        eye = torch.eye(weights["model.norm.weight"].shape[0])
        weights[f"{layer}eh_proj.weight"] = torch.cat([eye, 0 * eye], dim=1)
        weights[f"{layer}enorm.weight"].fill_(1.0)
        weights[f"{layer}shared_head.norm.weight"] = weights["model.norm.weight"].clone()

    edit_weights(path, simplify)
    expected, _ = run_here(path)
    found, stats = run_here(path, 34, **DRAFTS)
    assert_equal(found, expected)
    assert stats.num_preemptions > 0
    assert stats.accepted[HEAD] > 0.5 * stats.drafted[HEAD], "those behind an answer's end are in vain"
    assert stats.decode_rows < 0.5 * sum(len(output.token_ids) // 4 for output in found.values())


def test_guesses_are_those_of_the_head_over_the_whole_text(hybrid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys and states stand where they belong after prompts in chunks, wrong drafts and steps of others."""
    guesses: list[tuple[int, int]] = []
    extend = ModelDrafter.extend

    def record(drafter: ModelDrafter, batch: StepBatch, states: Tensor) -> None:
        extend(drafter, batch, states)
        kept = drafter._kept
        guesses.append((int(kept.positions[0]), int(kept.tokens[0])))

    monkeypatch.setattr(ModelDrafter, "extend", record)
    runner = make_runner(hybrid, "cpu", max_model_len=160, block_size=4, kv_cache_memory=64 << 20, **NARROW, **DRAFTS)
    prompts = [random.Random(number).choices(range(600), k=21) for number in range(3)]
    made = [make_request(number, prompt, 40) for number, prompt in enumerate(prompts)]
    answers = run_core(make_core(runner, make_scheduler(runner)), made)
    text = [*prompts[0], *unpack(answers[0].token_ids)]
    driver, request = ModelDriver(hybrid, has_mtp=True), RequestState()
    head = driver.model.draft_head
    assert head is not None
    batch = make_batch([(request, text[:-1])], driver.kv_cache, driver.backend, driver.blocks)
    with torch.inference_mode():
        hidden, _ = head(torch.tensor(text[1:]), driver.model.forward_with_states(batch)[1], batch, None)
        expected = head.compute_logits(hidden).argmax(-1).tolist()
    of_answer = {position: token for position, token in guesses if position > len(prompts[0])}
    assert len(of_answer) > 20
    assert all(expected[position - 2] == token for position, token in of_answer.items() if position < len(text) + 1)
