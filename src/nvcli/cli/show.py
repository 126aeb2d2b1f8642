"""`nvcli show`: shows the answers of an output."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import Meta

from nvcli.cli.messages import say
from nvcli.cli.options import with_options
from nvcli.cli.pager import print_pages
from nvcli.core.config_types import PositiveInt
from nvcli.core.flags import RESULT, ROWS, Flag
from nvcli.errors import ConfigError

if TYPE_CHECKING:
    from nvcli.tools.show.show import Selection


@with_options()
def show(
    output: Annotated[
        str, typer.Argument(metavar="OUTPUT", help="An output of `nvcli generate`, `score`, `embed` or `classify`.")
    ],
    *,
    errors: Annotated[bool, Flag("--errors", ROWS, "Only rows with errors.")] = False,
    length: Annotated[
        bool, Flag("--length", ROWS, "Only rows whose answer was cut at its length limit; with --errors, both kinds.")
    ] = False,
    at_random: Annotated[PositiveInt | None, Flag("--random", ROWS, "Only N of these rows, at random.")] = None,
    row_id: Annotated[str | None, Flag("--id", ROWS, "Only the row with this id.", "ID")] = None,
    index: Annotated[
        Annotated[int, Meta(ge=0)] | None, Flag("--index", ROWS, "Only the row with this number in the input, from 0.")
    ] = None,
    limit: Annotated[PositiveInt | None, Flag("--limit -n", ROWS, "Only the first N of these rows.")] = None,
    as_json: Annotated[bool, Flag("--json", RESULT, "Print the rows as they are, as JSON lines.")] = False,
) -> None:
    """Show the rows of OUTPUT with their answers, a page at a time on a terminal, in the order of the file.

    OUTPUT may be in any format that `generate` writes, and may still be growing. Prompts are shown if the rows
    or the job's input still have them.

    \b
    Examples:
      nvcli show questions.out.jsonl
      nvcli show questions.out.jsonl --random 5
      nvcli show questions.out.jsonl --errors --json | jq -c .error
    """
    from nvcli.tools.show.show import Selection, choose_file

    selection = Selection(errors=errors, cut=length, random=at_random, limit=limit, id=row_id, index=index)
    alone = [flag for flag, value in (("--id", row_id), ("--index", index)) if value is not None]
    others = [flag for flag, value in (("--errors", errors), ("--length", length), ("--random", at_random)) if value]
    if len(alone) > 1 or (alone and others):
        raise ConfigError(f"{' and '.join([*alone, *others])} exclude each other: {alone[0]} names one row")
    output = os.path.expanduser(output)
    path = choose_file(output)
    print_pages(_texts(path, selection, output=Path(output), as_json=as_json))


def _texts(path: Path, selection: Selection, *, output: Path, as_json: bool) -> Iterator[str]:
    """Yield a text for each row, and say so if there are none."""
    from nvcli.tools.show.page import Page
    from nvcli.tools.show.prompts import Prompts
    from nvcli.tools.show.show import shown_rows

    page = Page(is_coloured=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    count = 0
    with Prompts(output) as prompts:
        for row, line in shown_rows(path, selection, random.Random()):
            count += 1
            yield f"{line.decode()}\n" if as_json else page.format(row, prompts.of(row), prompt_keys=prompts.keys)
    if not count:
        say(f"no row of {path} is of this kind")
