"""`nvcli score` and `nvcli embed` as a user runs them, with the built-in model."""

from __future__ import annotations

import json
from pathlib import Path

from fake_command import NvcliHere, run_nvcli

ROWS = [
    {"messages": [{"role": "user", "content": "What is 3 + 4?"}], "choices": ["8", "7", "12"], "answer": "7"},
    {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "choices": ["42", "43"], "answer": "A"},
    {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "choices": ["42", "43"], "answer": 1},
    {"prompt": 5},
]


def test_the_built_in_model_knows_the_right_choices(tmp_path: Path, nvcli_here: NvcliHere) -> None:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    done = run_nvcli("score", "in.jsonl", "-m", "demo", "--order", "input", "--normalize", "tokens", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "3 of 4 rows answered" in done.stderr
    assert "accuracy  66.67%: 2 of 3 rows with an answer" in done.stderr
    assert "nvcli score in.jsonl" in done.stderr.replace("-m nvcli", "nvcli")  # what to do next
    rows = [json.loads(line) for line in (tmp_path / "in.out.jsonl").read_text().splitlines()]
    assert [(row["best"], row.get("correct")) for row in rows] == [(1, True), (0, True), (0, False), (None, None)]
    assert [row["choices"][row["best"]]["is_greedy"] for row in rows[:3]] == [True] * 3
    shown = nvcli_here("show", "in.out.jsonl", "--index", "0", cwd=tmp_path)
    assert "answer 1 (log-probability -0.00" in shown.stdout


def test_a_wrong_value_names_its_flag_and_what_is_allowed(tmp_path: Path, nvcli_here: NvcliHere) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n')
    done = nvcli_here("score", "in.jsonl", "-m", "demo", "--normalize", "words", cwd=tmp_path)
    assert done.returncode == 2
    assert '--normalize words: `score.normalize` is "words"; allowed: ' in done.stderr
    done = nvcli_here("embed", "in.jsonl", "-m", "demo", "--dimensions", "500")
    assert done.returncode == 2
    assert "`embed.dimensions` is 500" in done.stderr
