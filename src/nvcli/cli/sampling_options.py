"""Options that say how conversations become prompts and how tokens are chosen, for the commands that answer."""

from __future__ import annotations

from typing import Annotated

import typer

from nvcli.cli.help import PROMPTS, SAMPLING

ChatOption = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Send prompts as user messages, through the chat template, or as they are [default: as user messages "
        "those of --prompt-field and --prompt-template, if the model has a chat template]",
        show_default=False,
        rich_help_panel=PROMPTS,
    ),
]
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
        help="Maximum tokens of an answer [default: what --max-model-len leaves]",
        rich_help_panel=SAMPLING,
    ),
]
TemperatureOption = Annotated[
    str | None,
    typer.Option(
        "--temperature",
        metavar="T",
        help="0: always the likeliest token [default: the checkpoint's, else 1]",
        rich_help_panel=SAMPLING,
    ),
]
TopPOption = Annotated[
    str | None,
    typer.Option(
        "--top-p",
        metavar="P",
        help="Choose among the likeliest tokens of this probability together; 1: off "
        "[default: the checkpoint's, else 1]",
        rich_help_panel=SAMPLING,
    ),
]
TopKOption = Annotated[
    str | None,
    typer.Option(
        "--top-k",
        metavar="K",
        help="Choose among the K likeliest tokens; 0: off [default: the checkpoint's, else 0]",
        rich_help_panel=SAMPLING,
    ),
]
MinPOption = Annotated[
    str | None,
    typer.Option(
        "--min-p",
        metavar="P",
        help="Leave out tokens below this share of the likeliest one's probability; 0: off "
        "[default: the checkpoint's, else 0]",
        rich_help_panel=SAMPLING,
    ),
]
RepetitionPenaltyOption = Annotated[
    str | None,
    typer.Option(
        "--repetition-penalty",
        metavar="X",
        help="Above 1: tokens of the prompt and the answer become less likely; 1: off "
        "[default: the checkpoint's, else 1]",
        rich_help_panel=SAMPLING,
    ),
]
PresencePenaltyOption = Annotated[
    str | None,
    typer.Option(
        "--presence-penalty",
        metavar="X",
        help="Taken from the logits of tokens that the answer has, -2 to 2.",
        rich_help_panel=SAMPLING,
    ),
]
FrequencyPenaltyOption = Annotated[
    str | None,
    typer.Option(
        "--frequency-penalty",
        metavar="X",
        help="The same, times how often the answer has them, -2 to 2.",
        rich_help_panel=SAMPLING,
    ),
]
IgnoreEosOption = Annotated[
    bool,
    typer.Option(
        "--ignore-eos", help="Answers go on behind end-of-sequence tokens, to --max-tokens.", rich_help_panel=SAMPLING
    ),
]
LogprobsOption = Annotated[
    str | None,
    typer.Option(
        "--logprobs",
        metavar="N",
        help="Log-probability of each token of an answer, and of the N likeliest in its place.",
        rich_help_panel=SAMPLING,
    ),
]
NOption = Annotated[str | None, typer.Option("-n", metavar="N", help="Answers to each row.", rich_help_panel=SAMPLING)]
StopOption = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="Text that ends an answer; may be repeated.", rich_help_panel=SAMPLING),
]
SeedOption = Annotated[
    str | None,
    typer.Option(
        "--seed",
        metavar="N",
        help="Seed of the run: each row draws its own random numbers from it.",
        rich_help_panel=SAMPLING,
    ),
]
