"""What a run that was cut short tells its user to type."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from nvcli.job_run.early_end import resume_hint
from nvcli.jobs.output.manifest import manifest_path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    (tmp_path / "my in.jsonl").touch()
    return tmp_path / "my in.out.jsonl"


def hint(output: Path, *flags: str, started: float = 0.0) -> str:
    source = str(output.with_name("my in.jsonl"))
    return resume_hint(["/bin/nvcli", "generate", source, *flags], inputs=[source], output=None, started=started)


def test_the_command_is_quoted_and_does_not_undo_what_it_did(output: Path) -> None:
    manifest_path(output).touch()
    command = f"nvcli generate '{output.parent}/my in.jsonl' -m demo"
    for flags in ((), ("--overwrite",), ("--retry-errors",)):
        assert hint(output, "-m", "demo", *flags) == (
            f"the rows answered so far are in {output}; continue with:\n  {command}"
        )


def test_an_output_that_was_not_overwritten_yet_is_still_to_be(output: Path) -> None:
    manifest_path(output).touch()
    text = hint(output, "--overwrite", started=time.time() + 100)
    assert text.startswith("nothing was answered yet; start again with:\n  nvcli generate ")
    assert text.endswith(" --overwrite")


def test_what_cannot_be_continued(output: Path) -> None:
    assert hint(output).startswith("nothing was answered yet; start again with")
    output.write_text("row\n")
    assert "cannot be continued, because its input was no file" in hint(output)
    streamed = resume_hint(["nvcli"], inputs=["-"], output="-", started=0.0)
    assert "standard output cannot be continued" in streamed
    assert resume_hint(["nvcli"], inputs=["-"], output=None, started=0.0) == "nothing was answered yet"
