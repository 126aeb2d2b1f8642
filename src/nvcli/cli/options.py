"""Options that several commands have, and how their values are read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nvcli.cli import completion

ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="PATH|NAME",
        help="Folder, Hugging Face id, or `demo`.",
        autocompletion=completion.models,
    ),
]
ShapeOption = Annotated[
    str | None,
    typer.Option(
        "--shape",
        metavar="NAME",
        help="Made-up weights of a known shape, such as qwen3-0.6b; no files.",
        autocompletion=completion.shapes,
    ),
]
ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="YAML file. Without it ./nvcli.yaml, if there is one."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Any key of the configuration; may be repeated.",
        autocompletion=completion.keys,
    ),
]
TpOption = Annotated[
    str | None,
    typer.Option("--tp", metavar="N|auto", help="GPUs (processes) for each copy; auto: what is fastest here."),
]
PpOption = Annotated[
    int | None,
    typer.Option("--pp", metavar="N", help="Stages of layers in each copy, each on --tp GPUs of its own; 1."),
]
DpOption = Annotated[
    str | None, typer.Option("--dp", metavar="N|auto", help="Copies of the model; auto: what is fastest here.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="The result as JSON, on standard output.")]


def parse_size(text: str | None) -> int | str | None:
    """Return the number that `--tp` or `--dp` gives, or its text: the configuration says which words are allowed."""
    return int(text) if text is not None and text.removeprefix("-").isdecimal() else text
