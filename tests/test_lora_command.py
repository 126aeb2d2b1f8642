"""Jobs with a LoRA adapter (`--lora`), as a user runs them with the built-in model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from adapters import LINEAR, low_rank, magnitudes, merge, write_adapter
from fake_command import NvcliHere, run_nvcli
from nvcli import LLM
from nvcli.core.config import RunConfig
from nvcli.core.lora_config import LoraConfig, adapter_choice
from nvcli.demo import demo_path
from nvcli.errors import ConfigError
from nvcli.job.output.manifest import load_manifest
from nvcli.job.run import adapter_modes
from nvcli.job.run.plan import plan_replicas
from nvcli.job.run.resolve import resolve_settings

pytestmark = pytest.mark.usefixtures("warm_engines")

ROWS = [{"prompt": f"What is {number} + 58?\n", "lora": "a column"} for number in (3, 37, 512)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with an input and two adapters of the built-in model."""
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    for seed, name in enumerate(("one", "two")):
        tensors = low_rank(demo_path(), LINEAR, seed=seed, size=0.3)
        write_adapter(tmp_path / name, tensors, base_model_name_or_path=f"someone/{'demo' if seed == 0 else 'other'}")
    return tmp_path


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_answers_are_those_of_the_merged_model(folder: Path, nvcli_here: NvcliHere) -> None:
    always = ("in.jsonl", "--order", "input", "--temperature", "0", "--max-tokens", "12")
    done = run_nvcli("generate", *always, "-m", "demo", "--lora", "one", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "base_model_name_or_path" not in done.stderr
    rows = rows_of(folder / "in.out.jsonl")
    assert [row["lora"] for row in rows] == ["a column"] * 3
    merged = merge(demo_path(), low_rank(demo_path(), LINEAR, seed=0, size=0.3), folder / "merged")
    with LLM(merged, seed=0) as llm:
        expected = [answer.text for answer in llm.generate(ROWS, sampling={"temperature": 0, "max_tokens": 12})]
    texts = [row["choices"][0]["text"] for row in rows]
    assert texts == expected
    assert not any("95" in text for text in texts), "the adapter changes what the model knows"
    manifest = load_manifest(folder / "in.out.jsonl")
    assert manifest is not None
    assert [name for name in manifest.facts if name.startswith("lora")] == [
        "lora adapter_config.json",
        "lora adapter_model.safetensors",
    ]
    other = nvcli_here("generate", *always, "-m", "demo", "--lora", "two", cwd=folder)
    assert other.returncode == 2
    assert "lora adapter_model.safetensors: " in other.stderr
    without = nvcli_here("generate", *always, "-m", "demo", cwd=folder)
    assert without.returncode == 2
    assert "→ not set" in without.stderr


def test_another_base_model_that_fits_is_a_warning(folder: Path) -> None:
    warnings = []
    for name in ("one", "two"):
        run = RunConfig(model="demo", lora=str(folder / name), device="cpu")
        warnings += plan_replicas(resolve_settings(run), num_requests=1).warnings
    (line,) = [warning for warning in warnings if "someone" in warning]
    assert line.startswith("warning: the adapter ")
    assert "was made for someone/other (base_model_name_or_path), and the model is demo" in line


@pytest.mark.parametrize("command", ["generate", "score", "embed", "check"])
def test_what_does_not_fit_ends_the_command_before_it_loads_anything(
    folder: Path, nvcli_here: NvcliHere, command: str
) -> None:
    import torch

    wide = {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 4096)}
    wide["base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"] = torch.zeros(4096, 4)
    write_adapter(folder / "wide", wide, base_model_name_or_path="someone/large")
    done = nvcli_here(command, "in.jsonl", "-m", "demo", "--lora", "wide", cwd=folder)
    assert done.returncode == 2
    assert "has shape [4, 4096], which does not fit model.layers.0.self_attn.q_proj.weight [256, 128]" in done.stderr
    assert "the adapter was made for someone/large (base_model_name_or_path)" in done.stderr


def test_rows_choose_adapters_by_name(folder: Path, nvcli_here: NvcliHere) -> None:
    """In one run, and one of them by the model of an OpenAI row; rows without a name have the base model."""
    names = [None, "sql", "chat", "sql", "law"]
    rows = [{"prompt": ROWS[1]["prompt"], "lora": name} for name in names] + [{"prompt": ROWS[1]["prompt"]}]
    body = {"model": "chat", "prompt": ROWS[1]["prompt"], "max_tokens": 12, "temperature": 0}
    rows.append({"custom_id": "other", "method": "POST", "url": "/v1/completions", "body": body})
    (folder / "mixed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    always = ("mixed.jsonl", "-m", "demo", "--temperature", "0", "--max-tokens", "12")
    done = nvcli_here("generate", *always, "--lora", "sql=one", "--lora", "chat=two", cwd=folder)
    assert done.returncode == 1, done.stderr
    *given, openai = sorted(rows_of(folder / "mixed.out.jsonl"), key=lambda row: row.get("index", len(rows)))
    checked = nvcli_here("check", *always[:3], "--lora", "sql=one", "--lora", "chat=two", cwd=folder)
    assert "adapters    sql (rank 4) 2 rows, chat (rank 4) 2 rows, none 2 rows\n" in checked.stdout
    assert "            2 at a time on the CPU, where they take 2.41 MiB\n" in checked.stdout
    texts = [row["choices"][0]["text"] if row["choices"] else row["error"] for row in given]
    expected = []
    for merged in (None, folder / "one", folder / "two"):
        with LLM("demo", seed=0, lora=None if merged is None else str(merged)) as llm:
            (answer,) = llm.generate([rows[0]["prompt"]], sampling={"temperature": 0, "max_tokens": 12})
            expected.append(answer.text)
    base, sql, chat = expected
    assert len({base, sql, chat}) == 3
    error = {"type": "invalid_value", "message": 'line 5: `lora` is "law", which is no adapter; allowed: chat, sql'}
    assert texts == [base, sql, chat, sql, error, base]
    assert openai["response"]["body"]["choices"][0]["text"] == chat
    manifest = load_manifest(folder / "mixed.out.jsonl")
    assert manifest is not None
    assert "lora sql adapter_model.safetensors" in manifest.facts


@pytest.mark.parametrize("task", ["score", "embed"])
def test_rows_that_are_scored_or_embedded_choose_too(folder: Path, task: Literal["score", "embed"]) -> None:
    """In the same steps as rows without one, here by the call."""
    settings: dict[str, Any] = {"seed": 0, "task": "embed" if task == "embed" else "generate"}

    def numbers(lora: Any, rows: list[Any], names: list[str | None] | None = None) -> list[Any]:
        with LLM("demo", lora=lora, **settings) as llm:
            answers = list(llm.embed(rows, lora=names) if task == "embed" else llm.score(rows, lora=names))
        return [answer.embedding if task == "embed" else [answer["choices"][0]["logprob"]] for answer in answers]

    prompt = ROWS[1]["prompt"]
    base, merged = (numbers(lora, [prompt])[0] for lora in (None, str(folder / "one")))
    mixed = numbers({"adapters": {"sql": str(folder / "one")}}, [prompt, prompt], [None, "sql"])
    assert mixed == [pytest.approx(base, abs=1e-3), pytest.approx(merged, abs=1e-3)]
    assert base != pytest.approx(merged, abs=1e-2)


def test_adapters_are_merged_in_turn(folder: Path, nvcli_here: NvcliHere, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by choice, and one because batches cannot serve it. The way is a fact of the job, which goes on as it began
    whatever would be chosen now."""
    tensors = low_rank(demo_path(), LINEAR, seed=3, size=0.3)
    write_adapter(folder / "dora", {**tensors, **magnitudes(tensors)}, use_dora=True)
    names = ["sql", None, "chat", "dora", "sql", "dora", None, "chat"]
    rows = [{"id": number, "prompt": ROWS[1]["prompt"], "lora": name} for number, name in enumerate(names)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    always = ("in.jsonl", "-m", "demo", "--temperature", "0", "--max-tokens", "12")
    for name, path in (("sql", "one"), ("chat", "two"), ("dora", "dora")):
        always += ("--lora", f"{name}={path}")
    chosen = [(1,), (1,), ()]
    monkeypatch.setattr(adapter_modes, "choose_merged", lambda *args, **kwargs: chosen.pop(0))
    checked = nvcli_here("check", *always[:3], *always[7:], cwd=folder)
    assert "rows of sql, dora run adapter by adapter" in checked.stdout + checked.stderr
    part = nvcli_here("generate", *always, "--limit", "5", cwd=folder)
    assert part.returncode == 0, part.stderr
    assert "rows of sql, dora run adapter by adapter, each merged into the weights in its turn" in part.stderr
    done = nvcli_here("generate", *always, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert len(chosen) == 1, "an output that was begun goes on in the same ways"
    manifest = load_manifest(folder / "in.out.jsonl")
    assert manifest is not None
    assert manifest.facts["lora.merged"] == "sql, dora"
    expected = {}
    for name, path in (("sql", "one"), ("dora", "dora")):
        with LLM("demo", seed=0, lora=str(folder / path)) as llm:
            (answer,) = llm.generate([rows[0]["prompt"]], sampling={"temperature": 0, "max_tokens": 12})
            expected[name] = answer.text
    found = {row["id"]: row["choices"][0]["text"] for row in rows_of(folder / "in.out.jsonl")}
    expected |= {None: found[1], "chat": found[2]}
    assert len(set(expected.values())) == 4
    assert found == {number: expected[name] for number, name in enumerate(names)}
    (folder / "run.yaml").write_text("model: demo\nlora: {adapters: {sql: one, chat: two, dora: dora}, mode: merged}\n")
    other = nvcli_here("generate", "in.jsonl", "-c", "run.yaml", "--temperature", "0", "--max-tokens", "12", cwd=folder)
    assert other.returncode == 2
    assert "lora.merged: sql, dora → sql, chat, dora" in other.stderr


def test_adapters_that_rows_cannot_choose_are_refused(folder: Path, nvcli_here: NvcliHere) -> None:
    done = nvcli_here("generate", "in.jsonl", "-m", "demo", "--lora", "one", "--lora", "sql=two", cwd=folder)
    assert done.returncode == 2
    assert "`lora` has 2 adapters, and one has no name; name each (--lora NAME=PATH)" in done.stderr
    done = nvcli_here("generate", "in.jsonl", "-m", "demo", "--lora", "a=one", "--lora", "a=two", cwd=folder)
    assert done.returncode == 2
    assert "`lora` names a twice" in done.stderr
    for given, empty in (("=one", "name"), ("a=", "path")):
        with pytest.raises(ConfigError, match=f"`lora` has {given}, whose {empty} is empty"):
            adapter_choice(given)
    for adapters in ({"": "one"}, {"a": ""}):
        with pytest.raises(ConfigError, match=r"`lora.adapters` has .*; give each adapter a name and a path"):
            adapter_choice(LoraConfig(adapters=adapters))
    with pytest.raises(ConfigError, match="`lora` is an empty text; give a folder"):
        adapter_choice("")
    done = nvcli_here("check", "in.jsonl", "-m", "demo", "--set", "lora.mode=merged", "--lora", "a=one", cwd=folder)
    assert done.returncode == 2
    assert "--lora a=one: sets `lora` as a whole, and --set lora.mode=merged would be lost" in done.stderr
    done = nvcli_here("generate", "-m", "demo", "-p", "hi", "--lora", "sql=two", cwd=folder)
    assert done.returncode == 2
    assert "`lora` names adapters (sql), which rows choose from, and -p has no rows" in done.stderr
    tensors = low_rank(demo_path(), LINEAR)
    write_adapter(folder / "dora", {**tensors, **magnitudes(tensors)}, use_dora=True)
    (folder / "run.yaml").write_text("model: demo\nlora: {adapters: {a: dora}, mode: batched}\n")
    done = nvcli_here("generate", "in.jsonl", "-c", "run.yaml", cwd=folder)
    assert done.returncode == 2
    assert "`use_dora`: DoRA is not supported in a batch with other rows; with lora.mode: auto" in done.stderr
    done = nvcli_here("bench", "--shape", "qwen3-0.6b", "--lora", "one", cwd=folder)
    assert done.returncode == 2
    assert "--shape qwen3-0.6b makes up weights, and `lora` is" in done.stderr
