"""Inputs from elsewhere: fetched once, again when they are another file, and never where the disk has no room."""

from __future__ import annotations

import functools
import http.server
import json
import os
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.ipc
import pytest

from hub_process import run_with_hub
from nvcli.core.system import hub_access
from nvcli.errors import ConfigError
from nvcli.job.files import check_inputs, choose_output, expand_inputs
from nvcli.job.input import fetch
from nvcli.job.input.fetch import fetch_files
from nvcli.job.own_files import manifest_path

ROW = b'{"prompt": "p"}\n'


@pytest.fixture
def store() -> Iterator[Any]:
    store = fsspec.filesystem("memory")
    yield store
    store.rm("/bucket", recursive=True)


def names(found: list[str]) -> list[str]:
    return [Path(name).name for name in found]


def test_files_are_fetched_once_and_again_when_they_were_changed(tmp_path: Path, store: Any) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.txt"):
        store.pipe(f"/bucket/{name}", ROW)
    found = fetch_files("memory://bucket/*.jsonl", cache=tmp_path)
    assert names(found) == ["a.jsonl", "b.jsonl"]
    assert [Path(name).read_bytes() for name in found] == [ROW, ROW]
    before = [os.stat(name) for name in found]
    store.pipe("/bucket/b.jsonl", b'{"prompt": "q"}\n')  # of the same size
    again = fetch_files("memory://bucket/*.jsonl", cache=tmp_path)
    assert (again[0], os.stat(again[0])) == (found[0], before[0])
    assert Path(again[1]).read_bytes() == b'{"prompt": "q"}\n'
    assert [path for path in tmp_path.rglob("*") if path.name.startswith(".")] == []


def test_what_cannot_be_fetched(tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store.pipe("/bucket/x.jsonl", ROW)
    for url, told in (
        ("memory://bucket/none.jsonl", "there is no such file"),
        ("memory://bucket/*.csv", "matches no file"),
        ("memory://bucket", r"is a folder; name the files in it, such as memory://bucket/\*\.jsonl"),
        ("nothing://bucket/x", "cannot be fetched: ValueError: Protocol not known: nothing"),
        ("dropbox://bucket/x", r"the extra `remote` of nvcli brings what https://"),
    ):
        with pytest.raises(ConfigError, match=f"the input .*{told}"):
            fetch_files(url, cache=tmp_path)
    secret = "9f" * 8
    with pytest.raises(ConfigError) as raised:
        fetch_files(f"http://me:{secret}@127.0.0.1:1/x.jsonl?sig={secret}", cache=tmp_path)
    assert "the input http://***@127.0.0.1:1/x.jsonl?***: cannot be fetched" in str(raised.value)
    assert secret not in "".join(traceback.format_exception(raised.value))
    monkeypatch.setattr(hub_access.shutil, "disk_usage", lambda folder: shutil_usage(free=len(ROW) - 1))
    with pytest.raises(ConfigError, match=r"still to be downloaded, and the disk of .* free some space"):
        fetch_files("memory://bucket/x.jsonl", cache=tmp_path / "new")
    assert list(tmp_path.rglob("*.jsonl")) == []


def shutil_usage(*, free: int) -> Any:
    return type("Usage", (), {"free": free})()


def test_a_file_that_changes_while_it_is_fetched_is_not_taken(
    tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.pipe("/bucket/x.jsonl", ROW)
    get_file = type(store).get_file

    def slow(self: Any, source: str, target: str, **options: Any) -> None:
        get_file(self, source, target, **options)
        store.pipe("/bucket/x.jsonl", ROW + ROW)

    monkeypatch.setattr(type(store), "get_file", slow)
    with pytest.raises(ConfigError, match=r"x\.jsonl was changed while it was fetched"):
        fetch_files("memory://bucket/x.jsonl", cache=tmp_path)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_the_job_names_its_output_and_reads_local_files(
    tmp_path: Path, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    local = tmp_path / "a.jsonl"
    local.write_bytes(ROW)
    store.pipe("/bucket/x.csv", b"prompt\np\n")
    given = [str(local), "memory://bucket/x.csv"]
    assert expand_inputs(given, "out.jsonl") == given
    check_inputs(given)
    with pytest.raises(ConfigError, match=r"name the output with -o FILE.*memory://bucket/x\.csv"):
        choose_output(given[1:], None)
    assert names(fetch.fetch_inputs(given)) == ["a.jsonl", "x.csv"]
    store.pipe("/bucket/x.jsonl.gz", ROW)
    with pytest.raises(ConfigError, match="is not gzip data, as its name says"):
        fetch.fetch_inputs(["memory://bucket/x.jsonl.gz"])


class Handler(http.server.SimpleHTTPRequestHandler):
    fetched: list[str]

    def do_GET(self) -> None:
        self.fetched.append(self.path)
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_over_http(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "x.jsonl").write_bytes(ROW)
    handler = type("Fetches", (Handler,), {"fetched": []})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=tmp_path / "site"))
    threading.Thread(target=server.serve_forever).start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/x.jsonl?download=1"
        (found,) = fetch_files(url, cache=tmp_path / "cache")
        assert (Path(found).name, Path(found).read_bytes()) == ("x.jsonl", ROW)
        assert fetch_files(url, cache=tmp_path / "cache") == [found]
        assert handler.fetched == ["/x.jsonl?download=1"]
        os.utime(tmp_path / "site" / "x.jsonl", (time.time() + 100,) * 2)
        assert fetch_files(url, cache=tmp_path / "cache") != [found]
        with pytest.raises(ConfigError, match="there is no such file"):
            fetch_files(url.replace("x.jsonl", "y.jsonl"), cache=tmp_path / "cache")
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(ConfigError, match="cannot be fetched: ClientConnectorError: Cannot connect to host"):
        fetch_files(url, cache=tmp_path / "cache")


def arrow(path: Path) -> None:
    table = pyarrow.table({"prompt": ["p"]})
    with pyarrow.ipc.new_stream(path, table.schema) as writer:
        writer.write_table(table)


def test_a_dataset_that_was_saved_to_disk(tmp_path: Path) -> None:
    train = tmp_path / "data" / "train"
    train.mkdir(parents=True)
    files = [f"data-0000{number}-of-00002.arrow" for number in (1, 0)]
    for name in files:
        arrow(train / name)
    (train / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in files]}))
    (train / "dataset_info.json").write_text("{}")
    found = expand_inputs([str(train)], "out.jsonl")
    assert names(found) == files
    check_inputs(found)
    with pytest.raises(ConfigError, match=r"name the output with -o FILE: it cannot follow from the folder"):
        expand_inputs([str(train)])
    (tmp_path / "data" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(ConfigError, match=f"several splits; name one of them: {train}, "):
        expand_inputs([str(tmp_path / "data")], "out.jsonl")
    (train / "state.json").write_text(json.dumps({"_data_files": [], "_indices_data_files": [1]}))
    assert len(expand_inputs([str(train)], "out.jsonl")) == 2
    (train / "state.json").write_text("{")
    with pytest.raises(ConfigError, match=r"state\.json cannot be read"):
        expand_inputs([str(train)], "out.jsonl")


def test_a_folder_of_files(tmp_path: Path) -> None:
    output = tmp_path / "out.jsonl"
    for name in (
        "b.jsonl.gz",
        "a.jsonl",
        "README.md",
        "LICENSE.txt",
        "infos.json",
        ".x.jsonl",
        "out.jsonl",
        "a.out.jsonl",
    ):
        (tmp_path / name).write_bytes(ROW)
    manifest_path(output).write_bytes(b"{}")
    assert names(expand_inputs([str(tmp_path)], str(output))) == ["a.jsonl", "b.jsonl.gz"]
    (tmp_path / "c.csv").write_bytes(b"prompt\n")
    with pytest.raises(ConfigError, match=r"several formats \(a\.jsonl, c\.csv\); name files of one, such as '"):
        expand_inputs([str(tmp_path)], str(output))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="is a folder and holds no data files"):
        check_inputs(expand_inputs([str(tmp_path / "empty")], str(output)))


SHA, PARQUET_SHA = "a" * 40, "b" * 40
DATASETS: dict[str, dict[str, list[str]]] = {
    "o/converted": {
        SHA: ["README.md", "train.csv"],
        PARQUET_SHA: ["main/test/0000.parquet", "main/train/0001.parquet", "main/train/0000.parquet"],
    },
    "o/two": {PARQUET_SHA: ["en/train/0000.parquet", "de/partial-train/0000.parquet"], SHA: []},
    "o/plain": {
        SHA: ["data/train-00001-of-00002.jsonl", "data/train-00000-of-00002.jsonl", "de/test.jsonl.gz", "a.py"]
    },
    "o/nothing": {SHA: ["README.md"]},
}


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does for the files of `DATASETS`, each of which holds its own name."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0].strip("/")
        is_api = path.startswith("api/")
        owner, name, *rest = path.removeprefix("api/").removeprefix("datasets/").split("/", 3 if not is_api else 2)
        commits = DATASETS.get(f"{owner}/{name}")
        if commits is None:
            return self._answer("", 404, **{"X-Error-Code": "RepoNotFound"})
        revision = "main"
        if is_api and rest:
            revision = rest[0].split("/", 1)[1] if "/" in rest[0] else revision
        elif not is_api:
            revision = rest[1].split("/")[0]
        revision = revision.replace("%2F", "/").split("?")[0].removesuffix("/")
        commit = {"main": SHA, "refs/convert/parquet": PARQUET_SHA}.get(revision, revision)
        if commit not in commits:
            return self._answer("", 404, **{"X-Error-Code": "RevisionNotFound"})
        if is_api and rest and rest[0].startswith("tree/"):
            entries = [
                {"type": "file", "path": f, "size": len(f), "oid": f"{abs(hash(f)):040x}"[:40]} for f in commits[commit]
            ]
            return self._answer(json.dumps(entries))
        if is_api:
            siblings = [{"rfilename": file} for file in commits[commit]]
            return self._answer(json.dumps({"id": f"{owner}/{name}", "sha": commit, "siblings": siblings}))
        file = rest[1].split("/", 1)[1]
        return self._answer(file, **{"ETag": f'"{abs(hash(file)):040x}"', "X-Repo-Commit": commit})

    do_HEAD = do_GET

    def _answer(self, text: str, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(text))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(text.encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


ADDRESSES = {
    "hf://o/converted:train": ["main/train/0000.parquet", "main/train/0001.parquet"],
    "hf://o/converted/main:test": ["main/test/0000.parquet"],
    f"hf://o/converted@{SHA}:train": ["train.csv"],
    "hf://datasets/o/converted/train.csv": ["train.csv"],
    "hf://datasets/o/converted@refs%2Fconvert%2Fparquet/main/*/0000.parquet": [
        "main/test/0000.parquet",
        "main/train/0000.parquet",
    ],
    "hf://o/plain": ["data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl"],
    "hf://o/plain/de:test": ["de/test.jsonl.gz"],
    "hf://o/two/en": ["en/train/0000.parquet"],
    "hf://o/converted": "name one of its splits (test, train) after a colon",
    "hf://o/converted:validation": "name one of its splits (test, train) after a colon",
    "hf://o/converted/x:train": "name one of the dataset's configurations (main)",
    "hf://o/two:train": "name one of the dataset's configurations (de, en)",
    "hf://o/two/de:train": "The hub has made Parquet of its first part alone: take partial-train",
    "hf://o/nothing:train": "the dataset has no files that nvcli reads; it has README.md",
    "hf://o/plain@v9:train": "the dataset has no revision v9",
    "hf://o/none:train": "no such dataset on the Hugging Face hub",
    "hf://datasets/o/plain/x.csv": "the repository has no such file; it has a.py, data/train",
    "hf://squad": "is not the address of a dataset; write hf://OWNER/NAME:SPLIT",
}


@pytest.fixture(scope="module")
def fetched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each address gives, found out in one process: huggingface_hub reads its environment when it is imported."""
    code = (
        "from nvcli.errors import ConfigError\n"
        "from nvcli.job.input.fetch import fetch_dataset\n"
        "for address in sys.argv[1:]:\n"
        "    try: answer = fetch_dataset(address)\n"
        "    except ConfigError as error: answer = str(error)\n"
        "    print(json.dumps([address, answer]))\n"
    )
    done = run_with_hub(Hub, code, ADDRESSES, home=tmp_path_factory.mktemp("home"))
    return dict(json.loads(line) for line in done.stdout.splitlines())


@pytest.mark.parametrize("address", ADDRESSES)
def test_datasets_of_the_hub(fetched: dict[str, Any], address: str) -> None:
    expected, found = ADDRESSES[address], fetched[address]
    if isinstance(expected, str):
        assert found.startswith(f"the input {address}")
        assert expected in found
        return
    assert [name.partition("/snapshots/")[2].partition("/")[2] for name in found] == expected
    commit = SHA if "plain" in address or SHA in address or address.endswith("train.csv") else PARQUET_SHA
    assert all(f"/snapshots/{commit}/" in name for name in found)
    assert [Path(name).read_text() for name in found] == expected
