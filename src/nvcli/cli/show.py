"""`nvcli show`: looks at the answers of an output."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Meta

from nvcli.cli.help import RESULT, ROWS
from nvcli.cli.messages import say
from nvcli.cli.pager import print_pages
from nvcli.cli.values import optional_value
from nvcli.errors import ConfigError

if TYPE_CHECKING:
    from nvcli.show.show import Selection

_Count = Annotated[int, Meta(ge=1)]
_Index = Annotated[int, Meta(ge=0)]


def show(
    output: Annotated[str, typer.Argument(metavar="OUTPUT", help="An output of `nvcli generate`, `score` or `embed`.")],
    errors: Annotated[bool, typer.Option("--errors", help="Only rows with errors.", rich_help_panel=ROWS)] = False,
    length: Annotated[
        bool,
        typer.Option(
            "--length", help="Only rows whose answer was cut at its length; with --errors both.", rich_help_panel=ROWS
        ),
    ] = False,
    at_random: Annotated[
        str | None, typer.Option("--random", metavar="N", help="N of these rows, at random.", rich_help_panel=ROWS)
    ] = None,
    row_id: Annotated[
        str | None, typer.Option("--id", metavar="ID", help="The row with this id.", rich_help_panel=ROWS)
    ] = None,
    index: Annotated[
        str | None,
        typer.Option(
            "--index", metavar="N", help="The row with this number of the input, from 0.", rich_help_panel=ROWS
        ),
    ] = None,
    limit: Annotated[
        str | None, typer.Option("--limit", "-n", metavar="N", help="At most N rows.", rich_help_panel=ROWS)
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The rows as they are, a line of JSON each.", rich_help_panel=RESULT)
    ] = False,
) -> None:
    """Show the rows of OUTPUT with their answers, a page at a time on a terminal, in the order of the file.

    OUTPUT may be of any format that `generate` writes, and may still be written. Prompts are shown where the rows
    or the job's input still have them.

    \b
    Examples:
      nvcli show questions.out.jsonl
      nvcli show questions.out.jsonl --random 5
      nvcli show questions.out.jsonl --errors --json | jq -c .error
    """
    from nvcli.show.show import Selection, choose_file

    selection = Selection(
        errors=errors,
        cut=length,
        random=optional_value("--random", at_random, _Count, int),
        limit=optional_value("--limit", limit, _Count, int),
        id=row_id,
        index=optional_value("--index", index, _Index, int),
    )
    alone = [flag for flag, value in (("--id", row_id), ("--index", index)) if value is not None]
    others = [flag for flag, value in (("--errors", errors), ("--length", length), ("--random", at_random)) if value]
    if len(alone) > 1 or (alone and others):
        raise ConfigError(f"{' and '.join([*alone, *others])} exclude each other: {alone[0]} names one row")
    path = choose_file(output)
    print_pages(_texts(path, selection, output=Path(output), as_json=as_json))


def _texts(path: Path, selection: Selection, *, output: Path, as_json: bool) -> Iterator[str]:
    """Yield a text for each row, and say so where there is none."""
    from nvcli.show.page import Page
    from nvcli.show.prompts import Prompts
    from nvcli.show.show import shown_rows

    page = Page(is_coloured=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    count = 0
    with Prompts(output) as prompts:
        for row, line in shown_rows(path, selection, random.Random()):
            count += 1
            yield f"{line.decode()}\n" if as_json else page.format(row, prompts.of(row), prompt_keys=prompts.keys)
    if not count:
        say(f"no row of {path} is of this kind")
