"""How the source reads: no function is long."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import nvcli

SOURCES = Path(nvcli.__file__).parent
MAX_LINES = 80
LONGER = {
    "job_run/resolve.py resolve_job": 83,
    "jobs/rows/parser.py _parse": 96,
    "kernels/triton/sampling.py _launch": 85,
}
"""Functions that are still longer than `MAX_LINES`, and how long they may be. The list only becomes shorter."""


def functions() -> Iterator[tuple[str, int]]:
    """Yield each function's file and name, and its lines, with its signature and docstring. Kernels do not count."""
    for path in sorted(SOURCES.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
                assert node.end_lineno is not None
                yield f"{path.relative_to(SOURCES)} {node.name}", node.end_lineno - node.lineno + 1


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton or Gluon compiles a function (`@triton.jit`)."""
    return any(ast.unparse(each).partition("(")[0].endswith(".jit") for each in node.decorator_list)


def test_no_function_is_long() -> None:
    lengths = dict(functions())
    too_long = {name: lines for name, lines in lengths.items() if lines > LONGER.get(name, MAX_LINES)}
    assert too_long == {}, f"split these functions, of more than {MAX_LINES} lines"
    short_by_now = [name for name in LONGER if lengths.get(name, 0) <= MAX_LINES]
    assert short_by_now == [], "take these out of LONGER"
