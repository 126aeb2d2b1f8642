"""`nvcli generate -p TEXT`: answers a prompt, without files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nvcli.cli.answer_files import JobOptions
from nvcli.cli.answers import config_for_person, load_for_person, say_if_cut, show_stream, write
from nvcli.cli.messages import Interrupted, say, say_error
from nvcli.core.config import flag_keys
from nvcli.core.flags import flagged_fields
from nvcli.core.lora_config import adapter_choice
from nvcli.errors import ConfigError

if TYPE_CHECKING:
    from nvcli.core.config import RunConfig
    from nvcli.llm.rows import Row


_OF_CHATS = ("--chat", "--system", "--chat-template", "--chat-template-kwargs")
"""Options that have no effect with `--raw`."""
_ALSO_FOR_PROMPTS = {*_OF_CHATS, "--no-chat", "--progress", "--verbose", "--quiet"}
"""Options of jobs that also work with prompts."""


def check_prompt_options(
    inputs: Sequence[str], prompts: Sequence[str], *, raw: bool, job: JobOptions, flags: Mapping[str, Any]
) -> None:
    """Check that there are inputs or prompts, and not both. Raises ConfigError.

    `flags` are the values of options that set keys.
    """
    if not inputs and not prompts:
        raise ConfigError(
            "no INPUT: name a file of rows, or - for standard input, or ask with -p TEXT\n  see: nvcli generate --help"
        )
    if inputs and prompts:
        raise ConfigError(f"INPUT {inputs[0]} and -p exclude each other: give the rows of files, or a prompt")
    if raw and not prompts:
        raise ConfigError("--raw is for -p; in INPUT each row says whether it is a conversation")
    fields = flagged_fields(type(job))
    given = [field.flag.name for name, field in fields.items() if getattr(job, name) != field.default]
    given += [flag for flag in flags if flag_keys()[flag].startswith("job.")]
    for flag in given:
        if prompts and flag not in _ALSO_FOR_PROMPTS:
            raise ConfigError(f"{flag} has no effect with -p, whose answer goes to standard output; leave it out")
        if raw and flag in _OF_CHATS:
            raise ConfigError(f"{flag} has no effect with --raw, which skips the chat template; leave one out")


def answer_prompts(run: RunConfig, prompts: Sequence[str], *, raw: bool) -> int:
    """Print the answers to prompts, in order, separated by empty lines. Return the exit code."""
    num_failed = 0
    if named := adapter_choice(run.lora).named:
        name, path = next(iter(named.items()))
        raise ConfigError(
            f"`lora` names adapters ({name}), which rows choose from, and -p has no rows; give one without a name, for "
            f"all prompts: --lora {path}"
        )
    raw = raw or run.job.chat == "never"
    try:
        num_answers = len(prompts) * run.sampling.get("n", 1)
        with load_for_person(config_for_person(run, raw=raw), num_requests=num_answers) as llm:
            if not raw and not llm.has_chat_template:
                raw = True
                say(f"{run.model} has no chat template, so it continues the prompt as it is")
            rows: Sequence[Row] = prompts if raw else [[{"role": "user", "content": text}] for text in prompts]
            for number, stream in enumerate([llm.stream(row) for row in rows]):  # all at the same time
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
