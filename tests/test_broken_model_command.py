"""The real command with a model whose weights are damaged: it ends, says what is at fault, and has no answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from checkpoints import set_weights
from fake_command import ENVIRON, nvcli_command
from nvcli.demo import demo_path
from warm_process import run_warm


def test_a_model_of_nothing_but_nan_ends_the_run(tmp_path: Path) -> None:
    model = Path(shutil.copytree(demo_path(), tmp_path / "model"))
    set_weights(model, "model.norm.weight", float("nan"))
    rows = tmp_path / "in.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"What is {i} + 3?\n"}) + "\n" for i in range(40)))
    command = nvcli_command("generate", str(rows), "-m", str(model), "--set", "device=cpu", cwd=tmp_path)
    done = run_warm(command, capture_output=True, text=True, env=ENVIRON)
    assert done.returncode == 3, done.stderr
    assert "the logits of all of the first 16 prompts are NaN or infinite" in done.stderr
    assert "the weights or the dtype are at fault" in done.stderr
    assert "Traceback" not in done.stderr
    output = tmp_path / "in.out.jsonl"
    written = output.read_text().splitlines() if output.exists() else []
    assert {json.loads(line)["error"]["type"] for line in written} <= {"non_finite_logits"}
