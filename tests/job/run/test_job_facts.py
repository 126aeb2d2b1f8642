"""Two checkpoints of one size are two models; one that was moved is not."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from fake_runners import engine_config
from nvcli.core.config import JobConfig, MessageTemplate, RunConfig
from nvcli.core.task_config import ScoreConfig
from nvcli.demo import demo_path
from nvcli.errors import LoadError
from nvcli.job.job import EmbedTask
from nvcli.job.rows.task_rows import EmbedRows, ScoreRows
from nvcli.job.run.job_facts import job_facts
from nvcli.models.checkpoint import is_hub_id

GIB = 1 << 30


def facts_of(folder: Path) -> dict[str, object]:
    config = engine_config(model_path=folder)
    return dict(job_facts(RunConfig(model=str(folder)), config, {}))


def test_what_the_job_says_about_prompts_makes_another_job() -> None:
    def facts(template: str | None = None, **job: Any) -> dict[str, object]:
        run = RunConfig(model="demo", job=JobConfig(**job))
        config = engine_config(model_path=demo_path())
        return dict(job_facts(run, config, {}, chat_template=template))

    plain = facts()
    for changed in (
        facts("{{ messages }}"),
        facts(system=""),
        facts(prompt_template="{a}"),
        facts(messages_template=[MessageTemplate(role="user", content="{a}")]),
        facts(chat_template_kwargs={"enable_thinking": False}),
    ):
        assert changed.items() > plain.items()  # jobs without these keys are what they were
    assert facts("a") != facts("b")
    assert facts(chat_template_kwargs={"a": 1, "b": 2}) == facts(chat_template_kwargs={"b": 2, "a": 1})


def test_what_is_made_of_rows_is_told_key_by_key() -> None:
    run = RunConfig(model="demo", task="score", score=ScoreConfig(normalize="bytes"))
    config = engine_config(model_path=demo_path())
    scores = job_facts(run, config, {}, task=ScoreRows(run.score))
    assert scores["task"] == "score"
    assert (scores["score.normalize"], scores["score.answer_field"]) == ("bytes", "answer")
    run = RunConfig(model="demo", task="embed")
    vectors = job_facts(run, config, {}, task=EmbedRows(EmbedTask(dimensions=5)))
    assert (vectors["embed.dimensions"], vectors["embed.normalize"]) == (5, True)


def test_weights_in_fp8_give_other_answers() -> None:
    run = RunConfig(model="demo")
    plain, kept = (
        dict(job_facts(run, engine_config(model_path=demo_path(), quantization=kind), {})) for kind in ("none", "fp8")
    )
    assert kept == {**plain, "quantization": "fp8"}
    fast = engine_config(model_path=demo_path(), quantization="fp8", fp8_accumulation="fast")
    assert dict(job_facts(run, fast, {})) == {**kept, "fp8_accumulation": "fast"}
    assert "quantization" not in plain, "outputs of earlier versions are continued"


def test_another_type_of_keys_and_values_makes_another_job() -> None:
    def facts(kv_cache_dtype: str) -> dict[str, object]:
        config = engine_config(model_path=demo_path(), dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
        return dict(job_facts(RunConfig(model="demo"), config, {}))

    assert facts("fp8").items() - facts("auto").items() == {("kv_cache_dtype", "fp8")}
    assert facts("bf16") == facts("auto")  # the model's own type


def change_byte(file: Path, place: int) -> None:
    with file.open("r+b") as stream:
        stream.seek(place)
        stream.write(b"x")


def test_another_checkpoint_of_the_same_size_is_another_model(tmp_path: Path) -> None:
    copy = tmp_path / "moved"
    shutil.copytree(demo_path(), copy)
    facts = facts_of(demo_path())
    assert facts_of(copy) == facts
    weights = copy / "model.safetensors"
    change_byte(weights, weights.stat().st_size // 2)
    changed = facts_of(copy)
    assert [name for name in facts if facts[name] != changed[name]] == ["model model.safetensors"]


def test_large_weights_are_sampled_in_no_time(tmp_path: Path) -> None:
    files = [tmp_path / f"model-{number}-of-4.safetensors" for number in range(4)]
    for file in files:
        with file.open("wb") as stream:
            stream.truncate(4 * GIB)  # holes: nothing is written
    begin = time.process_time()
    facts = facts_of(tmp_path)
    assert time.process_time() - begin < 0.2
    for file in files:
        for place in (0, 4 * GIB - 1):
            change_byte(file, place)
            changed = facts_of(tmp_path)
            assert [name for name in facts if facts[name] != changed[name]] == [f"model {file.name}"]
            facts = changed


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    os.mkfifo(weights)
    with pytest.raises(LoadError, match=r"model\.safetensors: not a regular file"):
        facts_of(tmp_path)
    weights.unlink()
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(LoadError, match=r"gone\.safetensors: cannot be read: no such file"):
        facts_of(tmp_path)


def test_what_names_a_model_on_the_hub(tmp_path: Path) -> None:
    assert [is_hub_id(name) for name in ("demo", str(tmp_path), "Qwen/Qwen3-8B")] == [False, False, True]


def test_batch_invariance_is_a_fact_where_it_is_on() -> None:
    def facts(batch_invariant: bool) -> dict[str, object]:
        config = engine_config(model_path=demo_path(), batch_invariant=batch_invariant)
        return dict(job_facts(RunConfig(model="demo"), config, {}))

    assert facts(True).items() - facts(False).items() == {("batch_invariant", True)}


def test_overrides_of_config_json_make_another_job() -> None:
    """In whatever order they are given."""

    def facts(overrides: dict[str, Any]) -> dict[str, object]:
        config = engine_config(model_path=demo_path(), hf_overrides=overrides)
        return dict(job_facts(RunConfig(model="demo"), config, {}))

    plain, changed = facts({}), facts({"b": {"y": 1, "x": 2}, "a": None})
    assert changed.items() - plain.items() == {("hf_overrides", '{"a":null,"b":{"x":2,"y":1}}')}
    assert facts({"a": None, "b": {"x": 2, "y": 1}}) == changed
    assert "hf_overrides" not in plain, "outputs of earlier versions are continued"
