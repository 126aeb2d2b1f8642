"""A model of the hub is looked at before it is fetched: its configuration, its files, and the room that it needs.

The hub is a server on this machine. It holds small files and says that weights are as large as a test wants. All cases
of a hub run in one process of their own: huggingface_hub reads its environment when it is imported.
"""

from __future__ import annotations

import http.server
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hub_process import run_with_hub
from nvcli.core.system.hub_access import DownloadSize
from nvcli.demo import demo_path
from nvcli.errors import LoadError

SHA = "a" * 40
TAG, TAG_SHA = "v1", "b" * 40
CONFIG = (demo_path() / "config.json").read_text()
SMALL = {"config.json": CONFIG, "tokenizer.json": "{}", "modeling_x.py": "raise SystemExit", "pytorch_model.bin": "x"}
REPOSITORIES: dict[str, dict[str, str]] = {
    "someone/good": {
        **SMALL,
        "model.safetensors": "w" * 1000,
        **{f"{folder}/model.safetensors": "w" * 1000 for folder in ("original", "half", "2_Dense")},
    },
    "someone/looked-at": {**SMALL, "model.safetensors": "w", "model.safetensors.index.json": "{}"},
    "someone/huge": {**SMALL, "model.safetensors": "w" * 1000},
    "someone/other-kind": {"config.json": '{"architectures": ["OtherForCausalLM"]}', "model.safetensors": "w"},
    "someone/pickles": SMALL,
    "someone/other-weights": {"config.json": CONFIG, "model.pt": "w"},
    "someone/empty": {"README.md": "nothing"},
    "someone/gguf": {"config.json": CONFIG, "model-Q4_K_M.gguf": "w" * 1000, "mmproj-model-F16.gguf": "w"},
    "someone/two-sizes": {"4B-Q8_0.gguf": "w", "8B-Q8_0.gguf": "w", "8B-F16.gguf": "w", "8B.mmproj-F16.gguf": "w"},
    "someone/ggufs": {
        "model-Q4_K_M.gguf": "w",
        "Q8_0/model-Q8_0-00001-of-00002.gguf": "w",
        "Q8_0/model-Q8_0-00002-of-00002.gguf": "w",
    },
    "someone/both": {**SMALL, "model.safetensors": "w", "model-F16.gguf": "w"},
    "someone/rwkv-gguf": {"model-F16.gguf": "w"},
    "someone/adapter": {
        "adapter_config.json": '{"base_model_name_or_path": "someone/good"}',
        "adapter_model.safetensors": "w",
    },
    "someone/loha": {"adapter_config.json": '{"peft_type": "LOHA"}', "adapter_model.safetensors": "w"},
    "someone/lora": {
        "adapter_config.json": '{"r": 8}',
        "adapter_model.safetensors": "w",
        "checkpoint-5/adapter_model.safetensors": "w",
        "optimizer.pt": "w",
    },
    "someone/pickled-lora": {"adapter_config.json": '{"r": 8}', "adapter_model.bin": "w"},
}
HUGE = 1 << 60
"""The size of `someone/huge`'s weights, as its hub says."""


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does for the files of `REPOSITORIES`, and keeps the names of those that were fetched."""

    fetched: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        if path.startswith("api/models/"):
            name, _, rest = self._split(path.removeprefix("api/models/"))
            files = REPOSITORIES[name]
            if rest == "revision/v9":
                self.send_response(404)
                self.send_header("X-Error-Code", "RevisionNotFound")
                self.send_header("Content-Length", "0")
                self.end_headers()
            elif rest.startswith("tree/"):
                self._answer(json.dumps([self._entry(name, file) for file in files]))
            else:
                siblings = [{"rfilename": file} for file in files]
                sha = TAG_SHA if rest in (f"revision/{TAG}", f"revision/{TAG_SHA}") else SHA
                described = {"gguf": {"architecture": "rwkv7"}} if "rwkv" in name else {}
                self._answer(json.dumps({"id": name, "sha": sha, "siblings": siblings, **described}))
            return
        name, _, rest = self._split(path)
        file = rest.split("/", 2)[2]
        if file not in REPOSITORIES[name]:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        if self.command == "GET":
            self.fetched.append(f"{name}/{file}")
        self._answer(
            REPOSITORIES[name][file],
            **{"ETag": f'"{self._entry(name, file)["oid"]}"', "X-Repo-Commit": rest.split("/")[1]},
        )

    do_HEAD = do_GET

    @staticmethod
    def _split(path: str) -> tuple[str, str, str]:
        owner, repository, *rest = path.split("/", 2)
        return f"{owner}/{repository}", "/", rest[0] if rest else ""

    @staticmethod
    def _entry(name: str, file: str) -> dict[str, Any]:
        is_huge = name == "someone/huge" and file.endswith(".safetensors")
        size = HUGE if is_huge else len(REPOSITORIES[name][file])
        return {"type": "file", "path": file, "size": size, "oid": f"{abs(hash((name, file))):040x}"[:40]}

    def _answer(self, text: str, **headers: str) -> None:
        self.send_response(200)
        name = self._split(self.path.strip("/"))[0]
        if name == "someone/huge" and self.path.endswith(".safetensors"):
            headers["X-Linked-Size"] = str(HUGE)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """For each repository, what `resolve_model` gives, what the hub was asked for, and what lies in the cache then."""
    code = (
        "from nvcli.core.config import RunConfig\n"
        "from nvcli.tools.doctor.model_files import check_model_files\n"
        "from nvcli.errors import ConfigError, LoadError\n"
        "from nvcli.models.checkpoint import resolve_model\n"
        "for name in sys.argv[1:]:\n"
        "    finding = check_model_files(RunConfig(model=name)).findings[0]\n"
        "    try: answer = str(resolve_model(name, weights=name != 'someone/looked-at'))\n"
        "    except (ConfigError, LoadError) as error: answer = f'{type(error).__name__}: {error}'\n"
        "    print(json.dumps([name, answer, finding.level.name, finding.found, finding.advice]))\n"
        "for revision in ('v1', 'v9'):\n"
        "    try: answer = str(resolve_model('someone/good', revision=revision))\n"
        "    except LoadError as error: answer = str(error)\n"
        "    print(json.dumps([revision, answer, '', '', '']))\n"
        "from nvcli.models.adapters.find import find_adapter\n"
        "for name in ('someone/lora@v1', 'someone/loha', 'someone/pickled-lora', 'someone/lora@v9'):\n"
        "    try: answer = [str(find_adapter(name)), str(find_adapter(name))][1]\n"
        "    except LoadError as error: answer = str(error)\n"
        "    print(json.dumps([f'--lora {name}', answer, '', '', '']))\n"
    )
    tagged = [f"someone/{name}" for name in ("ggufs:q8_0", "ggufs:Q3_K", "both:F16", "two-sizes:Q8_0")]
    done = run_with_hub(Hub, code, [*REPOSITORIES, *tagged], home=tmp_path_factory.mktemp("home"))
    assert "dry-run" not in done.stderr
    return {
        name: {"answer": answer, "level": level, "finding": finding, "advice": advice}
        for name, answer, level, finding, advice in map(json.loads, done.stdout.splitlines())
    }


def fetched(name: str) -> list[str]:
    return sorted(file.removeprefix(f"{name}/") for file in Hub.fetched if file.startswith(f"{name}/"))


def test_a_good_model_is_downloaded_without_code_and_second_copies(answers: dict[str, dict[str, Any]]) -> None:
    answer = answers["someone/good"]
    folder = Path(answer["answer"])
    assert sorted(file.name for file in folder.iterdir()) == [
        *("2_Dense", "config.json", "model.safetensors", "tokenizer.json")
    ]
    assert fetched("someone/good") == [
        *("2_Dense/model.safetensors", "config.json", "model.safetensors", "tokenizer.json")
    ]
    assert answer["level"] == "WARNING"
    assert "the first run would download" in answer["finding"]


def test_a_model_whose_rows_are_only_looked_at_is_fetched_without_weights(answers: dict[str, dict[str, Any]]) -> None:
    folder = Path(answers["someone/looked-at"]["answer"])
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "tokenizer.json"]
    assert fetched("someone/looked-at") == ["config.json", "tokenizer.json"]


def test_an_architecture_is_refused_before_its_weights_are_fetched(answers: dict[str, dict[str, Any]]) -> None:
    answer = answers["someone/other-kind"]["answer"]
    assert answer.startswith(
        "ConfigError: model someone/other-kind was not downloaded, as its configuration is refused:"
    )
    assert "OtherForCausalLM is not supported" in answer
    assert fetched("someone/other-kind") == ["config.json"]


def test_a_model_that_the_disk_cannot_hold_is_not_begun(answers: dict[str, dict[str, Any]]) -> None:
    answer = answers["someone/huge"]
    assert "1,073,741,824.0 GiB are still to be downloaded" in answer["answer"]
    assert "HF_HUB_CACHE" in answer["answer"]
    assert fetched("someone/huge") == ["config.json"]
    assert answer["level"] == "PROBLEM"
    assert "still to be downloaded" in answer["finding"]


def test_torchs_own_files_are_fetched_where_there_are_no_safetensors(answers: dict[str, dict[str, Any]]) -> None:
    folder = Path(answers["someone/pickles"]["answer"])
    assert sorted(file.name for file in folder.iterdir()) == ["config.json", "pytorch_model.bin", "tokenizer.json"]
    assert "pytorch_model.bin" not in fetched("someone/good")


@pytest.mark.parametrize(
    ("name", "told"), [("someone/other-weights", "no *.safetensors files and no"), ("someone/empty", "config.json")]
)
def test_a_repository_that_holds_no_model(answers: dict[str, dict[str, Any]], name: str, told: str) -> None:
    assert answers[name]["answer"].startswith("LoadError: ")
    assert told in answers[name]["answer"]
    assert set(fetched(name)) <= {"config.json"}


def test_an_adapter_is_named_before_weights_are_fetched(answers: dict[str, dict[str, Any]]) -> None:
    assert "someone/adapter: a LoRA adapter for someone/good" in answers["someone/adapter"]["answer"]
    assert fetched("someone/adapter") == ["adapter_config.json"]


def test_one_model_in_gguf_is_fetched(answers: dict[str, dict[str, Any]]) -> None:
    """The only one of a repository, or the quantisation that is named, which beside other weights has to be."""
    for name, fetches in (
        ("gguf", ["model-Q4_K_M.gguf"]),
        ("ggufs:q8_0", ["Q8_0/model-Q8_0-00001-of-00002.gguf", "Q8_0/model-Q8_0-00002-of-00002.gguf"]),
        ("both:F16", ["config.json", "model-F16.gguf", "model.safetensors", "tokenizer.json"]),
    ):
        assert "truncated or not a GGUF file" in answers[f"someone/{name}"]["answer"], name
        assert "the first run would download" in answers[f"someone/{name}"]["finding"], name
        hub_id = f"someone/{name.partition(':')[0]}"
        assert fetched(hub_id) == fetches
        chosen = " ".join(file for file in fetches if file.endswith(".gguf"))
        assert f"hf download {hub_id} {chosen}, then" in answers[f"someone/{name}"]["advice"]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("ggufs", "someone/ggufs: several GGUF models: Q8_0, Q4_K_M; name one: someone/ggufs:Q8_0"),
        ("two-sizes:Q8_0", "someone/two-sizes:Q8_0: 2 GGUF models Q8_0; there are: 4B-Q8_0, F16, 8B-Q8_0"),
        ("ggufs:Q3_K", "someone/ggufs:Q3_K: no GGUF models Q3_K; there are: Q8_0, Q4_K_M"),
        ("rwkv-gguf", 'someone/rwkv-gguf: `general.architecture`: "rwkv7" is not supported in GGUF'),
    ],
)
def test_models_in_gguf_that_are_not_there_or_not_read_are_not_fetched(
    answers: dict[str, dict[str, Any]], name: str, told: str
) -> None:
    for found in (answers[f"someone/{name}"][kind] for kind in ("answer", "finding")):
        assert told in found
    assert not any("Q4_K_M" in file or "rwkv" in file for file in (*fetched("someone/ggufs"), *fetched(name)))


def test_a_revision_is_downloaded_as_it_is_named(answers: dict[str, dict[str, Any]]) -> None:
    assert Path(answers["someone/good"]["answer"]).name == SHA
    folder = Path(answers[TAG]["answer"])
    assert folder.name == TAG_SHA
    assert (folder / "model.safetensors").is_file()
    assert "no such revision (branch, tag or commit) of this model" in answers["v9"]["answer"]


def test_an_adapter_is_downloaded_once_it_is_known_to_be_served(answers: dict[str, dict[str, Any]]) -> None:
    folder = Path(answers["--lora someone/lora@v1"]["answer"])
    assert folder.name == TAG_SHA
    assert sorted(file.name for file in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    assert '`peft_type`: "LOHA" is not supported' in answers["--lora someone/loha"]["answer"]
    assert "adapter_model.safetensors" not in fetched("someone/loha")
    assert answers["--lora someone/pickled-lora"]["answer"].startswith(
        "adapter someone/pickled-lora: its repository has no adapter_model.safetensors"
    )
    assert "no such revision (branch, tag or commit) of this adapter" in answers["--lora someone/lora@v9"]["answer"]


def test_as_much_room_as_is_needed_is_enough() -> None:
    DownloadSize(num_bytes=5, free_bytes=5, folder=Path("/cache")).check_room("model m", LoadError)
    with pytest.raises(LoadError, match=r"model m: .* the disk of /cache has .* free some space"):
        DownloadSize(num_bytes=6, free_bytes=5, folder=Path("/cache")).check_room("model m", LoadError)
