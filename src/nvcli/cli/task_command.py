"""What `nvcli score` and `nvcli embed` share with `nvcli generate`: its options, and the way of a job's files."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any, cast

import typer

from nvcli.cli.answer_files import JobFiles, ProgressName, ShownProgress, answer_files
from nvcli.cli.generate import chosen_verbosity, generate
from nvcli.cli.job_options import job_flags
from nvcli.cli.key_flags import flag_of
from nvcli.cli.messages import choose_config_file
from nvcli.cli.options import NumRows
from nvcli.cli.values import option_value, optional_value
from nvcli.config import FLAG_KEYS
from nvcli.task_config import Task

_LEFT_OUT = frozenset(("prompts", "raw", "text_field", "seed"))
"""Parameters of `generate` that say something of generated answers alone, beside those of `sampling`."""


def with_task_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `generate` to a command that takes their values as `**options`: all but those that say how
    answers are generated."""
    own = inspect.signature(command, eval_str=True)
    parameters = [one for one in own.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    for name, one in inspect.signature(generate, eval_str=True).parameters.items():
        is_sampling = FLAG_KEYS.get(flag_of(one), "").startswith("sampling.")
        if name not in own.parameters and name not in _LEFT_OUT and not is_sampling:
            parameters.append(one)
    command.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]  # typer reads it
    command.__annotations__ = {one.name: one.annotation for one in parameters} | {"return": None}
    return command


def run_task(task: Task, inputs: list[str], options: dict[str, Any], flags: dict[str, Any]) -> None:
    """Do a job, and leave with its exit code. `options` are the values of the options of `generate`, `flags` the
    others, by flag. Raises what `answer_files` raises."""
    from nvcli.config import load_sourced_config
    from nvcli.jobs.shard import choose_shard
    from nvcli.process_limits import check_process

    check_process()
    config_file = choose_config_file(options["config"])
    progress = cast(ProgressName, option_value("--progress", options["progress"], ProgressName, str))
    limit = optional_value("--limit", options["limit"], NumRows, int)
    shard = None if options["shard"] is None else choose_shard(options["shard"], os.environ)
    run, source = load_sourced_config(
        config_file, options["overrides"] or (), job_flags(options) | flags, settings={"task": task}
    )
    if options["dry_run"]:
        from nvcli.check.check import CheckOptions
        from nvcli.cli.check_report import run_check

        check = CheckOptions(limit=limit, shard=shard)
        run_check(run, source, inputs=inputs, output=options["output"], options=check)
    files = JobFiles(
        inputs=inputs,
        output=options["output"],
        overwrite=options["overwrite"],
        retry_errors=options["retry_errors"],
        update=options["update"],
        limit=limit,
        shard=shard,
    )
    showing = ShownProgress(
        name=progress,
        verbosity=chosen_verbosity(verbose=options["verbose"], quiet=options["quiet"]),
        progress_file=options["progress_file"],
        report=options["report"],
        notes=(),
    )
    raise typer.Exit(answer_files(run, source, files, showing))
