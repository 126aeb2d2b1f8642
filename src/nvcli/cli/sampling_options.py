"""Options that say how conversations become prompts and how tokens are chosen, for the commands that answer."""

from __future__ import annotations

from typing import Annotated

import typer

from nvcli.cli.help import PROMPTS, SAMPLING

SystemOption = Annotated[
    str | None,
    typer.Option(
        "--system", metavar="TEXT", help="System message of conversations that have none.", rich_help_panel=PROMPTS
    ),
]
ChatTemplateOption = Annotated[
    str | None,
    typer.Option(
        "--chat-template",
        metavar="FILE",
        help="Jinja chat template instead of the model's own.",
        rich_help_panel=PROMPTS,
    ),
]
ChatTemplateKwargsOption = Annotated[
    str | None,
    typer.Option(
        "--chat-template-kwargs",
        metavar="JSON",
        help="Variables of the chat template, such as '{\"enable_thinking\": false}'.",
        rich_help_panel=PROMPTS,
    ),
]
MaxTokensOption = Annotated[
    str | None,
    typer.Option(
        "--max-tokens",
        metavar="N",
        help="Most tokens of an answer; what --max-model-len leaves.",
        rich_help_panel=SAMPLING,
    ),
]
TemperatureOption = Annotated[
    str | None,
    typer.Option("--temperature", metavar="T", help="0: always the likeliest token.", rich_help_panel=SAMPLING),
]
TopPOption = Annotated[
    str | None,
    typer.Option(
        "--top-p",
        metavar="P",
        help="Choose among the likeliest tokens of this probability together; 1: off.",
        rich_help_panel=SAMPLING,
    ),
]
TopKOption = Annotated[
    str | None,
    typer.Option("--top-k", metavar="K", help="Choose among the K likeliest tokens; 0: off.", rich_help_panel=SAMPLING),
]
NOption = Annotated[
    str | None, typer.Option("-n", metavar="N", help="Answers to each row; 1.", rich_help_panel=SAMPLING)
]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="Text that ends an answer; may be repeated.", rich_help_panel=SAMPLING),
]
SeedOption = Annotated[
    str | None,
    typer.Option(
        "--seed",
        metavar="N",
        help="Seed of the run: each row draws its own random numbers from it; 0.",
        rich_help_panel=SAMPLING,
    ),
]
