"""A rank on a real GPU answers as transformers does, for every family, in graphs and eagerly."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from checkpoints import reference_model, write_tiny_model
from family_shapes import SHAPES
from one_rank import make_runner, run_requests
from requests_factory import make_request

MAX_TOKENS = 16
PROMPTS = [random.Random(length).choices(range(2, 97), k=length) for length in (1, 5, 17, 33, 40)]


def reference_answers(path: Path) -> list[list[int]]:
    """transformers' greedy answers, on the CPU."""
    model = reference_model(path)
    answers = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        found = model.generate(ids, attention_mask=mask, max_new_tokens=MAX_TOKENS, do_sample=False, eos_token_id=96)
        answers.append(found[0, len(prompt) :].tolist())
    return answers


def answers_of(path: Path, device: str, *, enforce_eager: bool) -> list[list[int]]:
    """Our answers, in float32; chunks, and decode rows beside them."""
    settings = {"max_model_len": 64, "max_num_batched_tokens": 24, "block_size": 16, "dtype": "float32"}
    runner = make_runner(path, device, enforce_eager=enforce_eager, **settings)
    requests = [make_request(i, prompt, MAX_TOKENS, stop_ids=[96]) for i, prompt in enumerate(PROMPTS)]
    found = run_requests(runner, requests)
    return [found[i] for i in range(len(PROMPTS))]


@pytest.mark.gpu
@pytest.mark.parametrize("name", SHAPES)
def test_answers_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    family, overrides = SHAPES[name]
    path = write_tiny_model(tmp_path / "model", family, **overrides)
    expected = reference_answers(path)
    for enforce_eager in (True, False):
        assert answers_of(path, "cuda", enforce_eager=enforce_eager) == expected
