"""Reads the code blocks of the pages, and runs the sessions in them as a reader would type them.

A block of the language `console` is a part of its page's session: lines that begin with `$ ` are commands, and what
follows is what they print. In an output `…` stands for any text; times, speeds and all numbers of `nvcli bench` may be
any. `$ cat FILE` of a file that is not there yet makes it. Other blocks are not run: those of `sh` have commands for
other machines.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from fake_command import ENVIRON
from warm_process import CLIENT, serve_commands

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NUMBER = r"\d[\d,]*(?:\.\d+)?"
_VARYING = [
    (re.compile(rf"{_NUMBER} ?(?=(?:s|ms|µs|min|h)\b)"), "T"),
    (re.compile(rf"{_NUMBER}(?= (?:generated|and|prompt tokens/s|output tokens/s|rows/s))"), "N"),
    (re.compile(rf"(?<=and ){_NUMBER}(?= prompt tokens/s)"), "N"),
]
"""What differs from run to run, and a letter for it."""


_BY_TIME = re.compile(r"nvcli: [\dhms.]+: |  drafts ")
"""Lines that depend on how fast the machine is: progress, and drafts, which are tried where they may pay."""


@dataclass(slots=True, frozen=True)
class Block:
    """One block of code on a page."""

    page: Path
    line: int
    language: str
    text: str


@dataclass(slots=True)
class Command:
    """A command of a session and what it is said to print."""

    line: int
    text: str
    output: list[str] = field(default_factory=list)


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page, text.count("\n", 0, match.start()) + 1, match[1], match[2]) for match in _BLOCK.finditer(text)]


def session(page: Path) -> list[Command]:
    """The commands of all ```` ```console ```` blocks of a page, in order."""
    found: list[Command] = []
    for block in blocks(page):
        if block.language != "console":
            continue
        for number, line in enumerate(block.text.splitlines(), block.line + 1):
            if found and found[-1].text.endswith("\\") and not found[-1].output:
                found[-1].text += f"\n{line}"
            elif line.startswith("$ "):
                found.append(Command(number, line[2:]))
            else:
                found[-1].output.append(line)
    return found


def programs(page: Path) -> list[Block]:
    """The Python programs of a page, with the built-in model in the place of others."""
    found = [block for block in blocks(page) if block.language == "python"]
    return [replace(block, text=re.sub(r'"Qwen/[\w.-]+"', '"demo"', block.text)) for block in found]


def command_lines(page: Path) -> Iterator[tuple[int, list[str]]]:
    """The words of every `nvcli …` that a reader may type: commands of sessions, and lines of shell blocks."""
    lines = [(command.line, command.text) for command in session(page)]
    lines += [
        (block.line, line)
        for block in blocks(page)
        if block.language in ("sh", "bash")
        for line in re.sub(r"\\\n\s*", " ", block.text).splitlines()
    ]
    for number, line in lines:
        for command in re.findall(r"(?<![\w-])nvcli [a-z-]+ [^|]*", line.split("  #")[0]):
            try:
                yield number, shlex.split(command)
            except ValueError:  # the command is in quotes itself
                yield number, command.split()


def differences(page: Path, folder: Path) -> list[tuple[Command, str]]:
    """Run the session of a page in a folder; the commands that print something else than the page says, and what."""
    tools = folder / ".tools"
    installed = tools / "installed" / "nvcli"
    installed.parent.mkdir(parents=True)
    installed.write_text(f"#!{sys.executable}\nfrom nvcli.__main__ import main\n\nmain()\n")  # as pip makes it
    (tools / "nvcli").write_text(CLIENT.format(python=sys.executable, address=str(tools / "socket")))
    (tools / "python").write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    for name in ("nvcli", "python"):
        (tools / name).chmod(0o755)
    environ = {
        **ENVIRON,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "COLUMNS": "110",
        "LC_ALL": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
    }
    with serve_commands(tools / "socket", installed):
        return list(_differences(page, folder, environ))


def _differences(page: Path, folder: Path, environ: dict[str, str]) -> Iterator[tuple[Command, str]]:
    code = 0
    for command in session(page):
        made = re.fullmatch(r"cat ([\w.-]+)", command.text)
        if made and not (folder / made[1]).exists():
            (folder / made[1]).write_text("".join(f"{line}\n" for line in command.output), encoding="utf-8")
            continue
        done = subprocess.run(
            ["bash", "-c", f"(exit {code})\n{command.text}"],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=500,
        )
        code = done.returncode
        lines = [line.rstrip() for line in done.stdout.decode().splitlines() if not _BY_TIME.match(line)]
        printed = "\n".join(lines).strip("\n")
        every = command.text.startswith("nvcli bench")
        if not _alike("\n".join(command.output).strip("\n"), printed, every_number=every):
            yield command, printed


def update(page: Path) -> None:
    """Write what the commands of a page print into it, where that is not what stands there."""
    lines = page.read_text(encoding="utf-8").split("\n")
    with tempfile.TemporaryDirectory() as folder:
        for command, printed in reversed(differences(page, Path(folder))):
            start = command.line + command.text.count("\n")
            lines[start : start + len(command.output)] = printed.split("\n") if printed else []
    page.write_text("\n".join(lines), encoding="utf-8")


def _alike(expected: str, printed: str, *, every_number: bool) -> bool:
    expected, printed = _masked(expected, every_number), _masked(printed, every_number)
    pattern = ".*?".join(re.escape(part) for part in expected.split("…"))
    return re.fullmatch(pattern, printed, re.DOTALL) is not None


def _masked(text: str, every_number: bool) -> str:
    if every_number:
        return re.sub(rf"<?{_NUMBER}", "N", text)
    for pattern, letter in _VARYING:
        text = pattern.sub(letter, text)
    return text


if __name__ == "__main__":  # python tests/page_sessions.py docs/rows.md: what the commands print now
    for name in sys.argv[1:]:
        update(Path(name))
