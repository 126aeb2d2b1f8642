"""Every mistake with files is a ConfigError that says what to do, before anything is started."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from nvcli.errors import ConfigError
from nvcli.job.files import (
    check_inputs,
    check_output,
    choose_output,
    expand_inputs,
    folder_made,
    is_terminal,
    job_files,
    split_outputs,
)
from nvcli.job.own_files import manifest_path, own_files
from nvcli.job.shard import Shard


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.jsonl", "a.out.jsonl"),
        ("d/a.jsonl.gz", "d/a.out.jsonl"),
        ("a.jsonl.zst", "a.out.jsonl"),
        ("d/a.parquet", "d/a.out.parquet"),
        ("-", "-"),
        ("a.json", "a.out.jsonl"),
        ("A.JSONL.GZ", "A.out.jsonl"),
        ("a.txt", "a.out.jsonl"),
        ("a.csv", "a.out.csv"),
        ("A.CSV", "A.out.csv"),
        ("a.csv.GZ", "a.out.csv"),
        ("d/a.tsv.gz", "d/a.out.tsv"),
        ("a.arrow", "a.out.parquet"),
        (".jsonl", ".jsonl.out.jsonl"),
        ("/dev/shm/a.jsonl", "/dev/shm/a.out.jsonl"),
    ],
)
def test_the_output_stands_beside_the_input(name: str, expected: str) -> None:
    assert choose_output([name], None) == expected


@pytest.mark.parametrize(
    ("inputs", "which"),
    [(["a", "b"], "several inputs"), (["-", "a"], "several inputs"), (["/dev/fd/63"], "/dev/fd/63")],
)
def test_the_output_must_be_named_where_it_does_not_follow(inputs: list[str], which: str) -> None:
    with pytest.raises(ConfigError, match=f"-o.*{which}"):
        choose_output(inputs, None)
    assert choose_output(inputs, "x") == "x"


def test_inputs(tmp_path: Path) -> None:
    good, link = tmp_path / "a.jsonl", tmp_path / "link.jsonl"
    good.touch()
    link.symlink_to(good)
    check_inputs([str(good), "-"])
    for inputs, message in [
        ([str(tmp_path / "no.jsonl")], "there is no input file"),
        ([f"{good}/"], "there is no input file"),
        ([str(tmp_path)], "is a folder"),
        ([str(good), str(link)], r"link\.jsonl is given twice: .*a\.jsonl is the same file"),
        (["-", "-"], "given twice"),
        (["a" * 300], "cannot be read: File name too long"),
        ([""], "the input cannot be read: its name is empty"),
        ([os.fsdecode(b"caf\xe9.jsonl")], "cannot be read: its name is not UTF-8 text; rename it"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_inputs(inputs)


def test_outputs(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.touch()
    existing = tmp_path / "b.jsonl"
    existing.touch()
    link = tmp_path / "link.jsonl"
    link.symlink_to(source)
    for output, message in [
        (source, "also an input"),
        (link, "also an input"),
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "c.jsonl", "mkdir -p"),
        (existing / "no" / "c.jsonl", "b.jsonl is a file, not a folder"),
        (tmp_path / ("a" * 300), "cannot be written: File name too long"),
        ("", "the output cannot be written: its name is empty"),
        (tmp_path / ("a" * 245), r"is called /.*/a+\.manifest\.json, and that is longer .* a shorter name with -o"),
        (tmp_path / ("a" * 237), r"/\.a+\.manifest\.json\.tmp, and that is longer"),
        (tmp_path / os.fsdecode(b"caf\xe9.jsonl"), "its name is not UTF-8 text"),
    ]:
        with pytest.raises(ConfigError, match=message):
            check_output([str(source)], str(output))
    for output in ("-", "/dev/null", str(existing), str(tmp_path / "new.jsonl"), str(tmp_path / "c.jsonl.gz")):
        check_output([str(source)], output)
    assert not (tmp_path / "new.jsonl").exists()


def test_a_path_longer_than_linux_takes_is_refused(tmp_path: Path) -> None:
    deep = str(tmp_path)
    while len(deep) < 3800:
        deep += "/" + "d" * min(250, 3800 - len(deep))
    os.makedirs(deep)
    for num_bytes, message in [(4090, "is called /.* and that is longer"), (4200, "File name too long")]:
        output = f"{deep}/{'a' * 200}/.././{'b' * 70}"
        output += "c" * (num_bytes - len(output))
        if num_bytes == 4090:
            os.mkdir(f"{deep}/{'a' * 200}")
        assert not is_terminal(output, [])
        job_files([], output)
        with pytest.raises(ConfigError, match=message):
            check_output([], output)


def test_links_in_the_places_of_files_beside_the_output_are_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("precious")
    for name in ("o.jsonl", "o.parquet"):
        output, *beside = own_files(tmp_path / name)
        for file in beside:
            file.symlink_to("precious")
            with pytest.raises(ConfigError, match=rf"{file.name}: it is a symbolic link, .*; remove it, or name"):
                check_output([], str(output))
            file.unlink()
        output.symlink_to("elsewhere")  # the user's own
        check_output([], str(output))


def test_outputs_that_would_wait_for_ever_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("fifo", "a.jsonl.manifest.json", "b.parquet.rows.jsonl", ".c.jsonl.manifest.json.tmp"):
        os.mkfifo(name)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
    Path("dangling").symlink_to("new")
    for output, found in [
        ("fifo", "fifo: it is a FIFO"),
        ("socket", "socket: it is a socket"),
        ("a.jsonl", "a.jsonl.manifest.json: it is a FIFO"),
        ("b.parquet", "b.parquet.rows.jsonl: it is a FIFO"),
        ("c.jsonl", r"\.c\.jsonl\.manifest\.json\.tmp: it is a FIFO"),
    ]:
        with pytest.raises(ConfigError, match=rf"the output {output} cannot be written: {found}.* -o -"):
            check_output([], output)
    read, write = os.pipe()  # as of `-o >(command)`
    for output in (f"/dev/fd/{write}", "/dev/null", "/dev/stderr", "dangling"):
        check_output([], output)
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(
    ("output", "name"),
    [
        ("o.jsonl", "o.jsonl.manifest.json"),
        ("o.jsonl", ".o.jsonl.manifest.json.tmp"),
        ("o.jsonl", ".o.jsonl.new"),
        ("o.jsonl", "o.jsonl.traceback.txt"),
        ("x.parquet", "x.parquet.rows.jsonl"),
        ("x.parquet", ".x.parquet.rows.jsonl.new"),
        ("x.parquet", ".x.parquet.new"),
    ],
)
def test_an_input_that_the_job_would_overwrite_is_refused(tmp_path: Path, output: str, name: str) -> None:
    source, link, hard = tmp_path / name, tmp_path / "link.jsonl", tmp_path / "hard.jsonl"
    source.touch()
    link.symlink_to(source)
    hard.hardlink_to(source)
    for given in (source, link, hard):
        with pytest.raises(ConfigError, match=r"has the name of a file that the job itself writes .* -o, or rename"):
            check_output([str(given)], str(tmp_path / output))
    check_output([str(source)], str(tmp_path / f"another-{output}"))
    source.with_name(f"{name[:2]}.other").touch()
    found = expand_inputs([f"{tmp_path}/{name[:2]}*"], f"{tmp_path}/{output}")  # leaves it out, as it does the output
    assert found == [str(source.with_name(f"{name[:2]}.other"))]


def test_an_input_that_the_job_would_overwrite_behind_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "o.jsonl").symlink_to(tmp_path / "there" / "real.jsonl")
    source = tmp_path / "there" / ".real.jsonl.new"
    source.touch()
    with pytest.raises(ConfigError, match="the job itself writes"):
        check_output([str(source)], str(tmp_path / "o.jsonl"))


def test_patterns_name_their_files_sorted_and_without_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("b.jsonl", "a.jsonl", "all.jsonl", "[x].jsonl"):
        (tmp_path / name).touch()
    (tmp_path / "folder.jsonl").mkdir()
    assert expand_inputs(["-", "?.jsonl", "plain"]) == ["-", "a.jsonl", "b.jsonl", "plain"]
    assert expand_inputs(["*.jsonl"], "all.jsonl") == ["[x].jsonl", "a.jsonl", "b.jsonl"]
    assert expand_inputs(["[x].jsonl"]) == ["[x].jsonl"]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert expand_inputs(["~/a.jsonl", "~/b*"]) == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]
    assert expand_inputs(["./**"], "all.jsonl") == ["./[x].jsonl", "./a.jsonl", "./b.jsonl"], "and not the folder ./"
    with pytest.raises(ConfigError, match=r"no\*\.jsonl matches no file"):
        expand_inputs(["no*.jsonl"])


def test_the_pattern_of_one_file_does_not_take_its_output_for_an_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.jsonl").touch()
    inputs = expand_inputs(["a*.jsonl"])
    output = choose_output(inputs, None)
    (tmp_path / output).touch()
    (tmp_path / "a.shard-0-of-2.out.jsonl.bz2").touch()
    assert expand_inputs(["a*.jsonl"]) == expand_inputs(["a*.jsonl*"]) == inputs == ["a.jsonl"]
    assert expand_inputs(["*.jsonl"], "all.jsonl") == ["a.jsonl"]
    assert expand_inputs(["*.out.jsonl"], "all.jsonl") == [output]  # for a job that goes on with the answers
    check_inputs(["a.jsonl", output])
    manifest_path(Path(output)).touch()
    with pytest.raises(ConfigError, match=r"the input \./a\.out\.jsonl is the output of the input a\.jsonl"):
        check_inputs(["a.jsonl", f"./{output}"])


def test_a_folder_that_must_not_be_entered_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(os, "stat", forbidden)
    name = str(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"the input .* cannot be read: Permission denied"):
        check_inputs([name])
    with pytest.raises(ConfigError, match=r"the output .* cannot be written: Permission denied"):
        check_output([], name)


def test_a_folder_gets_an_output_for_each_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("more").mkdir()
    for name in ("a.jsonl", "b.csv", "c.jsonl.gz", "more/d.parquet"):
        Path(name).touch()
    names = ["a.jsonl", "b.csv", "c.jsonl.gz"]
    outputs = ["a.out.jsonl", "b.out.csv", "c.out.jsonl"]
    assert split_outputs(names, "out/") == [([name], f"out/{out}") for name, out in zip(names, outputs, strict=True)]
    assert split_outputs(["more"], "out/", Shard(0, 2)) == [(["more/d.parquet"], "out/d.shard-0-of-2.out.parquet")]
    assert split_outputs(names, "out") == [(names, "out")]  # a file
    Path("out").mkdir()
    assert split_outputs(names, "out")[0] == (["a.jsonl"], "out/a.out.jsonl")
    assert not {"out/a.out.jsonl.digests", "more/d.parquet"}.isdisjoint(job_files([*names, "more/d.parquet"], "out"))
    for output in ("a.out.jsonl", "a.out.jsonl.digests", "b.out.csv"):
        Path(output).touch()
    assert [inputs for inputs, _ in split_outputs(["?.*"], ".")] == [[name] for name in names]
    Path("more/a.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"a\.jsonl and more/a\.json would both have the output out/a\.out\.jsonl"):
        split_outputs(["a.jsonl", "more/a.json"], "out")
    for name, which in (("-", "standard input"), ("https://host/x.jsonl", "https://host/x.jsonl")):
        with pytest.raises(ConfigError, match=rf"name the output with -o out/FILE: it cannot follow from {which}"):
            split_outputs([name], "out/")
    with pytest.raises(ConfigError, match=r"no input file gone\.jsonl"):
        split_outputs(["gone.jsonl"], "out/")


def test_a_folder_is_made_and_goes_again_where_nothing_came_of_it(tmp_path: Path) -> None:
    folder = f"{tmp_path}/a/b/"

    def fail() -> None:
        with folder_made(folder):
            assert Path(folder).is_dir()
            raise ConfigError("wrong")

    with pytest.raises(ConfigError, match="wrong"):
        fail()
    assert not Path(folder).exists()
    with folder_made(folder):
        (Path(folder) / "x").touch()
    assert os.listdir(folder) == ["x"]
    with (
        pytest.raises(ConfigError, match=r"the folder .*/x/y/ cannot be made: Not a directory; name another with -o"),
        folder_made(f"{folder}x/y/"),
    ):
        pass
