"""`nvcli score`: says how likely given texts are to a model, for the rows of files."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from nvcli.cli import completion
from nvcli.cli.help import PROMPTS, RESULT
from nvcli.cli.task_command import run_task, with_task_options


@with_task_options
def score(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT", help="Files, folders, datasets or URLs; - is standard input.")
    ],
    normalize: Annotated[
        str | None,
        typer.Option(
            "--normalize",
            metavar="none|tokens|bytes",
            help="What log-probabilities are divided by before choices are compared.",
            autocompletion=completion.words("none", "tokens", "bytes"),
            rich_help_panel=RESULT,
        ),
    ] = None,
    token_logprobs: Annotated[
        bool,
        typer.Option("--token-logprobs", help="Add each token and its log-probability.", rich_help_panel=RESULT),
    ] = False,
    continuation_field: Annotated[
        str | None,
        typer.Option(
            "--continuation-field",
            metavar="COLUMN",
            help="Key (column) of the continuation.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    choices_field: Annotated[
        str | None,
        typer.Option("--choices-field", metavar="COLUMN", help="Key (column) of the choices.", rich_help_panel=PROMPTS),
    ] = None,
    answer_field: Annotated[
        str | None,
        typer.Option(
            "--answer-field",
            metavar="COLUMN",
            help="Key (column) that says which choice is right.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    **options: Any,
) -> None:
    """Say how likely texts are to the model, for every row of INPUT: prompts are computed, and nothing is generated.

    A row has a prompt as for `generate`, and a `continuation` or several `choices`, whose log-probabilities behind the
    prompt are computed. A row with neither has its prompt scored itself. With the number, the letter or the text of
    the right choice in `answer`, the summary says how many were right.

    INPUT, the output, and how a job is continued are those of `generate`.

    \b
    Examples:
      nvcli score questions.jsonl -m Qwen/Qwen3-8B --normalize bytes
      nvcli score hf://cais/mmlu/abstract_algebra:test --prompt-field question -m demo -o scores.jsonl
      nvcli score texts.txt -m demo -o - | jq '.choices[0].perplexity'
    """
    flags = {
        "--normalize": normalize,
        "--token-logprobs": token_logprobs or None,
        "--continuation-field": continuation_field,
        "--choices-field": choices_field,
        "--answer-field": answer_field,
    }
    run_task("score", inputs, options, flags)
