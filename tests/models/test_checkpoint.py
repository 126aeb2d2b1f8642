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


def resolve(name: str, home: Path, **env: str) -> str:
    """What `resolve_model` gives in a fresh process: the folder, or the LoadError's message."""
    code = (
        f"import sys; sys.path[:] = {sys.path!r}\n"
        "from nvcli.errors import LoadError\n"
        "from nvcli.models.checkpoint import resolve_model\n"
        "try: print(resolve_model(sys.argv[1]))\n"
        "except LoadError as error: print('LoadError:', error)\n"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and not k.lower().endswith("_proxy")}
    result = subprocess.run(
        [sys.executable, "-c", code, name],
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
    with pytest.raises(LoadError, match="the folder around it"):
        resolve_model(str(tmp_path / "model.safetensors"))


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
    index.unlink()
    assert len(weight_files(tmp_path)) == 3
    (tmp_path / "model.safetensors").write_text("")
    assert [file.name for file in weight_files(tmp_path)] == ["model.safetensors"]
