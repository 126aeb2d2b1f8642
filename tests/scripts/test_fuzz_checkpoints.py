"""`scripts/fuzz_checkpoints.py`: a short run of it, and what it takes for a run to count as wrong."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest

from fake_command import ENVIRON
from fuzz_checkpoints import Outcome, write_adapter
from hostile_checkpoints import CANARY, MUTATIONS, OF_ADAPTERS
from nvcli.demo import demo_path
from nvcli.models.adapters.adapter import read_adapter
from nvcli.models.config import load_model_config
from warm_process import run_warm
from weightless_model import write_weightless_model

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "fuzz_checkpoints.py"
ERROR = "nvcli: error: checkpoint/config.json: `vocab_size`: 0 is not positive\n"


def test_mutated_checkpoints_answer_or_name_the_file_at_fault() -> None:
    command = [sys.executable, str(SCRIPT), "--cases", "6", "--seed", "1", "--commands", "0"]
    result = run_warm(command, env=ENVIRON, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "6 checkpoints in " in result.stdout
    assert ", 0 runs wrong; " in result.stdout
    assert "generate here: exit code 2" in result.stdout


def test_every_mutation_copes_with_what_others_left(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_weightless_model(folder)
    rng = random.Random(0)
    for _ in range(5):
        for mutation, _ in MUTATIONS:
            assert mutation(folder, rng)


def test_adapters_fit_the_built_in_model_until_they_are_mutated(tmp_path: Path) -> None:
    write_adapter(tmp_path / "lora")
    assert len(read_adapter(tmp_path / "lora", load_model_config(demo_path())).changes) > 2
    for mutation, _ in OF_ADAPTERS:
        assert mutation(tmp_path / "lora", random.Random(0))


NO_FILE = "not one error that names a file or calls the model too large"


@pytest.mark.parametrize(
    ("code", "text", "found"),
    [
        (0, "", []),
        (1, "", []),
        (2, ERROR, []),
        (2, "nvcli: error: the weights take 21.00 TiB in float32, but 22.68 GiB of RAM are free\n", []),
        (None, "", ["no end after 1 s"]),
        (-9, "", ["exit code -9"]),
        (3, ERROR, ["exit code 3"]),
        (2, "", [NO_FILE]),
        (2, ERROR * 2, [NO_FILE]),
        (2, "nvcli: error: wrong\n", [NO_FILE]),
        (2, ERROR + "Traceback (most recent call last):\n", ["it printed 'Traceback'"]),
        (0, "thread '<unnamed>' panicked at src/lib.rs", ["it printed 'panicked at'"]),
    ],
)
def test_ends_that_are_wrong(tmp_path: Path, code: int | None, text: str, found: list[str]) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "out.jsonl").write_text("{}\n{}\n")
    outcome = Outcome(code=code, text=text, peak_bytes=100, seconds=1.0)
    assert outcome.wrong(tmp_path, most_bytes=100, problems_are_code_1=False) == found


def test_what_a_run_must_not_do(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    outcome = Outcome(code=0, text="", peak_bytes=2 << 20, seconds=1.0)
    (tmp_path / "out.jsonl").write_text(json.dumps({"index": 0}) + "\n")
    (tmp_path / "strange.txt").touch()
    (tmp_path / "checkpoint" / CANARY).touch()
    assert outcome.wrong(tmp_path, most_bytes=1 << 20, problems_are_code_1=False) == [
        "2 MiB of memory",
        "code of the checkpoint was run",
        "files were left: strange.txt",
        "not an answer for each row",
    ]
    (tmp_path / "strange.txt").unlink()
    finding = Outcome(code=1, text="doctor found a problem", peak_bytes=0, seconds=1.0)
    wrong = finding.wrong(tmp_path, most_bytes=1, problems_are_code_1=True)
    assert wrong == ["no finding names a file", "code of the checkpoint was run"]
