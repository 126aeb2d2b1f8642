"""What serves requests finds its kernels compiled: the warm-up launches every variant of those that attend."""

from __future__ import annotations

import os
import random
from inspect import signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from segment_answers import EAGER_COSTS, EAGER_PREFIX_COSTS, answers, prompts_of_a_tree

from checkpoints import write_tiny_model
from fake_runners import engine_config
from kernel_device import HAS_GPU, INTERPRETED_MARKS
from nvcli.attention.torch_backend import TorchBackend
from nvcli.attention.triton_backend import TritonBackend
from nvcli.core.messages import unpack
from nvcli.worker.runner.warm_up import WarmUp
from one_rank import make_runner

pytestmark = [
    *INTERPRETED_MARKS,
    pytest.mark.skipif(HAS_GPU, reason="test_segments_gpu.py has it with compiled kernels"),
]

Variant = tuple[str, *tuple[object, ...]]


def variant(kernel: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Variant:
    """What Triton compiles a launch for: constants, options, types, and whether numbers and addresses are aligned."""
    plain = set(kernel.kwargs["do_not_specialize"] or ())
    unaligned = plain | set(kernel.kwargs["do_not_specialize_on_alignment"] or ())

    def what(name: str, value: object) -> object:
        if isinstance(value, torch.Tensor):
            return value.dtype, name in unaligned or value.data_ptr() % 16 == 0
        if isinstance(value, int) and name not in plain:
            return value == 1, name in unaligned or value % 16 == 0
        return value if value is None else type(value)

    constants = {name for name, one in signature(kernel.fn).parameters.items() if "constexpr" in str(one.annotation)}
    given = list(zip(kernel.arg_names, arguments, strict=False))
    values = (what(name, value) for name, value in given if name not in constants)
    named = keywords | {name: value for name, value in given if name in constants}
    return kernel.__name__, *values, *sorted(named.items())


@pytest.fixture
def variants(monkeypatch: pytest.MonkeyPatch) -> set[Variant]:
    """The variants of interpreted kernels that are launched from here on."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    from triton.runtime.interpreter import InterpretedFunction

    found: set[Variant] = set()
    run = InterpretedFunction.run

    def recorded(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **keywords: Any) -> None:
        found.add(variant(kernel, arguments, keywords))
        run(kernel, *arguments, grid=grid, warmup=warmup, **keywords)

    monkeypatch.setattr(InterpretedFunction, "run", recorded)
    return found


def test_a_job_with_shared_segments_launches_nothing_that_is_new(
    variants: set[Variant], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In eager decode and mixed steps, with more rows and with fewer than a launch for few rows has."""
    monkeypatch.setattr(TritonBackend, "unsupported", lambda case: [])
    path = write_tiny_model(tmp_path / "model", head_dim=64, num_hidden_layers=1)
    runner = make_runner(
        path, "cpu", attention_backend="triton", max_num_seqs=9, max_model_len=64, block_size=16,
        max_num_batched_tokens=64, kv_cache_memory=1 << 22,
    )  # fmt: skip
    variants.clear()
    runner.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    runner._run_largest_batches()
    warmed_up = set(variants)
    variants.clear()
    prompts = prompts_of_a_tree(random.Random(1), 10, 97, lengths=(16,))
    _, num_steps, _ = answers(runner, prompts, 3, num_blocks=runner.ready.num_blocks, costs=EAGER_COSTS)
    assert num_steps > 3
    assert {name for name, *_ in variants} >= {"segment_attention_kernel", "find_segments_kernel"}
    # Suffixes behind shared prefixes, in prefill.
    prompts = [prompts[0][:16] + [3 + number] * (1 + number % 3) for number in range(18)]
    _, num_steps, _ = answers(
        runner, prompts, 1, num_blocks=runner.ready.num_blocks, costs=None, prefix_costs=EAGER_PREFIX_COSTS
    )
    assert num_steps > 1
    for part in "IS_PREFIX", "IS_REST":
        assert any((part, True) in found for found in variants)
    # None stands where a launch reads no segments; those of few rows are met when graphs are captured.
    assert {found for found in variants if None not in found} <= warmed_up


def test_shared_prefixes_are_warmed_up_where_another_backend_decodes(
    variants: set[Variant], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One that reads no segments, as FlashAttention."""
    monkeypatch.setattr(TritonBackend, "unsupported", lambda case: [])
    monkeypatch.setattr(TorchBackend, "reads_segments", False)
    path = write_tiny_model(tmp_path / "model", num_hidden_layers=1)
    runner = make_runner(
        path, "cpu", attention_backend="triton:torch", max_num_seqs=2, max_model_len=32, block_size=16,
        max_num_batched_tokens=16, kv_cache_memory=1 << 22,
    )  # fmt: skip
    assert runner.ready.prefix_tile_tokens > 0
    variants.clear()
    runner.device = SimpleNamespace(type="cuda")  # type: ignore[assignment]
    runner._run_largest_batches()
    for part in "IS_PREFIX", "IS_REST":
        assert any((part, True) in found for found in variants)


def test_fp8_products_of_a_middling_number_of_rows_are_met() -> None:
    def sizes(**keys: Any) -> list[int]:
        config = engine_config(max_model_len=4096, **keys)
        return [sum(unpack(step.num_tokens)) for step in WarmUp(config=config, num_tokens=8192, num_seqs=4).steps()]

    assert sizes() == [8192, 512, 4]
    assert sizes(quantization="fp8") == [8192, 4096, 512, 4]
    assert sizes(quantization="fp8", enforce_eager=True)[:6] == [8192, 4096, 2048, 1024, 256, 512], "no graph has them"


def test_chunks_that_choose_keys_are_met() -> None:
    """Beside those that see few keys, and with as many tokens."""
    config = engine_config(max_model_len=4096)
    warm_up = WarmUp(config=config, num_tokens=512, num_seqs=4, projects_latents=True, chooses_keys=True)
    found = [(sum(unpack(step.num_tokens)), max(unpack(step.seq_lens))) for step in warm_up.steps()]
    assert found == [(512, 512), (1, 1), (512, 4096), (4, 1)]


def test_launches_of_fewer_rows_are_met() -> None:
    def rows(num_seqs: int, num_sharing: int, **keys: Any) -> list[tuple[int, bool]]:
        config = engine_config(**keys)
        warm_up = WarmUp(config=config, num_tokens=512, num_seqs=num_seqs, num_sharing=num_sharing)
        return [(step.num_decodes, step.shares_segments) for step in list(warm_up.steps())[1:]]

    assert rows(1024, 1000) == [(1024, False), (1000, True), (64, True), (2, True)]
    assert rows(48, 2, enforce_eager=True) == [(48, False), (2, False), (2, True)]
