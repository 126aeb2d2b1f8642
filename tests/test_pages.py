"""What stands on the pages happens: sessions print it, programs run, options exist, figures have their files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import typer.main

import figures
import page_sessions
from fake_command import ENVIRON
from nvcli.cli.main import app
from nvcli.demo import demo_path
from warm_process import run_warm

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]
OPTIONS = {
    option
    for command in COMMANDS.values()
    for parameter in command.params
    for option in parameter.opts + parameter.secondary_opts
} | {"--help", "--version", "--install-completion"}
OF_OTHERS = {
    *("--all", "--check", "--command", "--engines", "--only", "--repeat", "--python", "--cases", "--update-snapshots"),
    *("--torch-backend", "--index-url", "--array", "--ntasks", "--gpus-per-task"),
}
"""Options of scripts, pytest and pip that the pages name."""
ON_PURPOSE = {"--promt-field", "--max-new-tokens"}
"""Options that there are none of: a page shows what is said to them."""


@pytest.mark.timeout(600)
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="the sessions are those of a machine without a GPU")
@pytest.mark.parametrize("page", [page for page in PAGES if page_sessions.session(page)], ids=lambda page: page.stem)
def test_sessions_print_what_the_page_says(page: Path, tmp_path: Path) -> None:
    found = page_sessions.differences(page, tmp_path)
    said = [f"$ {command.text}\n--- says\n" + "\n".join(command.output) + f"\n--- is\n{now}" for command, now in found]
    assert not said, "\n\n".join([*said, f"python tests/page_sessions.py {page} writes this onto the page"])


def test_programs_run(tmp_path: Path) -> None:
    programs = [block.text for page in PAGES for block in page_sessions.programs(page)]
    for program in programs:
        compile(program, "a page", "exec")
    run = "\n".join(program for program in programs if "import ray" not in program)  # tests/ray_stage runs that
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-2000").symlink_to(demo_path())  # which takes the place of other weights
    (tmp_path / "program.py").write_text(run, encoding="utf-8")
    done = run_warm(
        [sys.executable, "program.py"], cwd=tmp_path, env=ENVIRON, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    assert "sum 95" in done.stdout
    assert "9 10 11 12 13 14" in done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_have_the_options_that_they_are_given(page: Path) -> None:
    wrong = []
    for line, (_, name, *words) in page_sessions.command_lines(page):
        parameters = COMMANDS[name].params
        known = {option for parameter in parameters for option in parameter.opts + parameter.secondary_opts}
        given = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        wrong += [f"line {line}: {name} has no {option}" for option in given - known - ON_PURPOSE]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_options_in_the_text_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`]+)`", text)
    named = {option for span in spans for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", span)}
    assert named - OPTIONS - OF_OTHERS == set()


def test_tables_are_those_of_the_result_files() -> None:
    known = figures.results()
    assert [
        page.name for page in figures.PAGES if figures.page_text(page, known) != page.read_text(encoding="utf-8")
    ] == []
    assert figures.unused(known) == []


def test_a_table_takes_an_output_of_bench() -> None:
    run = {"seconds": 2.0, "num_requests": 4, "output_tokens": 100, "roofline_share": 0.5, "num_preemptions": 0}
    phases = {"prefill": {"seconds": 1.0, "limit_seconds": 0.25}}
    output = {
        "date": "2026-11-24T18:58:43+00:00",
        "layout": {"device": "NVIDIA H200", "gpus": [0]},
        "versions": {"nvcli": "0.1.0", "torch": "2.11.0", "cuda": None},
        "ready_seconds": 4.5,
        "runs": [{**run, "phases": phases, "steps": {"DECODE": {"median": 7.25}}}],
    }
    known = {"new": figures.Result.of(figures.of_bench(output, "nvcli bench --shape qwen3-8b"))}
    figures_of = "{new output_tokens_per_second:,.0f}, {new of_limit:.0%}; {new seconds / new ready_seconds:.1f}"
    table = f"{{new command}}: {figures_of}\n"
    assert figures.filled(table + "{sources}\n?{other seconds}\n", known) == (
        "`nvcli bench --shape qwen3-8b`: 50, 50%; 0.4\nNVIDIA H200, torch 2.11.0: 24 November 2026\n"
    )
