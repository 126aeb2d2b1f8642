"""From a model's name to its folder: local folders, the Hugging Face cache, the hub, and clear words when none has it.

Hub cases run in a process of their own: huggingface_hub reads its environment when it is imported. The hub they speak
to is a server on this machine.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nvcli.errors import ConfigError, LoadError
from nvcli.models.adapters.find import find_adapter
from nvcli.models.checkpoint import resolve_model, weight_files

NAME = "someone/some-model"
DEAD_HUB = "http://127.0.0.1:9"


class FakeHub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does for a gated and for an unknown model."""

    def do_GET(self) -> None:
        gated = "gated" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def resolve(name: str, home: Path, revision: str = "", **env: str) -> str:
    """What `resolve_model` gives in a fresh process: the folder, or the LoadError's message."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from nvcli.errors import LoadError\n"
        "from nvcli.models.checkpoint import resolve_model\n"
        "try: print(resolve_model(sys.argv[1], revision=sys.argv[2] or None))\n"
        "except LoadError as error: print('LoadError:', error)\n"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    result = subprocess.run(
        [sys.executable, "-c", code, name, revision],
        env={**kept, "HF_HOME": str(home), **env},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    return result.stdout.strip()


def cached(home: Path, *, files: list[str]) -> Path:
    """The Hugging Face cache's layout with these files of `NAME`."""
    repo = home / "hub" / "models--someone--some-model"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    for file in files:
        (snapshot / file).write_text("{}")
    return snapshot


def test_a_folder_is_its_own_answer(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_relative_folder_wins_over_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "someone" / "some-model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve_model(NAME) == Path(NAME)


@pytest.mark.parametrize("name", ["./none", "/no/such/folder", "~/no-such-folder", "a/b/c", "no such folder"])
def test_paths_are_not_looked_up_in_the_hub(name: str) -> None:
    with pytest.raises(LoadError, match="no such folder"):
        resolve_model(name)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(LoadError, match="the folder that holds it"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_a_folder_that_must_not_be_listed_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> list[str]:
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr("os.listdir", refuse)
    with pytest.raises(LoadError, match=f"^{tmp_path}: Permission denied$"):
        resolve_model(str(tmp_path))


def test_a_folder_of_checkpoints_names_them(tmp_path: Path) -> None:
    for name in ("checkpoint-100", "checkpoint-200", "logs"):
        (tmp_path / name).mkdir()
    for name in ("checkpoint-100", "checkpoint-200"):
        (tmp_path / name / "config.json").write_text("{}")
    with pytest.raises(LoadError, match=r"no model, but a folder with checkpoint-100, checkpoint-200; name one: "):
        resolve_model(str(tmp_path))


def test_an_adapter_is_named_with_its_base_model_and_how_to_give_both(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "someone/base"}')
    (tmp_path / "adapter_model.safetensors").write_text("")
    with pytest.raises(LoadError, match=r"a LoRA adapter for someone/base .*not a whole model") as error:
        resolve_model(str(tmp_path))
    assert str(error.value).endswith(f"the adapter as --lora: -m someone/base --lora {tmp_path}")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "a$(touch b)"}))
    with pytest.raises(LoadError) as error:
        resolve_model(str(tmp_path))
    assert str(error.value).endswith(f": -m BASE --lora {tmp_path}"), "the command may be copied"
    (tmp_path / "model.safetensors").write_text("")
    assert resolve_model(str(tmp_path)) == tmp_path, "a whole model with an adapter beside it"


def test_revisions_are_those_of_the_hub(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='`revision` is "v1", and the model demo is built in'):
        resolve_model("demo", revision="v1")
    with pytest.raises(ConfigError, match=r'`revision` is "v1", and the model .* is a folder'):
        resolve_model(str(tmp_path), revision="v1")
    with pytest.raises(LoadError, match="no such folder; a revision of a model on the hub is named with --revision"):
        resolve_model("someone/model@v1")
    for name, told in (
        (
            "https://huggingface.co/Qwen/Qwen3-8B/tree/main",
            "folder; a model on the hub is named by its id: Qwen/Qwen3-8B",
        ),
        ("hf://Qwen/Qwen3-8B", "folder; a model on the hub is named by its id: Qwen/Qwen3-8B"),
        ("hf.co/o/m-GGUF:Q8_0", "folder; a model on the hub is named by its id: o/m-GGUF:Q8_0"),
        ("https://hf.co/o/m-GGUF/blob/main/m.gguf", "file; a model on the hub is named by its id: o/m-GGUF"),
        ("m.gguf", "file"),
    ):
        with pytest.raises(LoadError) as error:
            resolve_model(name)
        assert str(error.value) == f"{name}: no such {told}"


def test_what_the_cache_has_of_a_model_that_cannot_be_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    commit = "c0ffee" + 34 * "0"
    snapshot = tmp_path / "models--o--m" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors.index.json").write_text('{"weight_map": {"a": "1.safetensors"}}')
    (snapshot / "1.safetensors").symlink_to("../../blobs/gone")
    for revision, weights, told in (
        (commit, True, f"the cache has a part of it: {snapshot} lacks 1.safetensors"),
        (commit, False, f"the cache has a part of it: {snapshot} lacks tokenizer.json"),
        (None, True, f"the cache has other revisions of it (--revision): {commit}"),
    ):
        with pytest.raises(LoadError, match="HF_HUB_OFFLINE forbids downloading it") as error:
            resolve_model("o/m", revision=revision, weights=weights)
        assert str(error.value).endswith(f"\n{told}")
    with pytest.raises(LoadError, match=r"adapter o/a: not in the local .*HF_HUB_OFFLINE forbids downloading it"):
        find_adapter("o/a")  # of which the hub is asked in a dry run
    (snapshot / "m-Q8_0.gguf").write_text("")
    with pytest.raises(LoadError, match="HF_HUB_OFFLINE forbids downloading it") as error:
        resolve_model("o/m:Q4_K_M", revision=commit)
    assert str(error.value).endswith("\nin the cache: o/m:Q4_K_M: no GGUF models Q4_K_M; there are: Q8_0")
    for file in snapshot.glob("*.safetensors*"):
        file.unlink()
    with pytest.raises(LoadError, match=r"name its quantisation, as in o/m:Q4_K_M$"):  # not taken for o/m itself
        resolve_model("o/m", revision=commit)


def test_a_folder_of_the_cache_is_the_snapshot_of_a_revision(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, files=["config.json", "model.safetensors"])
    folder, other = snapshot.parent.parent, snapshot.parent / ("b" * 40)
    other.mkdir()
    (folder / "refs" / "v1").write_text("b" * 40)
    assert resolve_model(str(folder)) == snapshot
    assert resolve_model(str(folder), revision="v1") == other
    assert resolve_model(str(folder), revision="b" * 40) == other
    for wrong in ("v2", "../..", "."):
        with pytest.raises(LoadError, match=f"no revision .* in this folder .*; there are: {'a' * 40}, {'b' * 40}"):
            resolve_model(str(folder), revision=wrong)


def test_the_cache_serves_a_revision(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, files=["config.json", "model.safetensors"])
    (snapshot.parent.parent / "refs" / "v1").write_text("a" * 40)
    (snapshot.parent.parent / "refs" / "main").write_text("c" * 40)
    assert resolve(NAME, tmp_path, "v1", HF_ENDPOINT=DEAD_HUB) == str(snapshot)
    assert resolve(NAME, tmp_path, "a" * 40, HF_HUB_OFFLINE="1") == str(snapshot)
    assert "cannot be reached" in resolve(NAME, tmp_path, "v2", HF_ENDPOINT=DEAD_HUB)


def test_the_cache_serves_without_a_network(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, files=["config.json", "model.safetensors"])
    assert resolve(NAME, tmp_path, HF_ENDPOINT=DEAD_HUB) == str(snapshot)
    assert resolve(NAME, tmp_path, HF_HUB_OFFLINE="1") == str(snapshot)


def test_an_interrupted_download_is_not_taken_for_the_model(tmp_path: Path) -> None:
    snapshot = cached(tmp_path, files=["config.json"])
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    (snapshot / "model-00001-of-00002.safetensors").write_text("")
    assert resolve(NAME, tmp_path, HF_ENDPOINT=DEAD_HUB).startswith("LoadError: model someone/some-model")


def test_no_network_fails_at_once_and_says_what_to_do(tmp_path: Path) -> None:
    start = time.monotonic()
    answer = resolve(NAME, tmp_path, HF_ENDPOINT=DEAD_HUB)
    assert time.monotonic() - start < 15, "no retries"
    assert answer.startswith(f"LoadError: model {NAME}: ")
    assert "cannot be reached" in answer
    assert "local folder" in answer


def test_offline_mode_is_named(tmp_path: Path) -> None:
    answer = resolve(NAME, tmp_path, HF_HUB_OFFLINE="1")
    assert answer.startswith(f"LoadError: model {NAME}: ")
    assert "HF_HUB_OFFLINE" in answer


def test_gated_model(tmp_path: Path, hub: str) -> None:
    answer = resolve("someone/gated", tmp_path, HF_ENDPOINT=hub)
    assert answer.startswith("LoadError: model someone/gated: a gated model")
    assert "hf auth login" in answer


def test_unknown_model(tmp_path: Path, hub: str) -> None:
    assert "no such model" in resolve("someone/unknown", tmp_path, HF_ENDPOINT=hub)
    assert "no such folder" in resolve("qwen", tmp_path, HF_ENDPOINT=hub)


def test_no_name() -> None:
    with pytest.raises(ConfigError, match="`model` is empty"):
        resolve_model("")


def test_weight_files_prefer_the_index(tmp_path: Path) -> None:
    """Some repositories ship the weights twice, whole and in parts."""
    for file in ("model-1.safetensors", "model-2.safetensors", "consolidated.safetensors"):
        (tmp_path / file).write_text("")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    assert [file.name for file in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]
    (tmp_path / "model.safetensors").write_text("")  # transformers has saved again, and left the index behind
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]
    (tmp_path / "model.safetensors").unlink()
    index.unlink()
    assert len(weight_files(tmp_path)) == 3
