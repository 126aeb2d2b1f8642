"""Rows with images, from their file to their answers."""

from __future__ import annotations

import base64
import gc
import gzip
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from adapters import low_rank, write_adapter
from file_jobs import generate
from image_answers import put_pixels
from model_engine import ModelEngine
from nvcli.core.config import JobConfig, RunConfig
from nvcli.core.lora_config import LoraConfig
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.system.nvidia_smi import SmiGpu
from nvcli.errors import ConfigError, RowError
from nvcli.job.images import row_images
from nvcli.job.images.image_source import ImageFolders
from nvcli.job.images.pixel_memory import PixelMemory
from nvcli.job.images.row_images import RowImages
from nvcli.job.job import Job, RowContext
from nvcli.job.progress.display import Progress
from nvcli.job.run.resolve import resolve_job, resolve_settings
from nvcli.llm.llm import LLM
from nvcli.models.config import load_model_config
from nvcli.models.vision.image_processor import read_processor
from vision_model import IMAGE_ID, MARKS, write_image, write_vision_model

pytestmark = pytest.mark.usefixtures("tokenizer", "warm_engines")

GREEDY = {"max_tokens": 6, "temperature": 0}
TEXT = {"type": "text", "text": "What?"}


class Silent(Progress):
    def note(self, line: str) -> None:
        pass

    warn = detail = note


class Rows:
    """Answers rows in a folder with images."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder, self.model = folder, model

    def answer(self, *rows: dict[str, Any], job: JobConfig | None = None, **settings: Any) -> list[dict[str, Any]]:
        """The output rows, in order."""
        source = self.folder / "rows.jsonl"
        source.write_text("".join(json.dumps({"sampling": GREEDY, **row}) + "\n" for row in rows))
        return self.answer_file(source, job=job, **settings)

    def answer_file(self, source: Path, *, job: JobConfig | None = None, **settings: Any) -> list[dict[str, Any]]:
        job = msgspec.structs.replace(job or JobConfig(), order="input")
        run = RunConfig(model=str(self.model), job=job, device="cpu", max_num_seqs=4, **settings)
        output = self.folder / "out.jsonl"
        progress = Silent(io.StringIO())
        generate(run, inputs=[str(source)], output=str(output), progress=progress, overwrite=True, start=ModelEngine)
        return [json.loads(line) for line in output.read_text().splitlines()]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Rows:
    folder = tmp_path_factory.mktemp("rows")
    write_image(folder / "a.png", 60, 90, 1)
    write_image(folder / "b.jpg", 33, 20, 2)
    (folder / "bad.png").write_bytes((folder / "a.png").read_bytes()[:80])
    return Rows(folder, write_vision_model(folder / "model"))


def user(*parts: str, **keys: Any) -> dict[str, Any]:
    """A row of one message; parts that begin with @ are images."""
    content = [{"type": "image", "image": p[1:]} if p[0] == "@" else {"type": "text", "text": p} for p in parts]
    return {"messages": [{"role": "user", "content": content}], **keys}


def texts(found: list[dict[str, Any]]) -> list[str]:
    assert [row["error"] for row in found] == [None] * len(found)
    return [row["choices"][0]["text"] for row in found]


def test_every_form_of_an_image_gets_the_same_answer(rows: Rows) -> None:
    data = "data:image/png;base64," + base64.b64encode((rows.folder / "a.png").read_bytes()).decode()
    openai = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data, "detail": "high"}}, TEXT]}
    batch = {"custom_id": "x", "method": "POST", "url": "/v1/chat/completions"}
    found = rows.answer(
        user("@a.png", "What?"),
        user(f"@{rows.folder}/a.png", "What?"),
        user(f"@file://{rows.folder}/a.png", "What?"),
        user("@" + data, "What?"),
        {"messages": [openai]},
        {"prompt": "What?", "photo": "a.png"},
        {"prompt": "What?", "photo": ["a.png"]},
        {"messages": [{"role": "user", "content": "What?"}], "photo": ["a.png"]},
        user("What?", "@a.png"),
        user("@b.jpg", "What?"),
        {"prompt": "What?"},
        user("What?"),
        {**batch, "body": {"messages": [openai], "max_tokens": 6, "temperature": 0}},
        job=JobConfig(image_field="photo"),
    )
    *found, last = found
    answers = texts(found)
    assert len(set(answers[:8])) == 1
    assert len({answers[0], *answers[8:10]}) == 3
    assert answers[10] == answers[11], "beside images, texts are user messages too"
    assert last["response"]["body"]["choices"][0]["message"]["content"] == answers[0]


def test_a_file_that_goes_away_is_its_rows_error(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFolders, "find", lambda self, name: rows.folder / name)
    gone, there = rows.answer(user("@gone.png", "What?"), user("@a.png", "What?"))
    assert gone["error"]["type"] == "invalid_image"
    assert "No such file" in gone["error"]["message"]
    assert texts([there])


def test_columns_of_bytes_and_of_structs_are_images(rows: Rows) -> None:
    data = (rows.folder / "a.png").read_bytes()
    column = [
        [{"bytes": data, "path": "other.png"}],  # the form of the hub's datasets
        [{"bytes": None, "path": "a.png"}],
        [{"bytes": data, "path": None}, {"bytes": None, "path": "a.png"}],
    ]
    source = rows.folder / "rows.parquet"
    pyarrow.parquet.write_table(
        pyarrow.table(
            {
                "prompt": ["What?"] * 3,
                "sampling": [GREEDY] * 3,
                "photo": column,
                "first": [images[0] for images in column],
                "raw": [data] * 3,
            }
        ),
        source,
    )
    answers = {
        key: texts(rows.answer_file(source, job=JobConfig(image_field=key))) for key in ("photo", "first", "raw")
    }
    one, two = texts(rows.answer(user("@a.png", "What?"), user("@a.png", "@a.png", "What?")))
    assert answers == {"photo": [one, one, two], "first": [one] * 3, "raw": [one] * 3}


def test_programs_give_images_of_pillow_and_bytes(rows: Rows) -> None:
    path = rows.folder / "a.png"
    picture = Image.open(path)
    forms: list[dict[str, Any]] = [
        {"type": "image", "image": picture},
        {"type": "image_pil", "image_pil": picture.convert("RGBA")},
        {"type": "image", "image": path.read_bytes()},
        {"type": "image", "image": {"bytes": path.read_bytes(), "path": None}},
        {"type": "image", "path": str(path)},
    ]
    job = JobConfig(image_field="photo", media_roots=[str(rows.folder)])
    run = RunConfig(model=str(rows.model), job=job, device="cpu", max_num_seqs=4, sampling=GREEDY)
    torn = Image.open(io.BytesIO(path.read_bytes()[:100]))
    with LLM.from_config(run, start=ModelEngine, note=print, needs_chat_template=True) as llm:
        conversations = [[{"role": "user", "content": (form, TEXT)}] for form in forms]
        chats = [answer.text for answer in llm.chat(conversations)]
        columns = [
            answer.text for answer in llm.generate({"prompt": "What?", "photo": each} for each in (picture, [picture]))
        ]
        (failed,) = llm.generate([{"prompt": "What?", "photo": torn}])
    (expected,) = texts(rows.answer(user("@a.png", "What?")))
    assert [*chats, *columns] == [expected] * 7
    assert failed.error is not None
    assert failed.error.type == "invalid_image"
    assert "the image in `photo` cannot be read" in failed.error.message


@pytest.mark.parametrize("name", ["gemma 3 with vision", "gemma 4 12b", "mistral 3 with vision"])
def test_images_are_written_into_prompts_as_their_processor_does(name: str, tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", 60, 90, 1)
    rows = Rows(tmp_path, write_vision_model(tmp_path / "model", name))
    limited = user("@a.png")
    limited["messages"][0]["content"][0]["max_pixels"] = 500
    wrong = user("@a.png", MARKS[name].written)
    *found, other, unlimited = rows.answer(user("a", "@a.png", "b"), user("ab"), wrong, limited)
    with_image, without = (row["usage"]["prompt_tokens"] for row in found)
    # Gemma 3: 16 tokens between two others, and two line feeds on both sides; Gemma 4: 6 rows of 10 between two others;
    # Mistral 3: 7 rows of 10 and one behind.
    assert with_image - without == {"gemma 3 with vision": 22, "gemma 4 12b": 62, "mistral 3 with vision": 77}[name]
    texts(found)
    assert other["error"]["type"] == "chat_template_error"
    assert "`max_pixels` would have no effect" in unlimited["error"]["message"]


def test_what_is_wrong_with_an_image_is_its_rows_error(rows: Rows) -> None:
    found = rows.answer(
        user("@bad.png", "What?"),
        user("@a.png", "@none.png"),
        user("@a.png", sampling={**GREEDY, "prompt_logprobs": 1}),
        user(*["@a.png"] * 65),
        user("<|image_pad|>", "@a.png"),
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png", "max_pixels": 3}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "user", "content": [{"type": "video", "video": "a.mp4"}]}]},
        user("@a.png", "fine"),
    )
    assert [row["error"]["type"] for row in found[:-1]] == [
        *("invalid_image", "invalid_image", "unsupported_parameter", "invalid_image"),
        *("chat_template_error", "invalid_image", "invalid_value", "unsupported_content"),
    ]
    assert found[-1]["error"] is None


def test_continuations_of_images_are_scored(rows: Rows) -> None:
    """By the probability with which the same token is generated, whatever other prompts are beside it."""
    token = 70
    said = {"max_tokens": 1, "temperature": 0, "logprobs": 0, "logit_bias": {str(token): 100}, "return_token_ids": True}
    prompts = [("@a.png", "What?"), ("@b.jpg", "What?"), ("@a.png", "@b.jpg", "?"), ("What?",)]
    generated = rows.answer(*(user(*parts, sampling=said) for parts in prompts))
    assert [row["choices"][0]["token_ids"] for row in generated] == [[token]] * len(prompts)
    text = generated[0]["choices"][0]["text"]
    scored = rows.answer(
        *(user(*parts, choices=[text, text * 3]) for parts in prompts), user("@a.png"), task="score", block_size=16
    )
    expected = [row["choices"][0]["logprobs"]["token_logprobs"][0] for row in generated]
    assert [row["choices"][0]["logprob"] for row in scored[:-1]] == pytest.approx(expected, abs=1e-4)
    assert len({round(value, 3) for value in expected}) == len(prompts)
    assert scored[-1]["error"]["type"] == "unsupported_content"


def test_images_are_embedded_as_by_transformers(rows: Rows) -> None:
    import torch
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    found = rows.answer(user("@a.png", "What?"), user("@b.jpg", "What?"), task="embed")
    tokenizer = transformers.AutoTokenizer.from_pretrained(rows.model)
    model = transformers.AutoModelForImageTextToText.from_pretrained(rows.model).eval()
    prepare = Qwen2VLImageProcessorPil.from_pretrained(rows.model)
    for name, row in zip(("a.png", "b.jpg"), found, strict=True):
        images = prepare(images=[Image.open(rows.folder / name)], return_tensors="pt")
        pads = "<|image_pad|>" * int(images["image_grid_thw"].prod() // 4)
        ids = tokenizer(
            f"user:<|vision_start|>{pads}<|vision_end|>What?\na:", add_special_tokens=False, return_tensors="pt"
        )["input_ids"]
        with torch.no_grad():
            states = model.model(
                input_ids=ids,
                pixel_values=images["pixel_values"],
                image_grid_thw=images["image_grid_thw"],
                mm_token_type_ids=(ids == IMAGE_ID).int(),
            ).last_hidden_state[0, -1]
        assert row["usage"]["prompt_tokens"] == ids.shape[1]
        expected = torch.nn.functional.normalize(states, dim=0).tolist()
        assert row["embedding"] == pytest.approx(expected, abs=1e-5)


def test_images_are_not_cut(rows: Rows) -> None:
    found = rows.answer(user("@a.png", "x" * 30), job=JobConfig(on_too_long="truncate-left"), max_model_len=64)
    assert found[0]["error"]["type"] == "prompt_too_long"


def test_limits_of_an_image_are_fewer_tokens(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_images, "LOW_DETAIL_PIXELS", 20 * 64)
    kinds: list[dict[str, Any]] = [
        {},
        {"max_pixels": 16 * 64},
        {"max_pixels": 10**9},
        {"detail": "low"},
        {"detail": "high"},
        {"type": "image_url", "image": None, "image_url": {"url": "a.png", "detail": "low"}},
    ]
    several = [user("@a.png", "What?") for _ in kinds]
    for row, kind in zip(several, kinds, strict=True):
        row["messages"][0]["content"][0].update(kind)
    found = rows.answer(*several, user("What?"))
    *tokens, without = (row["usage"]["prompt_tokens"] for row in found)
    assert [count - without - 2 for count in tokens] == [54, 12, 54, 15, 54, 15]
    found = rows.answer(*several, user("What?"), job=JobConfig(max_pixels=30 * 64))
    *tokens, without = (row["usage"]["prompt_tokens"] for row in found)
    assert [count - without - 2 for count in tokens] == [24, 12, 24, 15, 24, 15]


def test_limits_that_do_not_go_together_are_refused(rows: Rows) -> None:
    row = user("@a.png")
    row["messages"][0]["content"][0]["detail"] = "best"
    (found,) = rows.answer(row)
    assert '`detail` of `messages[0].content[0]` is "best"; allowed: auto, low' in found["error"]["message"]
    with pytest.raises(ConfigError, match=r"`job\.max_pixels`: `min_pixels` is 256 and `max_pixels` 9; allowed: 64"):
        resolve_settings(RunConfig(model=str(rows.model), device="cpu", job=JobConfig(max_pixels=9)))


def test_a_run_without_images_says_why(rows: Rows) -> None:
    (found,) = rows.answer(user("@a.png"), images="never")
    assert found["error"]["type"] == "unsupported_content"
    assert "the row has images, and `images` is never" in found["error"]["message"]


PLAIN, HELD = {"prompt": "x"}, {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}


@pytest.mark.parametrize(
    ("lines", "name", "job", "images", "has_tower"),
    [
        ([PLAIN] * 200, "r.jsonl", {}, "auto", False),
        ([PLAIN, HELD], "r.jsonl.gz", {}, "auto", True),
        ([PLAIN] * 200 + [HELD], "r.jsonl", {}, "auto", True),  # found by searching the file
        ([PLAIN, {"messages": json.dumps(HELD["messages"])}], "r.jsonl", {}, "auto", True),
        ([PLAIN] * 200 + [{"prompt": '"type": "image"'}], "r.jsonl", {}, "never", False),
        ([PLAIN] * 200 + [HELD], "r.jsonl.gz", {}, "auto", False),
        ([PLAIN], "r.jsonl", {}, "always", True),
        ([PLAIN], "r.jsonl", {"image_field": "photo"}, "auto", True),
        ([PLAIN], "r.jsonl", {"check_columns": False}, "auto", True),  # nobody looked
    ],
)
def test_the_tower_is_loaded_if_rows_seem_to_have_images(
    rows: Rows, lines: list[Any], name: str, job: dict[str, Any], images: Any, has_tower: bool
) -> None:
    source, data = rows.folder / name, "".join(json.dumps(line) + "\n" for line in lines).encode()
    source.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
    run = RunConfig(model=str(rows.model), device="cpu", images=images, job=JobConfig(**job))
    resolved = resolve_job(run, inputs=[str(source)], output=None, limit=None)
    assert resolved.model.has_tower is bool(resolved.config.max_image_tokens) is has_tower


@pytest.mark.parametrize(
    ("num_gpus", "settings", "has_tower"),
    [(1, {}, True), (2, {}, False), (2, {"data_parallel_size": 2}, True), (2, {"tensor_parallel_size": 1}, True)],
)
def test_attention_by_rows_excludes_images_where_ranks_can_share_it(
    rows: Rows, num_gpus: int, settings: dict[str, Any], has_tower: bool
) -> None:
    source = rows.folder / "by_rows.jsonl"
    source.write_text(json.dumps(HELD))
    gpus = [SmiGpu(index=0, uuid="", name="NVIDIA H200", driver="", total_bytes=1 << 37, used_bytes=0, mig=False)]
    run = RunConfig(model=str(rows.model), device="cuda", enable_attention_dp=True, **settings)
    resolved = resolve_job(run, inputs=[str(source)], output=None, limit=None, gpus=gpus * num_gpus)
    assert resolved.model.has_tower is has_tower


def test_images_that_nobody_saw_are_errors_that_say_what_to_do(rows: Rows) -> None:
    source, output = rows.folder / "late.jsonl.gz", rows.folder / "late.out.jsonl"
    source.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in [PLAIN] * 12 + [HELD]).encode()))
    run = RunConfig(model=str(rows.model), device="cpu", max_num_seqs=4, sampling={"max_tokens": 1})
    generate(run, inputs=[str(source)], output=str(output), progress=Silent(io.StringIO()), start=ModelEngine)
    errors = [row["error"] for row in map(json.loads, output.read_text().splitlines()) if row["error"]]
    assert len(errors) == 1
    assert "set `images: always`" in errors[0]["message"]
    run = msgspec.structs.replace(run, images="always")  # which continues the output
    generate(
        run,
        inputs=[str(source)],
        output=str(output),
        retry_errors=True,
        progress=Silent(io.StringIO()),
        start=ModelEngine,
    )
    assert '"error":{' not in output.read_text().replace(" ", "")


def test_images_that_cannot_be_read_are_refused_where_they_are_asked_for(tmp_path: Path) -> None:
    """Here as the first stage lacks a layer behind which they enter; with two stages it has both."""
    model = write_vision_model(tmp_path / "model", "qwen 3-vl")
    run = RunConfig(model=str(model), device="cpu", images="always", pipeline_parallel_size=2)
    assert resolve_settings(run).config.max_image_tokens > 0
    with pytest.raises(ConfigError, match=r"`images` is always, and `pipeline_parallel_size` .* first 2 layers"):
        resolve_settings(msgspec.structs.replace(run, pipeline_parallel_size=3))


def test_adapters_that_rows_choose_leave_the_tower_alone(rows: Rows, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "adapter", low_rank(rows.model, ["qkv", "q_proj"]), target_modules="all-linear")
    run = RunConfig(model=str(rows.model), device="cpu", lora=LoraConfig(adapters={"a": str(adapter)}))
    with pytest.raises(ConfigError, match=r"adapter a \(`lora.adapters`\) changes visual.blocks.0"):
        resolve_settings(run)
    assert resolve_settings(msgspec.structs.replace(run, images="never")).row_adapters


def test_equal_images_share_a_prefix_and_others_do_not(rows: Rows) -> None:
    found = rows.answer(
        user("@a.png", "What?"),
        user("@a.png", "Why?"),
        user("@b.jpg", "What?"),
        block_size=16,
    )
    cached = [row["usage"]["cached_tokens"] for row in found]
    assert sorted(cached)[-1] == 48
    assert cached[2] == 0


def test_pixels_are_given_back() -> None:
    memory = PixelMemory()
    held = [put_pixels(memory, np.zeros((100, 10 * n, 3), dtype=np.uint8), b"") for n in (1, 2, 3)]
    before = memory.num_bytes
    with open(held[1].file.partition("#")[0], "rb") as file:
        file.seek(held[1].offset)
        assert file.read(300) == bytes(300)
    del held[1]
    gc.collect()
    assert memory.num_bytes < before
    held.clear()
    gc.collect()
    assert memory.num_bytes == 0


def test_the_images_of_two_parts_are_prepared_at_a_time(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    vision = load_model_config(rows.model).vision
    assert vision is not None
    images = RowImages(read_processor(rows.model, vision), IMAGE_ID, ImageFolders.of((), (str(rows.folder),)))
    images.processes.count = 1  # so that a part has two images
    monkeypatch.setattr(images, "_read_one", lambda image, is_alone: RowError("invalid_image", "bad"))
    jobs = [
        Job(
            context=RowContext(id=n, index=n, line=""),
            messages=user("@a.png")["messages"],
            sampling=SamplingParams(),
        )
        for n in range(5)
    ]
    begun = [len(images._begun) for _ in images.portions(jobs)]
    assert begun == [4, 3, 1]
    assert not images._begun  # although nobody has asked for them
    images.close()
