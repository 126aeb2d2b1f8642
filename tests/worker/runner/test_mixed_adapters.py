"""Requests with different LoRA adapters and with none in the same steps: each answer is that of the checkpoint that its
adapter makes, whatever runs beside it."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from generation import EOS, generate, generate_here, tokens_of
from generation import config_of as config_of_engine
from generation import prompts as all_prompts
from safetensors.torch import load_file, save_file

from adapters import LINEAR, low_rank, merge, write_adapter
from checkpoints import write_tiny_model
from nvcli.core.weight_changes import LoadWeights, Sleep, Wake
from nvcli.engine.merged_adapter import MergedAdapter
from nvcli.engine.request import Request
from nvcli.errors import ConfigError, LoadError
from nvcli.models import merged_weights
from nvcli.models.merged_weights import MergedWeights
from nvcli.worker.runner.interface import RankContext
from nvcli.worker.runner.model_runner import ModelRunner
from one_rank import make_core, run_core
from requests_factory import make_request

MODULES: list[tuple[int, tuple[str, ...]]] = [(4, LINEAR), (20, ("q_proj", "v_proj")), (7, LINEAR)]
"""The rank of each adapter, and what it changes."""
ANSWER = 12


def prompts() -> list[list[int]]:
    """Prompts of 1 to 80 tokens, some of which begin alike."""
    return [prompt for prompt in all_prompts() if len(prompt) <= 80][3::2]


class Adapters:
    """A tiny model, its adapters, and the answers of the checkpoints that they make."""

    def __init__(self, folder: Path) -> None:
        self.base = write_tiny_model(folder / "base", "Qwen3")
        self.folders, merged = [], [self.base]
        for number, (rank, modules) in enumerate(MODULES, 1):
            tensors = low_rank(self.base, modules, rank=rank, seed=number)
            settings = {"r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules)}
            self.folders.append(write_adapter(folder / f"adapter {number}", tensors, **settings))
            merged.append(merge(self.base, tensors, folder / f"merged {number}"))
        self.expected = [tokens_of(generate_here(path, requests_of(0))[0]) for path in merged]


def requests_of(adapter: int, first_id: int = 0) -> list[Request]:
    """The same prompts, some of which share prefixes, for an adapter."""
    return [
        make_request(first_id + number, prompt, ANSWER, stop_ids=[EOS], adapter=adapter)
        for number, prompt in enumerate(prompts())
    ]


def mixed_requests() -> list[Request]:
    """Every prompt with every adapter and with none, one after the other."""
    by_adapter = [requests_of(adapter, 100 * adapter) for adapter in range(len(MODULES) + 1)]
    return [request for of_prompt in zip(*by_adapter, strict=True) for request in of_prompt]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    return Adapters(tmp_path_factory.mktemp("adapters"))


def check(adapters: Adapters, outputs: dict[int, Any]) -> None:
    answers = tokens_of(outputs)
    assert len(answers) == len(adapters.expected) * len(prompts())
    for adapter, expected in enumerate(adapters.expected):
        assert {number - 100 * adapter: answers[number] for number in answers if number // 100 == adapter} == expected
    assert len({tuple(map(tuple, one.values())) for one in adapters.expected}) == len(adapters.expected)


def config_of(adapters: Adapters, **config: Any) -> dict[str, Any]:
    return {"lora_paths": tuple(adapters.folders), **config}


def test_chunked_preempted_and_evicted(adapters: Adapters) -> None:
    """Two places for three adapters; too few blocks for all that run; equal prompts under different adapters share
    nothing, and under the same one they do."""
    config = config_of(adapters, max_loaded_adapters=2, num_kv_tokens=180)
    outputs, stats = generate_here(adapters.base, mixed_requests(), **config)
    check(adapters, outputs)
    assert stats.num_preemptions > 0
    assert 0 < stats.cached_tokens < stats.prompt_tokens


ALL = tuple(range(1, len(MODULES) + 1))


def in_turn() -> list[Request]:
    """All requests, adapter by adapter."""
    return sorted(mixed_requests(), key=lambda request: request.adapter)


@pytest.mark.parametrize("place", ["device", "files"])
def test_adapters_merged_in_turn(adapters: Adapters, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Each from the base weights, in RAM or from the files; tails of groups run beside the next one."""
    if place == "files":
        monkeypatch.setattr(merged_weights, "_HOST_SHARE", 0)
    merges = watch_merges(monkeypatch)
    outputs, stats = generate_here(adapters.base, in_turn(), **config_of(adapters, merged_adapters=ALL))
    check(adapters, outputs)
    assert merges == [1, 0, 2, 0, 3]
    assert 0 < stats.cached_tokens < stats.prompt_tokens


@pytest.mark.parametrize("max_draft_tokens", [0, 3])
def test_tails_of_merged_adapters_rest(
    adapters: Adapters, monkeypatch: pytest.MonkeyPatch, max_draft_tokens: int
) -> None:
    """Their requests give slots to the next adapter's, and go on later with the keys that they have."""
    resting, rest = [], MergedAdapter._rest
    monkeypatch.setattr(MergedAdapter, "_rest", lambda *args: resting.append(rest(*args)) or resting[-1])
    requests = [msgspec.structs.replace(each, max_tokens=ANSWER - each.request_id % 5) for each in in_turn()]
    config = config_of(adapters, merged_adapters=ALL, max_num_seqs=3)
    drafting = {"max_draft_tokens": max_draft_tokens, "draft_policy": "always"}
    outputs, stats = generate_here(adapters.base, requests, **config, **drafting)
    expected = {
        100 * adapter + number: answer
        for adapter, one in enumerate(adapters.expected)
        for number, answer in one.items()
    }
    found = tokens_of(outputs)
    assert found == {each.request_id: expected[each.request_id][: each.max_tokens] for each in requests}
    assert sum(map(len, resting)) > 3
    assert stats.num_preemptions == 0


def test_weights_into_which_adapters_are_merged_are_not_replaced(adapters: Adapters) -> None:
    config = config_of_engine(adapters.base, **config_of(adapters, merged_adapters=ALL))
    runner = ModelRunner(config, RankContext(rank=0, report_phase=lambda phase: None))
    for change in (LoadWeights(str(adapters.base)), Sleep(2)):
        with pytest.raises(ConfigError, match=r"merged into the weights in turn \(`lora.mode`\)"):
            runner.change_weights(change)
    for change in (Sleep(1), Wake()):
        runner.change_weights(change)


def test_adapters_that_have_no_other_way_are_merged_alone(adapters: Adapters, monkeypatch: pytest.MonkeyPatch) -> None:
    """In whatever order their requests come, with preemption."""
    merges = watch_merges(monkeypatch)
    config = config_of(adapters, merged_adapters=ALL, merged_only_adapters=ALL, num_kv_tokens=180)
    outputs, stats = generate_here(adapters.base, mixed_requests(), **config)
    check(adapters, outputs)
    assert stats.num_preemptions > 0
    assert merges == [1, 2, 3]


def watch_merges(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The adapters that are merged from now on, in this order; 0: none."""
    merges, merge = [], MergedWeights.merge

    def watched(weights: MergedWeights, number: int) -> LoadError | None:
        merges.append(number)
        return merge(weights, number)

    monkeypatch.setattr(MergedWeights, "merge", watched)
    return merges


def test_drafts(adapters: Adapters) -> None:
    outputs, stats = generate_here(
        adapters.base, mixed_requests(), **config_of(adapters, max_draft_tokens=3, draft_policy="always")
    )
    check(adapters, outputs)
    assert stats.accepted_tokens > 0


def test_beside_weights_in_fp8(adapters: Adapters) -> None:
    """Rows without an adapter are answered as by a model without adapters, and those with one as alone, otherwise."""
    base = tokens_of(generate_here(adapters.base, requests_of(0), quantization="fp8")[0])
    mixed = tokens_of(generate_here(adapters.base, mixed_requests(), **config_of(adapters, quantization="fp8"))[0])
    alone = tokens_of(generate_here(adapters.base, requests_of(2), **config_of(adapters, quantization="fp8"))[0])
    assert {number: mixed[number] for number in base} == base
    assert {number: mixed[200 + number] for number in alone} == alone
    assert alone != base


def test_an_adapter_that_cannot_be_read_fails_its_own_rows_alone(
    adapters: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has NaN in its file, and that of another disappears once the run has begun, before it was read: host memory
    has room for one at a time."""
    monkeypatch.setattr("nvcli.worker.runner.rank_adapters.host_bytes_for_adapters", lambda config: 0)
    folders = [shutil.copytree(folder, tmp_path / folder.name) for folder in adapters.folders]
    file = folders[0] / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors[next(name for name in tensors if "v_proj.lora_B" in name)][0, 0] = math.nan
    save_file(tensors, file)
    runner = ModelRunner(
        config_of_engine(adapters.base, lora_paths=tuple(folders)), RankContext(rank=0, report_phase=print)
    )
    (folders[1] / "adapter_model.safetensors").unlink()
    core = make_core(runner)
    outputs = run_core(core, mixed_requests())
    answers = tokens_of(outputs)
    for adapter, expected in enumerate(adapters.expected):
        found = {number - 100 * adapter: answers[number] for number in answers if number // 100 == adapter}
        assert found == (expected if adapter in (0, 3) else {key: [] for key in expected})
    errors = {(number // 100, output.error_type) for number, output in outputs.items()}
    assert errors == {(0, ""), (1, "non_finite_logits"), (2, "non_finite_logits"), (3, "")}
    assert "the files of the row's adapter, or the weights, may be damaged" in outputs[100].error
    notes = core.take_notes()
    assert any("lora_B.weight has values that are NaN or infinite; download it again" in note for note in notes)
    assert any("cannot be read" in note for note in notes)


def test_tensor_parallel_ranks(adapters: Adapters) -> None:
    """All in one batch, and some merged in turn."""
    config = config_of(adapters, tensor_parallel_size=2, merged_adapters=(1, 3), merged_only_adapters=(3,))
    outputs, _ = generate(adapters.base, mixed_requests(), **config)
    check(adapters, outputs)
