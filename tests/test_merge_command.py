"""Shards and their merge as commands: exit codes, what is said, and a merge that is killed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import msgspec

from fake_command import ENVIRON, NvcliHere, nvcli_command, run_nvcli
from nvcli.job.output.manifest import Finished, save_manifest
from nvcli.job.shard import Shard
from output_jobs import JOB, plain_bytes


def test_shards_are_answered_and_joined(tmp_path: Path, model_folder: Path, nvcli_here: NvcliHere) -> None:
    rows: list[dict[str, Any]] = [{"prompt": f"p{number}"} for number in range(9)]
    rows[7] = {"promt": "x"}
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    generate = ("generate", "in.jsonl", "-m", str(model_folder))
    first = run_nvcli(*generate, "--shard", "0/2", cwd=tmp_path, fakes="")
    assert (first.returncode, "5 of 5 rows answered" in first.stderr) == (0, True)
    missing = nvcli_here("merge", "in.shard-0-of-2.out.jsonl", "-o", "all.jsonl", cwd=tmp_path)
    assert missing.returncode == 1
    assert "shard 1/2: all of its 4 rows" in missing.stderr
    assert f"nvcli generate in.jsonl --model {model_folder} --shard 1/2 -o in.shard-1-of-2.out.jsonl" in missing.stderr
    second = run_nvcli(*generate, "--shard", "auto", cwd=tmp_path, fakes="", SLURM_PROCID="1", SLURM_STEP_NUM_TASKS="2")
    assert second.returncode == 1
    assert "answering shard 1/2, as Slurm counts its tasks" in second.stderr
    joined = nvcli_here("merge", "in.shard-*", "-o", "all.jsonl", cwd=tmp_path)
    assert joined.returncode == 1
    assert "joined 2 shards: 9 rows, 1 of them errors → all.jsonl" in joined.stderr
    assert f"nvcli generate in.jsonl --model {model_folder} -o all.jsonl --update" in joined.stderr
    assert "--retry-errors" not in joined.stderr  # the row fails again until it is edited
    assert [json.loads(line)["index"] for line in (tmp_path / "all.jsonl").read_text().splitlines()] == list(range(9))
    printed = nvcli_here("merge", "in.shard-*.out.jsonl", "-o", "-", cwd=tmp_path)
    assert printed.stdout == (tmp_path / "all.jsonl").read_text()
    whole = run_nvcli(*generate, "-o", "all.jsonl", cwd=tmp_path, fakes="")
    assert "all.jsonl is complete: 8 of 9 rows answered" in whole.stderr
    wrong = run_nvcli(*generate, "--shard", "2/2", cwd=tmp_path, fakes="")
    assert (wrong.returncode, "allowed: 0/2 to 1/2" in wrong.stderr) == (2, True)


def write_shards(folder: Path, count: int, num_rows: int, name: str = "in") -> None:
    """Outputs of shards, their rows in random order."""
    rng = random.Random(0)
    for shard in (Shard(number, count) for number in range(count)):
        path = folder / f"{name}.shard-{shard.number}-of-{count}.out.jsonl"
        rows = [*range(shard.number, num_rows, count)]
        rng.shuffle(rows)
        lines = [json.dumps({"id": f"r{row}", "index": row, "choices": [], "error": None}) for row in rows]
        path.write_text("\n".join([*lines, ""]))
        finished = Finished(
            rows=len(rows), errors={}, all_read=True, output_bytes=path.stat().st_size, rows_read=num_rows
        )
        facts = {**JOB.facts, "shard": str(shard)}
        save_manifest(path, msgspec.structs.replace(JOB, facts=facts, finished=finished))


def test_shards_of_several_jobs_are_joined_into_a_folder(tmp_path: Path, nvcli_here: NvcliHere) -> None:
    write_shards(tmp_path, 3, 7, "a")
    write_shards(tmp_path, 2, 5, "b")
    joined = nvcli_here("merge", "*.shard-*", "-o", "joined/", cwd=tmp_path)
    assert joined.returncode == 0, joined.stderr
    assert sorted(path.name for path in (tmp_path / "joined").glob("*.out.jsonl")) == ["a.out.jsonl", "b.out.jsonl"]
    for name, count in (("a", 7), ("b", 5)):
        lines = (tmp_path / "joined" / f"{name}.out.jsonl").read_text().splitlines()
        assert [json.loads(line)["index"] for line in lines] == list(range(count))
    (tmp_path / "c.jsonl").touch()
    other = nvcli_here("merge", "*.shard-*", "c.jsonl", "-o", "joined", cwd=tmp_path)
    assert other.returncode == 2
    assert "the name of c.jsonl is not that of a shard" in other.stderr


def test_a_merge_that_is_killed_goes_on(tmp_path: Path) -> None:
    write_shards(tmp_path, 3, 60_000)
    output = tmp_path / "all.jsonl.zst"
    merge = nvcli_command("merge", "in.shard-*.out.jsonl", "-o", output.name, cwd=tmp_path)
    sizes = [0]
    for number in (signal.SIGKILL, signal.SIGINT):
        process = subprocess.Popen(merge, cwd=tmp_path, env=ENVIRON, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (output.exists() and output.stat().st_size > sizes[-1]):
            time.sleep(0.001)
        process.send_signal(number)
        assert process.wait() in (-number, 130)
        sizes.append(output.stat().st_size)
    last = run_nvcli(*merge[3:], cwd=tmp_path)
    assert last.returncode == 0
    assert "rows are answered already" in last.stderr
    rows = [json.loads(line)["index"] for line in plain_bytes(output).splitlines()]
    assert rows == list(range(60_000))
    assert sizes == sorted(sizes)
