"""Answers to prompts with images are those of transformers: in chunks, preempted, with prefix hits, in graphs."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from generation import generate

from adapters import LINEAR, low_rank, merge, write_adapter
from image_answers import ImageRequests, answers_in_order, image_settings, reference_answers
from nvcli.core.messages import unpack
from nvcli.worker.runner.model_runner import ModelRunner
from one_rank import make_runner, make_scheduler, run_requests
from vision_model import write_vision_model

FAMILIES = [
    "qwen 2.5-vl",
    "qwen 3-vl",
    "qwen 4-exp with vision",
    "minicpm-v 4.6",
    "minicpm-v 4.7",
    "nemotron 3 omni",
    "gemma 3 with vision",
    "gemma 4 with vision, layer inputs and shared keys",
    "gemma 4 12b",
    "mistral 3 with vision",
    "minimax m3 with vision",
    "lighton-ocr",
    "glm 4.6v-flash",
    "glm 4.6v",
    "glm-ocr",
    "hunyuan-ocr",
    "paddleocr-vl",
    "internvl",
    "idefics 2",
    "idefics 3",
    "lfm2-vl",
    "aya vision",
    "command a vision",
    "llava 1.5",
    "videollama 3",
    "got-ocr 2",
]
MORE_ON_GPUS = [
    "kimi k2.5 with vision",
    "glm 5.3 flash with vision",
    "llama 4 with vision",
    "step 3.7 with vision",
    "muse glimmer with vision",
    "cohere compass with vision",
    "hunyuan v4 with vision",
    "qianfan-ocr",
    "granite docling",
    "paligemma",
    "paligemma 2",
    "ovis 2",
]
"""Families of which CPUs compare logits alone (`test_vision_parity.py`)."""
Checkpoint = tuple[Path, ImageRequests, list[list[int]]]


IN_CHUNKS = {"max_num_batched_tokens": 21, "max_num_seqs": 4}


@dataclass(frozen=True)
class Answered:
    """A checkpoint, its requests, and the runner that has answered them: in chunks, if the family can."""

    path: Path
    requests: ImageRequests
    runner: ModelRunner
    found: list[list[int]]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Answered]:
    folder = tmp_path_factory.mktemp("images")

    @cache
    def answer(name: str) -> Answered:
        path = write_vision_model(folder / name.replace(" ", "-"), name)
        requests, runner = ImageRequests(path), runner_of(path, **(IN_CHUNKS if name in FAMILIES else {}))
        return Answered(path, requests, runner, answers_in_order(run_requests(runner, requests.requests())))

    return answer


@pytest.fixture(scope="module")
def checkpoint_of(answered: Callable[[str], Answered]) -> Callable[[str], Checkpoint]:
    """Gives a checkpoint of a family, its requests, and what transformers answers to them."""

    @cache
    def answer(name: str) -> Checkpoint:
        own = answered(name)
        return own.path, own.requests, reference_answers(own.path, own.requests.processor, own.found)

    return answer


def runner_of(path: Path, device: str = "cpu", **settings: Any) -> ModelRunner:
    own = {"max_model_len": 256, "block_size": 16, "dtype": "float32"}
    return make_runner(path, device, **{**own, **image_settings(path), **settings})


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_in_chunks_are_those_of_transformers(
    name: str, answered: Callable[[str], Answered], checkpoint_of: Callable[[str], Checkpoint]
) -> None:
    own, (_, _, expected) = answered(name), checkpoint_of(name)
    assert own.found == expected
    # Again, and now most of the prompts are in the prefix cache.
    assert answers_in_order(run_requests(own.runner, own.requests.requests())) == expected
    assert len({tuple(answer) for answer in expected}) > 4, "the images must make a difference"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("gemma 3 with vision", {}),
        ("paligemma", {}),
        ("paligemma 2", {"enable_prefix_caching": False}),
        ("qwen 3-vl", {}),
        ("qwen 3-vl", {"enable_prefix_caching": False}),
        ("qwen 2.5-vl", {"batch_invariant": True}),
    ],
)
def test_answers_to_whole_prompts_are_those_of_transformers(
    name: str, settings: dict[str, Any], checkpoint_of: Callable[[str], Checkpoint]
) -> None:
    path, requests, expected = checkpoint_of(name)
    runner = runner_of(path, **settings)
    for _ in range(2):
        assert answers_in_order(run_requests(runner, requests.requests())) == expected


@pytest.mark.parametrize(
    ("name", "num_blocks"),
    [("qwen 3-vl", 36), ("gemma 3 with vision", 36), ("mistral 3 with vision", 36), ("paligemma", 26)],
)
def test_preempted_requests_are_computed_again(
    name: str, num_blocks: int, checkpoint_of: Callable[[str], Checkpoint]
) -> None:
    """Few blocks, and no embeddings that are kept."""
    path, requests, expected = checkpoint_of(name)
    runner = runner_of(path, block_size=4)
    assert runner._images is not None
    assert runner._images.encoder is not None
    runner._images.encoder._kept.max_bytes = 0
    scheduler = make_scheduler(runner, num_blocks=num_blocks * len(runner.ready.kv_groups))
    assert answers_in_order(run_requests(runner, requests.requests(), scheduler)) == expected
    assert scheduler.stats.num_preemptions > 0


def test_only_equal_prompts_share_keys_where_all_of_their_tokens_attend_to_each_other(
    checkpoint_of: Callable[[str], Checkpoint],
) -> None:
    path, requests, _ = checkpoint_of("paligemma")
    runner = runner_of(path, block_size=4)
    beginning = [(2, 2, 0), *range(20, 60)]
    prompts = [[*beginning, 9], [*beginning, 10], beginning, [*beginning, 9]]
    made = [requests.make(number, prompt) for number, prompt in enumerate(prompts)]
    alone = [run_requests(runner_of(path, block_size=4), [each])[each.request_id] for each in made]
    scheduler = make_scheduler(runner, num_blocks=100)
    found = [run_requests(runner, [each], scheduler)[each.request_id] for each in made]
    assert found == alone
    assert len({*map(tuple, found)}) > 1
    assert scheduler.stats.cached_tokens == 44, "the last finds the first, and no other does"


def test_an_adapter_changes_tower_and_text(checkpoint_of: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    """One for all rows; and one that rows choose changes the text part alone, in batches and merged in its turn."""
    path, requests, plain = checkpoint_of("qwen 2.5-vl")
    modules = [*LINEAR, "qkv"]
    tensors = low_rank(path, modules)
    of_text = {name: tensor for name, tensor in tensors.items() if "visual" not in name}
    adapters = [write_adapter(tmp_path / f"{len(own)}", own, target_modules=modules) for own in (tensors, of_text)]
    merged = [merge(path, own, tmp_path / f"merged {len(own)}") for own in (tensors, of_text)]

    def answers(runner: ModelRunner) -> list[list[int]]:
        return list(answers_in_order(run_requests(runner, requests.requests())))

    with_all, with_text = (answers(runner_of(one)) for one in merged)
    assert plain != with_all != with_text
    assert answers(runner_of(path, lora_path=adapters[0])) == with_all
    chosen = [msgspec.structs.replace(request, adapter=1) for request in requests.requests()]
    others = [msgspec.structs.replace(each, request_id=100 + each.request_id) for each in requests.requests()]
    for in_turn in ((), (1,)):
        runner = runner_of(path, lora_paths=(adapters[1],), merged_adapters=in_turn, **IN_CHUNKS)
        found = run_requests(runner, [*others, *chosen] if in_turn else [*chosen, *others])
        assert answers_in_order(found) == with_text
        assert answers_in_order({number - 100: answer for number, answer in found.items()}) == plain


def test_a_later_memory_of_pixels_may_have_the_path_of_an_earlier_one(
    checkpoint_of: Callable[[str], Checkpoint],
) -> None:
    path, _, expected = checkpoint_of(FAMILIES[0])
    runner = runner_of(path)
    assert runner._images is not None
    assert runner._images.encoder is not None
    paths: list[str] = []
    while len(set(paths)) == len(paths) < 9:  # whatever else opens files may take the number that was given back
        requests = ImageRequests(path)
        made = requests.requests()
        paths.append(made[0].images[0].file.partition("#")[0])
        assert answers_in_order(run_requests(runner, made)) == expected
        runner._images.encoder.forget()
        del requests
        gc.collect()
    assert len(set(paths)) < len(paths), "the test would not test anything"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("qwen 2.5-vl", {"num_kv_tokens": 104}),
        ("qwen 3-vl", {"tensor_parallel_size": 2}),
        ("gemma 3 with vision", {}),
    ],
)
@pytest.mark.usefixtures("warm_engines")
def test_stages_do_not_change_the_answers(
    name: str, settings: dict[str, Any], checkpoint_of: Callable[[str], Checkpoint]
) -> None:
    """With the tower in the first stage alone, in chunks, preempted, and on several ranks a stage."""
    path, requests, expected = checkpoint_of(name)
    own = image_settings(path) | IN_CHUNKS | {"pipeline_parallel_size": 2}
    done, stats = generate(path, requests.requests(), **own, **settings)
    found = {number: unpack(output.token_ids).tolist() for number, output in done.items()}
    assert answers_in_order(found) == expected
    assert "num_kv_tokens" not in settings or stats.num_preemptions > 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES + MORE_ON_GPUS)
@pytest.mark.parametrize("batched_tokens", [512, 24])
@pytest.mark.parametrize("enforce_eager", [True, False])
def test_answers_on_a_gpu_are_those_of_transformers(
    name: str, batched_tokens: int, enforce_eager: bool, checkpoint_of: Callable[[str], Checkpoint]
) -> None:
    if name.startswith("paligemma") and batched_tokens < 512:
        pytest.skip("its prompts attend both ways, so none is cut")
    torch.backends.cuda.matmul.allow_tf32 = False
    path, requests, expected = checkpoint_of(name)
    runner = runner_of(path, "cuda", max_num_batched_tokens=batched_tokens, enforce_eager=enforce_eager)
    for _ in range(2):
        assert answers_in_order(run_requests(runner, requests.requests())) == expected
