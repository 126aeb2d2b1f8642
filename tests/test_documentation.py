"""The documentation: every key, option, command, family and room is described, and every link leads somewhere."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
import typer.main

from nvcli.cli.main import app
from nvcli.core.config import JobConfig, RunConfig, flag_keys
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.speculation_config import SpeculationConfig
from nvcli.core.task_config import EmbedConfig, ScoreConfig
from nvcli.models.families.catalogue import FAMILIES

ROOT = Path(__file__).parent.parent
MAIN = ROOT / "README.md"
MAP = ROOT / "src/nvcli/README.md"
DOCS = ROOT / "docs"
CONFIGURATION, ROWS, COMMANDS_PAGE = DOCS / "configuration.md", DOCS / "rows.md", DOCS / "commands.md"
SCRIPTS = ROOT / "scripts/README.md"
USER_PAGES = sorted(DOCS.glob("*.md"))
PAGES = [
    MAIN,
    *USER_PAGES,
    *sorted(ROOT.glob("C*.md")),
    *sorted(DOCS.glob("*/*.md")),
    MAP,
    SCRIPTS,
    ROOT / "configs/README.md",
]
LIKE_GENERATE = ("bench", "chat", "check", "classify", "compare-quality", "doctor", "embed", "profile-memory", "score")
"""Commands that have options of `generate` too."""
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


def section(page: Path, heading: str) -> str:
    """The text below a heading of the page, up to the next heading of the same level or a higher one."""
    level = heading.index(" ")
    _, found, rest = page.read_text(encoding="utf-8").partition(f"\n{heading}\n")
    assert found, f"{page} has no heading {heading!r}"
    return re.split(rf"^#{{1,{level}}} ", rest, flags=re.MULTILINE)[0]


def first_column(text: str) -> list[str]:
    """The names in code style in the first column of a section's tables."""
    return [name for line in text.splitlines() if line.startswith("|") for name in names_in(line.split("|")[1])]


def names_in(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def rows_of(text: str) -> dict[str, str]:
    """The lines of a section's tables, by each name in their first column."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return {name: line for line in lines for name in names_in(line.split("|")[1])}


def test_every_key_is_documented_and_no_other() -> None:
    keys = [key for key in RunConfig.__struct_fields__ if key not in ("speculation", "job", "score", "embed")]
    keys += [f"speculation.{key}" for key in SpeculationConfig.__struct_fields__]
    assert sorted(first_column(section(CONFIGURATION, "## Keys"))) == sorted(keys)
    job_keys = [f"job.{key}" for key in JobConfig.__struct_fields__]
    assert sorted(first_column(section(CONFIGURATION, "## Keys of the `job` section"))) == sorted(job_keys)
    task_keys = [f"score.{key}" for key in ScoreConfig.__struct_fields__]
    task_keys += [f"embed.{key}" for key in EmbedConfig.__struct_fields__]
    assert sorted(first_column(section(CONFIGURATION, "## Keys of the `score` and `embed` sections"))) == sorted(
        task_keys
    )


def test_every_sampling_key_is_documented_and_no_other() -> None:
    documented = first_column(section(ROWS, "## The `sampling` object"))
    assert sorted(documented) == sorted(SamplingParams.__struct_fields__)


def test_flags_stand_beside_the_keys_that_they_set() -> None:
    headings = ("## Keys", "## Keys of the `job` section", "## Keys of the `score` and `embed` sections")
    keys = rows_of("".join(section(CONFIGURATION, heading) for heading in headings))
    sampling = section(ROWS, "## The `sampling` object")
    missing = [
        flag
        for flag, key in flag_keys().items()
        if flag != "--device" and f"`{flag}`" not in (sampling if key.startswith("sampling.") else keys[key])
    ]
    assert missing == []


def test_every_error_type_is_documented_and_no_other() -> None:
    kept = (ROOT / "tests/snapshots/error_types.txt").read_text(encoding="utf-8").splitlines()
    (table,) = [text for text in ROWS.read_text(encoding="utf-8").split("\n\n") if text.startswith("| what is wrong |")]
    documented = [name for line in table.splitlines() for name in re.findall(r"(?:[|,] |also )`(\w+)`", line)]
    assert sorted(documented) == [line.partition(":")[0] for line in kept]


def test_every_command_is_documented_and_no_other() -> None:
    documented = first_column(COMMANDS_PAGE.read_text(encoding="utf-8").split("\n## ")[0])
    assert [name.removeprefix("nvcli ") for name in documented if name.startswith("nvcli ")] == list(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_in_the_usage_of_its_command(command: str) -> None:
    usage = usage_of(command) + (usage_of("generate") if command in LIKE_GENERATE else "")
    options = [parameter for parameter in COMMANDS[command].params if parameter.param_type_name == "option"]
    shown = set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", usage))
    assert [option.opts for option in options if shown.isdisjoint(option.opts) and "--help" not in option.opts] == []


def usage_of(command: str) -> str:
    parts = section(COMMANDS_PAGE, f"## `nvcli {command}`").split("```")
    return next(block for block in parts if block.startswith(f"\nnvcli {command} "))


def test_every_room_is_on_the_map() -> None:
    named = first_column(section(MAP, "## The rooms"))
    folders = [f"{path.parent.name}/" for path in MAP.parent.glob("*/__init__.py")]
    assert [folder for folder in folders if folder not in named] == []


def test_every_script_is_described() -> None:
    text = SCRIPTS.read_text(encoding="utf-8")
    scripts = [path.name for path in SCRIPTS.parent.glob("*") if runs_by_itself(path)]
    assert [name for name in scripts if name not in text] == []


def runs_by_itself(path: Path) -> bool:
    """Whether a file of scripts/ is a program, and not a module or data."""
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8", errors="replace")
    return "__main__" in text if path.suffix == ".py" else text.startswith("#!")


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if not target.startswith("https://"):
                yield page, target


def anchors(page: Path) -> list[str]:
    """The names that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]


@pytest.mark.parametrize(
    ("page", "target"), [pytest.param(*link, id=f"{link[0].parent.name}:{link[1]}") for link in links()]
)
def test_every_link_leads_somewhere(page: Path, target: str) -> None:
    path, _, anchor = target.partition("#")
    there = (page.parent / path).resolve() if path else page
    assert there.exists()
    assert not anchor or anchor in anchors(there)


def test_the_pages_are_short() -> None:
    assert words(MAIN) <= 900
    assert sum(words(page) for page in USER_PAGES) <= 18_000


def words(page: Path) -> int:
    """Count the words of a page as a reader sees them: without comments and the lines of tables."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return len(text.replace("|", " ").split())


def test_messages_that_the_pages_quote_are_those_of_the_program() -> None:
    said = [*section(DOCS / "troubleshooting.md", "## Where do I look first?").splitlines()]
    quoted = [
        message for line in said if line.startswith("|") for message in re.findall(r'"([^"]+)"', line.split("|")[1])
    ]
    source = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py")))
    assert quoted
    assert [message for message in quoted if message not in source] == []


def test_every_family_is_on_its_page_and_no_other() -> None:
    table = section(DOCS / "models.md", "## Can nvcli run my model?")
    documented = [line.split("|")[1:3] for line in table.splitlines() if re.match(r"\| [^|]+ \| `\w", line)]
    assert sorted((name.strip(), tuple(names_in(cell))) for name, cell in documented) == sorted(
        (family.name, tuple(family.architectures)) for family in FAMILIES
    )
    assert f"{len(FAMILIES)} families" in MAIN.read_text(encoding="utf-8")


def test_a_decode_step_reads_in_one_sitting() -> None:
    """The files on the map are there, and few: a reader opens all of them. The counts are about right."""
    lines = re.findall(r"^\d+\. `([^`]+)` \((\d+)\)", section(MAP, "## A decode step, in reading order"), re.MULTILINE)
    counts = {name: lines_of_code(ROOT / "src/nvcli" / name) for name, _ in lines}
    assert 0 < len(counts) <= 16
    assert sum(counts.values()) <= 2500
    for name, count in lines:
        assert int(count) == pytest.approx(counts[name], rel=0.1, abs=10), f"{name} has {counts[name]} lines"


def lines_of_code(path: Path) -> int:
    """Count the lines of a module without comments, docstrings and blank ones."""
    text = path.read_text(encoding="utf-8")
    found: set[int] = set()
    nothing = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(StringIO(text).readline):
        if token.type not in nothing:
            found |= {*range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found -= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(found)
