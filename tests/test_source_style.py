"""How the source reads: no function is long, and docstrings begin with a verb or a noun."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import nvcli

SOURCES = Path(nvcli.__file__).parent
MAX_LINES = 80
FRAGMENT = re.compile(r"(Of|By|Those|What|Whom|Where|Which|That|As|In so)\b")


@functools.cache
def parsed() -> dict[str, ast.Module]:
    """Return the syntax tree of each source file, by path."""
    paths = sorted(SOURCES.rglob("*.py"))
    return {str(path.relative_to(SOURCES)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def functions() -> Iterator[tuple[str, int]]:
    """Yield each function's file and name, and its lines, with its signature and docstring. Kernels do not count."""
    for path, tree in parsed().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_kernel(node):
                assert node.end_lineno is not None
                yield f"{path} {node.name}", node.end_lineno - node.lineno + 1


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether Triton or Gluon compiles a function (`@triton.jit`)."""
    return any(ast.unparse(each).partition("(")[0].endswith(".jit") for each in node.decorator_list)


def test_no_function_is_long() -> None:
    too_long = {name: lines for name, lines in functions() if lines > MAX_LINES}
    assert too_long == {}, f"split these functions, of more than {MAX_LINES} lines"


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a file, those of fields and constants too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for each in node.body:
                if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                    yield str(each.value.value).strip()


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """A fragment ("Of so many looks but one …") makes sense to nobody who has not read the code."""
    fragments = [
        f"{path}: {text.splitlines()[0]}"
        for path, tree in parsed().items()
        for text in docstrings(tree)
        if FRAGMENT.match(text)
    ]
    assert fragments == [], "begin these with a verb or a noun, in the field's words"
