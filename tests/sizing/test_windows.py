"""What windows save is counted: blocks that a request holds, memory plans, and what attention reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkpoints import tiny_model_config
from fake_runners import engine_config
from nvcli.core.messages import EngineReady, ForwardMode
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.core import EngineCore
from nvcli.engine.engine_process import scheduler_limits
from nvcli.engine.request import StepRecord
from nvcli.engine.scheduler import Scheduler
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.models.kv_groups import kv_groups
from nvcli.models.mixers.mixer import MixerCosts
from nvcli.sizing.costs import model_costs
from nvcli.sizing.kv_cache import block_bytes, blocks_held, blocks_of_request, max_blocks, tokens_in
from nvcli.sizing.memory import estimate
from nvcli.tools.bench.roofline import work_of
from nvcli.tools.bench.shapes import write_shape
from requests_factory import make_request
from scheduler_engine import InstantExecutor

LENGTH, BLOCK_SIZE, WINDOW = 256, 8, 32


def model_of(folder: Path, **keys: Any) -> ModelConfig:
    """Four layers; KV heads 2 × 16."""
    folder.mkdir(exist_ok=True)
    values = {"architectures": ["Qwen3ForCausalLM"], **tiny_model_config(num_hidden_layers=4), **keys}
    (folder / "config.json").write_text(json.dumps(values))
    return load_model_config(folder)


@pytest.fixture
def full(tmp_path: Path) -> ModelConfig:
    return model_of(tmp_path)


@pytest.fixture
def mixed(tmp_path: Path) -> ModelConfig:
    """Two layers of full attention, then two with a window."""
    return model_of(tmp_path, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2)


CONFIG = engine_config(
    max_model_len=LENGTH, block_size=BLOCK_SIZE, max_num_seqs=10, max_num_batched_tokens=64, dtype="float32"
)


def test_blocks_of_requests(full: ModelConfig, mixed: ModelConfig) -> None:
    assert blocks_of_request(CONFIG, full, LENGTH) == 32
    seen = -(-(WINDOW - 1) // BLOCK_SIZE) + 1
    assert blocks_of_request(CONFIG, mixed, LENGTH) == 32 + seen == 37
    assert block_bytes(CONFIG, mixed) * 2 == block_bytes(CONFIG, full)
    of_a_step = 64 // BLOCK_SIZE
    assert (max_blocks(CONFIG, full), max_blocks(CONFIG, mixed)) == (321, 371 + of_a_step)
    alone = msgspec.structs.replace(CONFIG, max_num_seqs=1, max_num_batched_tokens=4096)
    assert max_blocks(alone, mixed) == 1 + 32 + 32, "a step of many tokens has no more of them than the request"
    assert blocks_held(CONFIG, full, 2.5) == 2.5
    assert blocks_held(CONFIG, full, 0.5) == 1.0
    assert blocks_held(CONFIG, mixed, 32) == 37


def test_a_cache_holds_more_tokens_where_there_are_windows(full: ModelConfig, mixed: ModelConfig) -> None:
    room = 101 * block_bytes(CONFIG, full)
    assert tokens_in(room, CONFIG, full) == 100 * BLOCK_SIZE
    assert tokens_in(room, CONFIG, mixed) == 201 * LENGTH // 37
    assert tokens_in(1 << 40, CONFIG, full) == tokens_in(1 << 40, CONFIG, mixed) == 10 * LENGTH
    assert tokens_in(-5, CONFIG, full) == 0


def test_a_plan_takes_no_more_blocks_than_there_is_a_use_for(full: ModelConfig, mixed: ModelConfig) -> None:
    plans = [estimate(CONFIG, model, 80 << 30) for model in (full, mixed)]
    assert plans[0].planned["KV cache"] == 321 * block_bytes(CONFIG, full)
    assert plans[1].planned["KV cache"] == 379 * block_bytes(CONFIG, mixed)
    assert plans[1].planned["buffers"] > plans[0].planned["buffers"], "block tables for each group"


def test_gemma_3_at_32k_tokens_holds_a_fifth_of_what_full_attention_would(tmp_path: Path) -> None:
    """In the plan, and in the pool when a request has come so far. 10 of its 62 layers attend to all tokens."""
    model = load_model_config(write_shape("gemma-3-27b", tmp_path))
    config = engine_config(
        max_model_len=32768, block_size=64, max_num_seqs=64, max_num_batched_tokens=8192, dtype="bfloat16"
    )
    full_bytes = 62 * 32768 * 2 * 16 * 128 * 2
    held = blocks_of_request(config, model, 32768)
    assert 0.187 < 10 / 62 + 52 / 62 * 1024 / 32768 < held * block_bytes(config, model) / full_bytes < 0.195
    room = 80 << 30
    assert 5.0 < tokens_in(room, config, model) / (room / full_bytes * 32768) < 5.3

    ready = EngineReady(
        num_blocks=held,
        block_size=config.block_size,
        kv_cache_bytes=0,
        kv_cache_tokens=0,
        weight_bytes=0,
        attention_backend="",
        kv_groups=list(kv_groups(model)),
        seconds={},
    )
    scheduler = Scheduler(scheduler_limits(config, ready), BlockManager(held))
    core = EngineCore(scheduler, InstantExecutor(), max_in_flight=2)
    core.scheduler.add([make_request(0, [6] * 32000, 768)])
    most = 0
    while core.has_work:
        core.step()
        most = max(most, scheduler.block_manager.num_used) if core.scheduler.stats.generated_tokens else 0
    assert core.scheduler.stats.generated_tokens == 768, "what the plan says is enough"
    assert held - len(kv_groups(model)) <= most <= held, "and it is needed"


def test_attention_reads_the_window_alone(mixed: ModelConfig) -> None:
    costs = model_costs(mixed, "float32")
    token_bytes, pair_flops = 2 * 2 * 2 * 16 * 4, 2 * 4 * 4 * 16  # of two layers
    assert costs.mixers == (
        MixerCosts(window=None, kv_bytes_per_token=token_bytes, flops_per_pair=pair_flops),
        MixerCosts(window=WINDOW, kv_bytes_per_token=token_bytes, flops_per_pair=pair_flops),
    )
    assert costs.kv_read_bytes(20) == 2 * 20 * token_bytes
    assert costs.kv_read_bytes(100) == (100 + WINDOW) * token_bytes
    step = StepRecord(
        mode=ForwardMode.MIXED,
        num_decodes=3,
        num_prefill_tokens=4,
        num_sampled=3,
        decode_keys=300,
        prefill_keys=104,
        prefill_pairs=410,
    )
    work = work_of(step, costs)
    assert work["decode attention"].flops == (300 + 3 * WINDOW) * pair_flops
    assert work["decode attention"].num_bytes == (303 + 3 * WINDOW + 3) * token_bytes
    assert work["prompt attention"].flops == (410 + 4 * WINDOW) * pair_flops
