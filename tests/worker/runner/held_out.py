"""Questions that neither the built-in model nor what drafts for it was trained on, and their answers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

import demo_tasks
from nvcli.core.sampling_params import SamplingParams
from nvcli.demo import demo_path
from nvcli.engine.request import EngineStats, Request, RequestOutput
from one_rank import make_core, make_runner, make_scheduler, run_core
from requests_factory import make_request


def answer(
    requests: list[Request], head: Path | None, num_blocks: int | None = None, device: str = "cpu", **config: Any
) -> tuple[dict[int, RequestOutput], EngineStats]:
    """Answer requests by one rank in this process, without a head or with as many drafts as it gives."""
    own: dict[str, Any] = {"block_size": 16, "kv_cache_memory": 128 << 20, "max_num_seqs": 16, "max_model_len": 1024}
    if head is not None:
        own |= {"draft_head": str(head), "draft_policy": "always", "max_draft_tokens": 4}
    runner = make_runner(demo_path(), device, **{**own, **config})
    core = make_core(runner, make_scheduler(runner, num_blocks))
    return run_core(core, requests), core.scheduler.stats


def held_out_questions(temperature: float, first_id: int = 0) -> list[Request]:
    """Return questions of every task, whose answers end at either end token."""
    rng = random.Random("held out")
    tokenizer = Tokenizer.from_file(str(demo_path() / "tokenizer.json"))
    prompts = [demo_tasks.raw_prompt(demo_tasks.sample(rng, task, "heldout")) for task in demo_tasks.TASKS * 2]
    sampling = SamplingParams(temperature=temperature)
    return [
        make_request(number, tokenizer.encode(prompt).ids, 420, stop_ids=[0, 2], sampling=sampling)
        for number, prompt in enumerate(prompts, first_id)
    ]
