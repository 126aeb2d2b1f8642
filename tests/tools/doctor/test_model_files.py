"""Everything that is wrong with a model's folder is found, each with its file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from adapters import low_rank, magnitudes, write_adapter
from checkpoints import edit_json
from eagle3_heads import write_head
from nvcli.core.config import RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.lora_config import LoraConfig, LoraMode
from nvcli.core.speculation_config import SpeculationConfig
from nvcli.core.system.nvidia_smi import SmiReport
from nvcli.demo import demo_path
from nvcli.errors import LoadError
from nvcli.models.hub import DownloadSize
from nvcli.sizing.weights import weight_bytes
from nvcli.tools.doctor import model_files
from nvcli.tools.doctor.examination import _layout as layout_of
from nvcli.tools.doctor.findings import Finding, Level
from nvcli.tools.doctor.model_files import ModelFiles, check_model_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(demo_path(), tmp_path / "model"))


def check_files(model: Path | str, *, draft_head: str = "auto") -> ModelFiles:
    return check_model_files(RunConfig(model=str(model), speculation=SpeculationConfig(method=draft_head)))


def problems(files: ModelFiles) -> list[Finding]:
    return [finding for finding in files.findings if finding.level == Level.PROBLEM]


def test_a_sound_folder(folder: Path) -> None:
    files = check_files(folder)
    assert {finding.level for finding in files.findings} == {Level.OK}
    assert files.config is not None
    assert files.tensors is not None
    stored = sum(info.num_bytes for info in files.tensors.values())
    assert stored == sum(weight_bytes(files.config, "bfloat16").values())


def test_no_folder() -> None:
    (finding,) = check_files("./none").findings
    assert (finding.level, finding.found) == (Level.PROBLEM, "./none: no such folder")


def test_a_model_that_would_be_downloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "find_model", lambda name, revision: None)
    monkeypatch.setattr(model_files, "check_reachable", lambda name, revision: [])
    size = DownloadSize(num_bytes=16 << 30, free_bytes=20 << 30, folder=Path("/cache"))
    monkeypatch.setattr(model_files, "download_size", lambda name, revision: size)
    (finding,) = check_files("someone/model").findings
    assert finding.level == Level.WARNING
    assert "would download 16.0 GiB (20.0 GiB are free)" in finding.found
    assert "hf download someone/model" in finding.advice

    def unreachable(name: str, revision: str | None) -> None:
        raise LoadError("the hub cannot be reached")

    monkeypatch.setattr(model_files, "check_reachable", unreachable)
    monkeypatch.setattr(model_files, "parts_in_cache", lambda name, revision: "the cache has a part of it: lacks x")
    (finding,) = check_files("someone/model").findings
    assert finding.level == Level.PROBLEM
    assert finding.found == "the hub cannot be reached; the cache has a part of it: lacks x"
    assert finding.advice.startswith("download it where the hub can be reached, or name a folder")


def test_several_things_wrong_at_once(folder: Path) -> None:
    """One broken file does not hide another."""
    (folder / "config.json").write_text("{")
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model-1.safetensors").write_bytes(whole[:-1000])
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = [finding.found for finding in problems(check_files(folder))]
    assert len(found) == 3
    for part, text in zip(
        ("config.json: not valid JSON", "truncated", "model-2.safetensors: no such"), found, strict=True
    ):
        assert part in text


def test_many_missing_files_are_summed_up(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    weight_map = {str(n): f"model-{n}.safetensors" for n in range(20)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    found = problems(check_files(folder))
    assert len(found) == 6
    assert "15 files more" in found[-1].found


def test_an_index_that_promises_too_much(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"none": "model.safetensors"}}))
    (finding,) = problems(check_files(folder))
    assert "tensor none is missing" in finding.found


@pytest.mark.parametrize("extra", [b"", b"more"])
def test_sizes_are_held_against_headers(folder: Path, extra: bytes) -> None:
    """Files that safetensors would refuse are refused here, and no others."""
    from safetensors import SafetensorError, safe_open

    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes() + extra)
    assert bool(problems(check_files(folder))) == bool(extra)
    if extra:
        with pytest.raises(SafetensorError), safe_open(file, framework="np"):
            pass


def test_an_unknown_architecture(folder: Path) -> None:
    edit_json(folder / "config.json", architectures=["OtherForCausalLM"])
    (finding,) = problems(check_files(folder))
    assert "OtherForCausalLM is not supported: its config.json has the keys of " in finding.found


def test_end_of_sequence_ids(folder: Path) -> None:
    edit_json(folder / "generation_config.json", suppress_tokens=[7], min_length=9)
    (finding,) = [f for f in check_files(folder).findings if f.name == "generation config"]
    assert finding.found.endswith(
        "bad_words [[7]]; not applied, unlike in transformers: `min_length` 9 (set `sampling.min_tokens`)"
    )
    (folder / "generation_config.json").unlink()
    files = check_files(folder)
    assert [f.level for f in files.findings if f.name == "generation config"] == [Level.NOTE]
    edit_json(folder / "config.json", eos_token_id=None)
    files = check_files(folder)
    assert [f.level for f in files.findings if f.name == "generation config"] == [Level.WARNING]


def test_the_head_that_drafts(tmp_path: Path) -> None:
    write_head(tmp_path / "head", demo_path(), layers=(0, 3, 6))
    files = check_files("demo", draft_head=str(tmp_path / "head"))
    assert files.findings[-1].found == f"{tmp_path / 'head'}, reads the states before layers 0, 3, 6"
    assert files.config is not None
    assert files.config.draft_head is not None
    for name in ("mtp", str(tmp_path / "none")):
        (finding,) = problems(check_files("demo", draft_head=name))
        assert "`speculation.method`" in finding.found


def test_adapters_that_rows_choose(tmp_path: Path) -> None:
    """They are served as `resolve_engines` serves them, and the layout counts on them."""
    tensors = low_rank(demo_path())
    write_adapter(tmp_path / "plain", tensors)
    write_adapter(tmp_path / "dora", {**tensors, **magnitudes(tensors)}, use_dora=True)
    adapters = {name: str(tmp_path / name) for name in ("plain", "dora", "none")}

    def check(mode: LoraMode, *names: str) -> tuple[ModelFiles, EngineConfig]:
        lora = LoraConfig(adapters={name: adapters[name] for name in names}, mode=mode)
        run = RunConfig(model="demo", device="cpu", lora=lora)
        files = check_model_files(run)
        config, *_ = layout_of(run, files, "cpu", SmiReport())
        assert config is not None
        return files, config

    files, config = check("auto", "plain", "dora")
    assert not problems(files)
    assert files.findings[-1].found.endswith("dora, changes 49 tensors, merged in its turn")
    assert (config.merged_adapters, config.lora_sizes.ranks) == ((2,), (4, 4))
    assert check("merged", "plain", "dora")[1].merged_adapters == (1, 2)
    files, config = check("batched", "dora", "none", "plain")
    assert [finding.name for finding in problems(files)] == ["adapter", "adapter"]
    assert (config.lora_paths, config.merged_adapters) == ((tmp_path / "plain",), ())
