"""`nvcli generate -p TEXT`: the answer to a prompt, without files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nvcli.cli.loading import load_for_person
from nvcli.cli.messages import Interrupted, say, say_error
from nvcli.errors import ConfigError

if TYPE_CHECKING:
    from nvcli.config import RunConfig


def check_prompt_options(
    inputs: Sequence[str],
    prompts: Sequence[str],
    *,
    raw: bool,
    for_files: Mapping[str, Any],
    for_chats: Mapping[str, Any],
) -> None:
    """Check that there are inputs or prompts, and not both. Raises ConfigError.

    `for_files` are options that make no sense with prompts, and `for_chats` those that make none with --raw, by flag;
    a value that is None, False or empty was not given.
    """
    if not inputs and not prompts:
        raise ConfigError(
            "no INPUT: name a file of rows, or - for standard input, or ask with -p TEXT\n  see: nvcli generate --help"
        )
    if inputs and prompts:
        raise ConfigError(f"INPUT {inputs[0]} and -p exclude each other: give the rows of files, or a prompt")
    if raw and not prompts:
        raise ConfigError("--raw is for -p; the rows of INPUT say themselves whether they are conversations")
    for flag, value in for_files.items():
        if prompts and value:
            raise ConfigError(f"{flag} has no effect with -p, whose answer goes to standard output; leave it out")
    for flag, value in for_chats.items():
        if raw and value:
            raise ConfigError(f"{flag} has no effect with --raw, which passes by the chat template; leave one out")


def answer_prompts(run: RunConfig, prompts: Sequence[str], *, raw: bool) -> int:
    """Print the answers to prompts, in their order, with an empty line between two. Return the exit code."""
    from nvcli.cli.answers import say_if_cut, show_stream, write
    from nvcli.llm.prompts import ask, config_for_prompts, num_requests

    num_failed = 0
    raw = raw or run.job.chat == "never"
    try:
        with load_for_person(config_for_prompts(run, raw=raw), num_requests=num_requests(run, len(prompts))) as llm:
            if not raw and not llm.has_chat_template:
                raw = True
                say(f"{run.model} has no chat template, so it continues the prompt as it is")
            for number, stream in enumerate(ask(llm, prompts, raw=raw)):
                if number:
                    write("\n")
                answer = show_stream(stream)
                if (error := answer.error) is not None:
                    num_failed += 1
                    say_error(str(error).removeprefix("rows[0]: "))
                else:
                    say_if_cut(answer)
    except (KeyboardInterrupt, Interrupted):
        raise Interrupted("the answer is not complete") from None
    return 1 if num_failed else 0
