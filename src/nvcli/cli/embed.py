"""`nvcli embed`: makes an embedding of each row of files."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from nvcli.cli import completion
from nvcli.cli.help import RESULT
from nvcli.cli.task_command import run_task, with_task_options
from nvcli.cli.values import plain_value


@with_task_options
def embed(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT", help="Files, folders, datasets or URLs; - is standard input.")
    ],
    pooling: Annotated[
        str | None,
        typer.Option(
            "--pooling",
            metavar="auto|last|mean|cls",
            help="Which hidden states become the embedding; auto: as the checkpoint says.",
            autocompletion=completion.words("auto", "last", "mean", "cls"),
            rich_help_panel=RESULT,
        ),
    ] = None,
    dimensions: Annotated[
        str | None,
        typer.Option(
            "--dimensions", metavar="N", help="Keep the first N numbers of each embedding.", rich_help_panel=RESULT
        ),
    ] = None,
    encoding: Annotated[
        str | None,
        typer.Option(
            "--encoding",
            metavar="float|base64",
            help="Numbers, or base64 of little-endian float32.",
            autocompletion=completion.words("float", "base64"),
            rich_help_panel=RESULT,
        ),
    ] = None,
    **options: Any,
) -> None:
    """Make an embedding (a vector) of every row of INPUT, with an embedding model that is a decoder.

    A row has a prompt as for `generate`. Which hidden states become the embedding, and whether its length is 1, the
    checkpoint says (modules.json). An instruction such as "Instruct: …" is part of the prompt; --prompt-template adds
    it. Rows of OpenAI batch files for /v1/embeddings are answered in OpenAI's form.

    INPUT, the output, and how a job is continued are those of `generate`. In Parquet an embedding is a list of floats.

    \b
    Examples:
      nvcli embed texts.jsonl -m Qwen/Qwen3-Embedding-0.6B -o vectors.parquet
      nvcli embed texts.csv -m Qwen/Qwen3-Embedding-8B --dimensions 256 --prompt-template 'Query: {text}'
    """
    flags = {
        "--pooling": pooling,
        "--dimensions": plain_value(dimensions),
        "--encoding": encoding,
    }
    run_task("embed", inputs, options, flags)
