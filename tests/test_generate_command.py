"""The real command, real processes, the built-in model: every answer is right or wrong."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType

from combinations import full
from demo_tasks import Example, messages, raw_prompt, sample, sample_lookups
from fake_command import ENVIRON, nvcli_with_runner
from fault_job import descendants
from gguf_files import write_gguf
from nvcli.demo import demo_path
from shared_memory import left_in_shared_memory, shared_memory
from warm_process import WarmPopen, run_warm

COMMAND = [sys.executable, "-P", "-m", "nvcli", "generate"]


def nvcli(*args: object, stdin: bytes = b"", run: Any = run_warm) -> subprocess.CompletedProcess[bytes]:
    """`nvcli generate … -m demo`; output captured."""
    command = [*COMMAND, *map(str, args), "-m", "demo"]
    return run(command, input=stdin, capture_output=True, env=ENVIRON, timeout=120)


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_rows(path: Path) -> list[dict[str, Any]]:
    return sorted(map(json.loads, path.read_text().splitlines()), key=lambda row: row["index"])


def question(example: Example, number: int) -> dict[str, Any]:
    form = {"prompt": raw_prompt(example)} if number % 2 else {"messages": messages(example)}
    return {**form, "expected": example.answer, "task": example.task}


def questions(count: int, seed: int = 0, longest: int = 1000) -> list[dict[str, Any]]:
    """Held-out questions of every kind, several about one long list, whose answers have up to `longest` characters."""
    rng = random.Random(seed)
    examples = (sample(rng, split="heldout") for _ in itertools.count())
    examples = [*itertools.islice((each for each in examples if len(each.answer) <= longest), count - 12)]
    examples += sample_lookups(rng, 12, 40)
    return [question(example, number) for number, example in enumerate(examples)]


def share_right(rows: list[dict[str, Any]]) -> float:
    return sum(row["choices"][0]["text"].strip() == row["expected"] for row in rows) / len(rows)


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["block_size=8", "kv_cache_memory=12MiB", "max_model_len=1024", "max_num_batched_tokens=24", "max_num_seqs=16"],
        ["data_parallel_size=2", "max_num_seqs=8", "device=cpu"],
    ],
    ids=["defaults", "small-chunks-in-little-memory", "dp2"],
)
def test_answers_are_right(tmp_path: Path, settings: list[str]) -> None:
    """Paging, chunking, prefix reuse, preemption and several copies leave the answers as they are."""
    count = 22
    # Long answers, which take a step for each token, are for the one with little memory.
    path = write_rows(tmp_path / "in.jsonl", questions(count, longest=1000 if "max_num_seqs=16" in settings else 80))
    run = run_warm if settings else subprocess.run  # new interpreters for one of them
    done = nvcli(path, *(word for setting in settings for word in ("--set", setting)), run=run)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout == b""
    rows = read_rows(tmp_path / "in.out.jsonl")
    assert [row["index"] for row in rows] == list(range(count))
    assert share_right(rows) >= 0.97
    assert all(row["choices"][0]["finish_reason"] == "stop" for row in rows)


def test_a_model_in_gguf_answers_as_its_checkpoint_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its output can be continued with the same file, and not with another quantisation under its name."""
    monkeypatch.setitem(ENVIRON, "XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, model = write_rows(tmp_path / "in.jsonl", questions(20)[:8]), tmp_path / "demo.gguf"
    options = (source, "--temperature", "0", "--max-tokens", "8", "--set", "generation_config=none")
    assert nvcli(*options, "-o", tmp_path / "expected.jsonl").returncode == 0
    command = [*COMMAND, *map(str, options), "-m", str(model), "-o", str(tmp_path / "out.jsonl")]

    def run(kind: GGMLQuantizationType) -> subprocess.CompletedProcess[bytes]:
        write_gguf(demo_path(), model, choose=lambda name: kind)
        return run_warm(command, capture_output=True, env=ENVIRON)

    assert run(GGMLQuantizationType.BF16).returncode == 0
    assert read_rows(tmp_path / "out.jsonl") == read_rows(tmp_path / "expected.jsonl")
    assert b"is complete: 8 of 8 rows answered" in run(GGMLQuantizationType.BF16).stderr
    refused = run(GGMLQuantizationType.Q8_0)
    assert refused.returncode == 2
    assert b"model demo.gguf" in refused.stderr


def test_good_and_bad_rows(tmp_path: Path) -> None:
    """A bad row becomes an error row that says why; its neighbours are answered; the exit code tells."""
    path = tmp_path / "in.jsonl"
    path.write_bytes(
        b'{"id": "a", "prompt": "What is 2 + 3?\\n", "tag": {"kept": [1, null]}}\n'
        b"not json\n"
        b'{"id": "a", "prompt": "same id"}\n'
        b'{"id": 7, "prompt": "x", "messages": []}\n'
        b'{"prompt_token_ids": [1, 99999]}\n'
        b'{"prompt": "x", "sampling": {"temprature": 0}}\n'
        b'{"prompt": "x", "sampling": {"temperature": NaN}}\n'
        b'{"prompt": "' + b"word " * 5000 + b'"}\n'
        b'{"prompt": "x", "sampling": {"max_tokens": 100000}}\n'
        b'\xff\xfe{"prompt": "x"}\n'
        b"\n"
        b'{"id": "z", "prompt": "What is 4 + 4?\\n", "sampling": {"return_token_ids": true}}\n'
    )
    done = nvcli(path)
    assert done.returncode == 1, done.stderr.decode()
    rows = read_rows(tmp_path / "in.out.jsonl")
    assert len(rows) == 11
    good = [row for row in rows if row["error"] is None]
    assert [row["id"] for row in good] == ["a", "z"]
    assert [row["choices"][0]["text"].strip() for row in good] == ["5", "8"]
    assert good[0]["tag"] == {"kept": [1, None]}
    assert good[0]["usage"]["completion_tokens"] >= 2
    token_ids = good[1]["choices"][0]["token_ids"]
    assert len(token_ids) == good[1]["usage"]["completion_tokens"]
    for row in rows:
        if row["error"] is not None:
            assert row["choices"] == []
            assert row["error"]["type"]
            assert row["error"]["message"]
    assert len({row["error"]["type"] for row in rows if row["error"]}) >= 6
    assert b"Traceback" not in done.stderr


def test_from_a_pipe_to_a_pipe() -> None:
    rows = questions(16, seed=3)
    done = nvcli("-", "-o", "-", "--order", "input", stdin="".join(json.dumps(r) + "\n" for r in rows).encode())
    assert done.returncode == 0, done.stderr.decode()
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["index"] for row in answers] == list(range(16))
    assert share_right(answers) >= 0.95
    done = nvcli("-", stdin=gzip.compress(b'{"prompt": "a"}'))
    assert (done.returncode, done.stdout) == (2, b"")
    assert b"standard input holds gzip data, and is read as JSONL; name the file instead, or unpack it" in done.stderr


def test_stop_strings_and_many_samples(tmp_path: Path) -> None:
    """A stop string that spans tokens ends the text before it; n samples of one row differ by their number alone."""
    rows = [
        {"prompt": "Count from 3 to 30.\n", "sampling": {"stop": " 12 1"}},
        {"prompt": "Count from 3 to 30.\n", "sampling": {"max_tokens": 5}},
        {"prompt": "What is 5 + 5?\n", "sampling": {"n": 3}},
        {"prompt": "zebra", "sampling": {"n": 4, "temperature": 2.0, "max_tokens": 12, "ignore_eos": True, "seed": 1}},
        {"prompt": "zebra", "sampling": {"n": 4, "temperature": 2.0, "max_tokens": 12, "ignore_eos": True, "seed": 1}},
        {"prompt": "zebra", "sampling": {"n": 4, "temperature": 2.0, "max_tokens": 12, "ignore_eos": True}},
        {"prompt": "What is 5 + 5?\n", "sampling": {"logprobs": 2}},
    ]
    done = nvcli(write_rows(tmp_path / "in.jsonl", rows))
    assert done.returncode == 0, done.stderr.decode()
    counted, cut, three, seeded, again, unseeded, logprobs = read_rows(tmp_path / "in.out.jsonl")
    assert counted["choices"][0]["text"] == "3 4 5 6 7 8 9 10 11"
    assert counted["choices"][0]["finish_reason"] == "stop"
    assert cut["choices"][0]["finish_reason"] == "length"
    assert cut["usage"]["completion_tokens"] == 5
    assert [c["text"] for c in three["choices"]] == ["10"] * 3
    assert [c["index"] for c in three["choices"]] == [0, 1, 2]
    assert seeded["choices"] == again["choices"] != unseeded["choices"]
    assert len({c["text"] for c in seeded["choices"]}) == 4
    for token, alternatives in zip(
        logprobs["choices"][0]["logprobs"]["token_logprobs"],
        logprobs["choices"][0]["logprobs"]["top_logprobs"],
        strict=True,
    ):
        assert -0.2 < token <= 0  # the model is sure of itself
        assert max(alternatives.values()) == token
        assert len(alternatives) == 2


def test_sampled_answers_do_not_depend_on_how_they_were_computed(tmp_path: Path) -> None:
    rows = [
        {**row, "sampling": {"temperature": 1.5, "max_tokens": 8, "ignore_eos": True}} for row in questions(16)[::2]
    ]
    path = write_rows(tmp_path / "in.jsonl", rows)
    outputs = []
    in_parts = ["--tp", "2", "--pp", "2"]
    for number, settings in enumerate((["--set", "block_size=64", "--set", "max_num_seqs=3"], in_parts)):
        output = tmp_path / f"{number}.jsonl"
        assert nvcli(path, "-o", output, "--set", "seed=5", "--set", "device=cpu", *settings).returncode == 0
        outputs.append([row["choices"] for row in read_rows(output)])
    assert outputs[0] == outputs[1]


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_gpu_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    done = nvcli(write_rows(tmp_path / "in.jsonl", questions(13)), "--set", "device=cuda")
    assert done.returncode == 2
    assert b"device: cpu" in done.stderr
    assert b"Traceback" not in done.stderr


def test_existing_output_is_refused(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", questions(13))
    (tmp_path / "in.out.jsonl").write_text("precious\n")
    done = nvcli(path)
    assert done.returncode == 2
    assert b"--overwrite" in done.stderr
    assert (tmp_path / "in.out.jsonl").read_text() == "precious\n"


def start_long_job(
    tmp_path: Path, *args: str, runner: str | None = None, start: type[subprocess.Popen[bytes]] = WarmPopen
) -> subprocess.Popen[bytes]:
    """A job that would take minutes; returns once some rows are answered. `runner`: one of `fake_runners`."""
    rows = [
        {"prompt": "a b c", "sampling": {"max_tokens": 1500 if i > 3 else 5, "ignore_eos": True}} for i in range(99)
    ]
    path = write_rows(tmp_path / "in.jsonl", rows)
    command = COMMAND if runner is None else nvcli_with_runner(runner, "generate", cwd=tmp_path)
    process = start(
        [*command, str(path), "-m", "demo", "--set", "job.sync_seconds=0.05", *args],
        env=ENVIRON,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    output = tmp_path / "in.out.jsonl"
    deadline = time.monotonic() + 60
    while not (output.exists() and output.read_text().count("\n") >= 4):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return process


@pytest.mark.parametrize(
    ("victim", "runner"),
    [("engine", "SlowRunner"), full(("rank 0", "SlowRunner"), in_parts=True), ("rank 1", None)],
)
def test_killed_process_ends_the_run_with_its_name(tmp_path: Path, victim: str, runner: str | None) -> None:
    shm = shared_memory()
    process = start_long_job(tmp_path, "--tp", "2", "--set", "device=cpu", runner=runner)
    engine, *ranks = descendants(process.pid)
    assert len(ranks) == 2
    os.kill({"engine": engine, "rank 0": min(ranks), "rank 1": max(ranks)}[victim], signal.SIGKILL)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 3
    assert victim.encode() in stderr
    assert b"SIGKILL" in stderr
    assert b"Traceback" not in stderr
    assert gone([engine, *ranks])
    assert not left_in_shared_memory(shm)
    assert len(read_rows(tmp_path / "in.out.jsonl")) >= 4


@pytest.mark.parametrize(
    ("victim", "message"),
    [
        (-1, r"rank 1 \(pid \d+\) at step \d+ \(stopped by a signal\)"),
        full(
            (0, r"within step_timeout \(2 s\); the engine \(pid \d+\) at running \(stopped by a signal\)\n"),
            in_parts=True,
        ),
    ],
    ids=["rank 1", "engine"],
)
def test_stopped_process_ends_the_run_within_the_step_timeout(tmp_path: Path, victim: int, message: str) -> None:
    settings = ["--tp", "2", "--set", "device=cpu", "--set", "step_timeout=2"]
    process = start_long_job(tmp_path, *settings, runner="SlowRunner")
    engine, *ranks = descendants(process.pid)
    os.kill([engine, *sorted(ranks)][victim], signal.SIGSTOP)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 3
    assert re.search(message.encode(), stderr), stderr
    assert b"Traceback" not in stderr
    assert gone([engine, *ranks])
    assert len(read_rows(tmp_path / "in.out.jsonl")) >= 4


@pytest.mark.parametrize(
    ("action", "code", "message"),
    [
        (signal.SIGINT, 130, rb"interrupted"),
        (signal.SIGKILL, 3, rb"rank 1 \(pid \d+\) was killed by SIGKILL; it was at: warm up"),
        full((signal.SIGSTOP, 3, rb"rank 1 \(pid \d+\) at warm up \(stopped by a signal\)"), in_parts=True),
    ],
)
def test_end_while_ranks_warm_up(tmp_path: Path, action: signal.Signals, code: int, message: bytes) -> None:
    """Ctrl-C reaches the command, the other signals a rank."""
    path = write_rows(tmp_path / "in.jsonl", questions(13))
    settings = ["-m", "demo", "--tp", "2", "--set", "device=cpu", "--set", "step_timeout=2"]
    process = WarmPopen(
        nvcli_with_runner("SlowWarmUpRunner", "generate", str(path), *settings, cwd=tmp_path),
        env={**ENVIRON, "NVCLI_TEST_FOLDER": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("rank-*-warms-up"))) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    pids = descendants(process.pid)
    os.kill(process.pid if action == signal.SIGINT else max(pids), action)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == code
    assert re.search(message, stderr), stderr
    assert b"Traceback" not in stderr
    assert gone(pids)


def test_exception_in_a_step_names_rank_and_step(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "sampling": {"max_tokens": 50, "ignore_eos": True}}]
    command = nvcli_with_runner(
        *("FailingRunner", "generate", str(write_rows(tmp_path / "in.jsonl", rows)), "-m", "demo", "--tp", "2"),
        *("--set", "device=cpu"),
        cwd=tmp_path,
    )
    done = run_warm(command, env=ENVIRON, capture_output=True)
    assert done.returncode == 3
    path = tmp_path / "in.out.jsonl.traceback.txt"
    line = f"nvcli: error: rank 0 failed at step 5: ZeroDivisionError: as planned (traceback: {path})\n"
    assert line.encode() in done.stderr
    assert b"Traceback" not in done.stderr
    assert re.search(r'line \d+, in launch\n +raise ZeroDivisionError\("as planned"\)', path.read_text())


def test_a_lost_copys_traceback_is_kept(tmp_path: Path) -> None:
    """Both replicas fail in their step 5: the first is done without, the second ends the run."""
    rows = [{"prompt": "a", "sampling": {"max_tokens": 50, "ignore_eos": True}}] * 2
    command = nvcli_with_runner(
        *("FailingRunner", "generate", str(write_rows(tmp_path / "in.jsonl", rows)), "-m", "demo", "--dp", "2"),
        *("--set", "device=cpu", "--set", "job.plan=false", "--keep-going"),
        cwd=tmp_path,
    )
    done = run_warm(command, env=ENVIRON, capture_output=True)
    assert done.returncode == 3
    path = tmp_path / "in.out.jsonl.traceback.txt"
    assert len(re.findall(rb"copy \d of the model: rank 0 failed at step 5: .* \(traceback: .*\)\n", done.stderr)) == 2
    assert b"Traceback" not in done.stderr
    assert path.read_text().count("Traceback") == 2


def test_two_runs_at_once_do_not_meet(tmp_path: Path) -> None:
    """The same job twice, started together: no name, port or file is shared by accident."""
    shm = shared_memory()
    rows = [{"prompt": f"What is {n} + 3?\n", "expected": str(n + 3)} for n in range(6)]
    runs = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        path = write_rows(tmp_path / name / "in.jsonl", rows)
        command = [*COMMAND, str(path), "-m", "demo", "--tp", "2", "--set", "device=cpu"]
        runs.append(WarmPopen(command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
    outcomes = [(process.communicate(timeout=120)[1], process.returncode) for process in runs]
    assert [code for _, code in outcomes] == [0, 0], outcomes
    first, second = (read_rows(tmp_path / name / "in.out.jsonl") for name in ("a", "b"))
    assert first == second
    assert share_right(first) == 1
    assert not left_in_shared_memory(shm)


def test_killed_parent_leaves_nothing_but_the_output(tmp_path: Path) -> None:
    process = start_long_job(tmp_path, "--tp", "2", "--set", "device=cpu", start=subprocess.Popen)
    pids = descendants(process.pid)
    process.kill()
    process.communicate(timeout=30)
    assert gone(pids)
    assert len(read_rows(tmp_path / "in.out.jsonl")) >= 4


def test_ctrl_c(tmp_path: Path) -> None:
    process = start_long_job(tmp_path)
    pids = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"interrupted" in stderr
    assert b"Traceback" not in stderr
    assert gone(pids)
    assert len(read_rows(tmp_path / "in.out.jsonl")) >= 4


def test_ctrl_c_while_the_model_loads(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "in.jsonl", questions(13))
    process = WarmPopen(
        [*COMMAND, str(path), "-m", "demo"], env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 30
    while len(descendants(process.pid)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    pids = descendants(process.pid)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in stderr
    assert gone(pids)


def test_the_progress_file_and_the_summary_add_up(tmp_path: Path) -> None:
    rows = [{"prompt": "What is 2 + 3?\n", "sampling": {"temperature": 0}}] * 3 + [{"prompt": ""}]
    path = write_rows(tmp_path / "in.jsonl", rows)
    done = nvcli(path, "--progress-file", tmp_path / "progress.json")
    assert done.returncode == 1, done.stderr.decode()
    status = json.loads((tmp_path / "progress.json").read_text())
    assert (status["state"], status["output"]) == ("done", str(tmp_path / "in.out.jsonl"))
    assert {key: status["rows"][key] for key in ("total", "done", "failed", "left", "deduplicated", "errors")} == {
        "total": 4,
        "done": 4,
        "failed": 1,
        "left": 0,
        "deduplicated": 2,
        "errors": {"empty_prompt": 1},
    }
    answers = read_rows(tmp_path / "in.out.jsonl")
    assert [row["id"] for row in answers] == ["row-0", "row-1", "row-2", "row-3"]
    assert {row["choices"][0]["text"] for row in answers[:3]} == {"5"}
    assert b"2 rows answered with the answer of an equal row" in done.stderr


def test_with_keep_going_the_other_copy_takes_over(tmp_path: Path) -> None:
    """Sampled answers are those of an untouched run, though an engine was killed in the middle of its rows."""
    rows = [
        {"prompt": f"a b c {number}", "sampling": {"max_tokens": 50 if number > 3 else 5, "ignore_eos": True}}
        for number in range(32)
    ]
    path = write_rows(tmp_path / "in.jsonl", rows)
    # Rows are seen in the file soon after they are answered, so that many are left when the engine dies.
    settings = ["--dp", "2", "--set", "device=cpu", "--set", "max_num_seqs=4", "--set", "job.sync_seconds=0.05"]
    command = [*COMMAND, str(path), "-m", "demo", *settings, "--keep-going"]
    process = WarmPopen(command, env=ENVIRON, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output = tmp_path / "in.out.jsonl"
    deadline = time.monotonic() + 60
    while not (output.exists() and output.read_text().count("\n") >= 8):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (thread,) = [task for task in Path(f"/proc/{process.pid}/task").iterdir() if (task / "children").read_text()]
    engines = [int(pid) for pid in (thread / "children").read_text().split()]
    assert len(engines) == 2
    victims = [engines[1], *descendants(engines[1])]
    os.kill(engines[1], signal.SIGKILL)
    _, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr.decode()
    assert b"warning: a copy of the model died" in stderr
    assert f"copy 1 of the model: the engine 1 (pid {engines[1]}) was killed by SIGKILL".encode() in stderr
    assert b"1 copy of the model died on the way" in stderr
    assert b"Traceback" not in stderr
    assert gone(victims)
    whole = tmp_path / "whole.jsonl"
    assert nvcli(path, "-o", whole, "--set", "device=cpu").returncode == 0
    assert [row["choices"] for row in read_rows(output)] == [row["choices"] for row in read_rows(whole)]
