"""Answers with images and drafts by a head or a small model are those without drafts, and a head sees the images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batches import RequestState, make_batch
from checkpoints import write_tiny_model
from eagle3_heads import write_head
from image_answers import PROMPTS, ImageRequests, answers_in_order, image_settings
from model_driver import ModelDriver
from mtp_heads import add_mtp_head
from nvcli.attention.image_tokens import ImageTokens
from nvcli.core.messages import DRAFT_SOURCES, unpack
from nvcli.engine.core import EngineCore
from nvcli.models.vision.positions import ImageSpan, angle_positions, offset_behind
from nvcli.worker.runner.input_buffers import StepBatch
from nvcli.worker.runner.model_drafter import ModelDrafter
from one_rank import make_core, make_runner, make_scheduler, run_core
from vision_model import IMAGE_ID, VOCAB_SIZE, write_vision_model
from vision_reference import allowed_size, make_image

HEAD = DRAFT_SOURCES.index("head")


def make_engine(path: Path, num_blocks: int | None = None, device: str = "cpu", **settings: Any) -> EngineCore:
    """Make an engine of this process whose chunks end inside images."""
    own = {"max_model_len": 256, "block_size": 4 if device == "cpu" else 16, "max_num_batched_tokens": 23}
    own |= {"max_num_seqs": 4, "kv_cache_memory": 64 << 20, **image_settings(path)}
    runner = make_runner(path, device, dtype="float32", **own, **settings)
    return make_core(runner, make_scheduler(runner, num_blocks))


def write_hybrid(folder: Path) -> tuple[Path, str]:
    """Write a model with recurrent states, and its head."""
    return add_mtp_head(write_vision_model(folder / "model", "qwen 3.5 with vision")), "mtp"


def write_with_eagle3(folder: Path) -> tuple[Path, str]:
    path = write_vision_model(folder / "model", "qwen 3-vl")
    write_head(folder / "head", path, layers=(0, 1, 2))
    return path, str(folder / "head")


def write_with_draft_model(folder: Path) -> tuple[Path, str]:
    """Write a model that attends to all of an image, and a small one that reads text alone."""
    path = write_vision_model(folder / "model", "gemma 3 with vision")
    return path, str(write_tiny_model(folder / "small", "Llama", vocab_size=VOCAB_SIZE, head_dim=8))


@pytest.mark.parametrize(
    ("write", "few_blocks"), [(write_hybrid, 34), (write_with_eagle3, None), (write_with_draft_model, 84)]
)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_drafts_do_not_change_the_answers(write: Any, few_blocks: int | None, device: str, tmp_path: Path) -> None:
    (tmp_path / "head").mkdir()
    torch.backends.cuda.matmul.allow_tf32 = False
    path, head = write(tmp_path)
    requests = ImageRequests(path)

    def answers(core: EngineCore) -> list[list[int]]:
        found = run_core(core, requests.requests())
        return list(answers_in_order({number: unpack(each.token_ids).tolist() for number, each in found.items()}))

    expected = answers(make_engine(path, device=device))
    assert len({tuple(answer) for answer in expected}) > 4, "the images must make a difference"
    num_blocks = few_blocks if device == "cpu" else None
    core = make_engine(path, num_blocks, device, draft_head=head, draft_policy="always", max_draft_tokens=3)
    assert answers(core) == expected
    assert core.scheduler.stats.drafted[HEAD] > 0
    assert num_blocks is None or core.scheduler.stats.num_preemptions > 0


def test_a_head_reads_images_as_over_the_whole_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the place before each of their tokens, and rotated as they are."""
    guesses: dict[int, int] = {}
    extend = ModelDrafter.extend

    def record(drafter: ModelDrafter, batch: StepBatch, states: Tensor) -> None:
        extend(drafter, batch, states)
        guesses[int(drafter._kept.positions[0])] = int(drafter._kept.tokens[0])

    monkeypatch.setattr(ModelDrafter, "extend", record)
    path, head_name = write_hybrid(tmp_path)
    requests = ImageRequests(path)
    request = requests.make(0, PROMPTS[4], 30)
    core = make_engine(path, draft_head=head_name, draft_policy="always", max_draft_tokens=3)
    guesses.clear()  # of the warm-up
    (answer,) = run_core(core, [request]).values()
    prompt = request.model_tokens(unpack(request.prompt_ids))
    text = [*prompt, *unpack(answer.token_ids)]
    driver = ModelDriver(path, has_mtp=True, has_tower=True)
    head, tower = driver.model.draft_head, driver.model.vision
    assert head is not None
    assert tower is not None
    spans = [ImageSpan(image.first, image.rows, image.columns) for image in request.images]
    drawn = [part for part in PROMPTS[4] if not isinstance(part, int)]
    images = [make_image(*allowed_size(requests.vision, *size), seed) for *size, seed in drawn]
    rows = torch.tensor([place for place, token in enumerate(text) if token == IMAGE_ID])
    end = len(text) - 1
    behind = torch.arange(len(prompt), end) + offset_behind(angle_positions, spans, end)
    batch = make_batch([(RequestState(), text[:-1])], driver.kv_cache, driver.backend, driver.blocks)
    with torch.inference_mode():
        embeddings = torch.cat(tower([torch.from_numpy(image) for image in images], requests.processor))
        positions = torch.cat([torch.from_numpy(angle_positions(spans, 0, len(prompt))), behind.expand(3, -1)], dim=1)
        batch = replace(batch, angle_positions=positions, images=ImageTokens(rows, embeddings))
        states = driver.model.forward_with_states(batch)[1]
        own = ImageTokens(rows[rows > 0] - 1, embeddings[rows > 0])

        def guesses_of_head(images: ImageTokens | None) -> list[int]:
            hidden, _ = head(torch.tensor(text[1:]), states.clone(), replace(batch, images=images), None)
            return head.compute_logits(hidden).argmax(-1).tolist()

        expected, blind = guesses_of_head(own), guesses_of_head(None)
    checked = {place: token for place, token in guesses.items() if place <= end + 1}
    assert len(checked) > 20
    assert checked == {place: expected[place - 2] for place in checked}
    assert checked != {place: blind[place - 2] for place in checked}, "the images must make a difference"
