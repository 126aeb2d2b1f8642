"""How the source reads: no function is long, and docstrings begin with a verb or a noun."""

from __future__ import annotations

import ast
import functools
import gc
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import nvcli

SOURCES = Path(nvcli.__file__).parent
MAX_LINES = 80
FRAGMENT = re.compile(r"(Of|By|Those|What|Whom|Where|Which|That|As|In so)\b")
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


class Definition(NamedTuple):
    """A module, class or function."""

    path: str
    name: str
    num_lines: int
    """Those of a function, with its signature and docstring; 0 for kernels, modules and classes."""
    docstrings: list[str]
    """Its own, and those of its fields and constants."""


@functools.cache
def definitions() -> list[Definition]:
    """Return all that the source files define. Their syntax trees, of millions of objects, are not kept."""
    gc.disable()  # it would look through them again and again, and find nothing
    try:
        return [one for path in sorted(SOURCES.rglob("*.py")) for one in definitions_in(path)]
    finally:
        gc.enable()


def definitions_in(path: Path) -> Iterator[Definition]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in (tree, *statements(tree)):
        if isinstance(node, ast.Module | ast.ClassDef | FUNCTIONS):
            texts = [one.value for one in node.body if isinstance(one, ast.Expr)]
            yield Definition(
                path=str(path.relative_to(SOURCES)),
                name=getattr(node, "name", ""),
                num_lines=0 if not isinstance(node, FUNCTIONS) or is_kernel(node) else num_lines(node),
                docstrings=[str(one.value).strip() for one in texts if isinstance(one, ast.Constant)],
            )


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the statements in a statement, at any depth, with what parts them (`except`, `case`)."""
    for field in ("body", "orelse", "finalbody", "handlers", "cases"):
        for each in getattr(node, field, ()):
            yield each
            yield from statements(each)


def num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton or Gluon compiles a function (`@triton.jit`)."""
    return any(ast.unparse(each).partition("(")[0].endswith(".jit") for each in node.decorator_list)


def test_no_function_is_long() -> None:
    too_long = {f"{one.path} {one.name}": one.num_lines for one in definitions() if one.num_lines > MAX_LINES}
    assert too_long == {}, f"split these functions, of more than {MAX_LINES} lines"


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """A fragment ("Of so many looks but one …") makes sense to nobody who has not read the code."""
    fragments = [
        f"{one.path}: {text.splitlines()[0]}"
        for one in definitions()
        for text in one.docstrings
        if FRAGMENT.match(text)
    ]
    assert fragments == [], "begin these with a verb or a noun, in the field's words"
