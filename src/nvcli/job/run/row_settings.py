"""RowSettings: a model, and the settings by which a run reads rows for it: their keys, the defaults of their
`sampling`, which texts become user messages, and the task.

No setting of the engines is chosen yet. Imports no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from nvcli.core.chat_template import read_chat_template
from nvcli.core.config import JobConfig, RunConfig
from nvcli.core.job_config import MESSAGES_KEY, PROMPT_KEY
from nvcli.core.lora_config import adapter_choice
from nvcli.core.sampling_params import SamplingParams, lay_over
from nvcli.core.text_template import TextTemplate
from nvcli.core.validation import InvalidValue, convert, show
from nvcli.errors import ConfigError
from nvcli.job.job import Caller, EmbedTask
from nvcli.job.rows.native_row import ADAPTER_KEY, RowKeys
from nvcli.job.rows.parser import RowParser
from nvcli.job.rows.prompt_rules import PromptRules, TextKinds
from nvcli.job.rows.raw_values import as_json
from nvcli.job.rows.task_rows import ClassifyRows, EmbedRows, ScoreRows, TaskRows
from nvcli.job.run.chat_choice import choose_chat
from nvcli.job.run.embedding_settings import embedding_settings
from nvcli.job.run.settings import SetterOf, Setting, sampling_settings, unknown_setter
from nvcli.job.text.tokenizer import has_chat_template
from nvcli.models.config import ModelConfig
from nvcli.models.families.catalogue import CLASSIFIER, find_family
from nvcli.models.generation_config import GENERATION_CONFIG_FILE

_INSTEAD = {"min_length": "min_tokens"}
"""Keys of `sampling` that do what keys of generation_config.json would in transformers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSettings:
    """A model, and what a run says of its rows."""

    run: RunConfig
    model_path: Path
    model: ModelConfig
    """The model as its checkpoint is; in `ResolvedModel`, as the run's ranks keep it."""
    sampling_defaults: Mapping[str, Any]
    """Defaults of a row's `sampling`."""
    chat_template: str | None
    """A chat template that replaces the checkpoint's own; None: there is none."""
    has_chat_template: bool
    """Whether conversations can be answered, judging by the checkpoint's files and that template."""
    task: TaskRows | None
    """The task computed instead of answers; None: answers."""
    setter_of: SetterOf
    """Names what set a key of `run`."""

    def choose_chat(self, task: TaskRows | None = None) -> TextKinds:
        """Return which texts of rows become messages. Raises ConfigError. `task` is as in `make_parser`."""
        is_task = (task or self.task) is not None
        return choose_chat(
            self.run, is_task=is_task, has_chat_template=self.has_chat_template, setter_of=self.setter_of
        )

    @property
    def sampling(self) -> list[Setting]:
        """The sampling of a row without its own, parameter by parameter; empty if the run generates nothing."""
        return (
            [] if self.task is not None else sampling_settings(self.run, self.model.generation_defaults, self.setter_of)
        )

    @property
    def warnings(self) -> list[str]:
        """Warnings about what the checkpoint asks for in vain."""
        told = None if self.task is not None else describe_not_applied(self.run, self.model)
        return [f"warning: {self.model_path / GENERATION_CONFIG_FILE}: {told}"] if told else []

    def make_parser(
        self,
        chat: TextKinds,
        *,
        keep: Callable[[Any], Any] = as_json,
        caller: Caller | None = None,
        task: TaskRows | None = None,
    ) -> RowParser:
        """Make a parser of rows in which texts become messages as `chat` says. `keep` and `caller` are those of
        `RowParser`. `task` replaces answers; None: as the run says."""
        job, adapters = self.run.job, self.adapter_names
        rules = PromptRules(
            prompt_template=None if job.prompt_template is None else TextTemplate(job.prompt_template),
            messages_template=tuple((each.role, TextTemplate(each.content)) for each in job.messages_template),
            chat=chat,
            has_chat_template=self.has_chat_template,
            system=job.system,
            chat_template_kwargs=job.chat_template_kwargs,
        )
        return RowParser(
            self.sampling_defaults,
            msgspec.structs.replace(row_keys(job), adapter=ADAPTER_KEY) if adapters else row_keys(job),
            rules,
            keep=keep,
            keep_input=job.keep_input,
            caller=caller,
            task=task or self.task,
            adapters=adapters,
        )

    @property
    def adapter_names(self) -> tuple[str, ...]:
        """The names of the LoRA adapters that rows may choose."""
        return tuple(adapter_choice(self.run.lora).named)


def read_row_settings(
    run: RunConfig, model_path: Path, model: ModelConfig, setter_of: SetterOf = unknown_setter
) -> RowSettings:
    """Read what rows need of a checkpoint's small files. Raises ConfigError and LoadError."""
    task = task_rows(run, model, model_path)
    job = run.job
    template = None if job.chat_template is None else read_chat_template(Path(os.path.expanduser(job.chat_template)))
    has_template = has_chat_template(model_path) if template is None else bool(template)
    if template is None and not has_template and (family := find_family(model.architecture)) is not None:
        template = family.chat_template
        has_template = template is not None
    return RowSettings(
        run=run,
        model_path=model_path,
        model=model,
        sampling_defaults=sampling_defaults(run, model) if task is None else {},
        chat_template=template,
        has_chat_template=has_template,
        task=task,
        setter_of=setter_of,
    )


def task_rows(run: RunConfig, model: ModelConfig, model_path: Path) -> TaskRows | None:
    """Return the task that replaces answers; None: answers. Raises ConfigError and LoadError."""
    classifier = model.classifier
    if classifier is None and run.task == "classify":
        raise ConfigError(
            f"{run.model} is a {model.architecture}, which has no classes; use `nvcli score` or `nvcli embed`, or a "
            f"model whose architecture ends in {CLASSIFIER} (if an adapter brings the head, `hf_overrides` names it: "
            "see `nvcli classify --help`)"
        )
    if classifier is not None:
        if run.task != "classify":
            raise ConfigError(
                f"{run.model} is a {model.architecture}, which gives numbers for classes alone: use `nvcli classify` "
                "(`task`: classify)"
            )
        return ClassifyRows(classifier)
    if run.task != "embed":
        if not model.has_head or model.both_ways:
            why = "whose tokens attend to later ones, so that it" if model.both_ways else "which has no LM head and"
            raise ConfigError(
                f"{run.model} is a {model.architecture}, {why} gives no tokens or their probabilities; `nvcli embed` "
                "makes embeddings with it"
            )
        return None if run.task == "generate" else ScoreRows(run.score)
    settings = embedding_settings(run, model_path, model)
    task = EmbedTask(
        position=settings.position,
        gets_mean=model.both_ways or settings.needs_whole_prompts,
        normalize=settings.normalize,
        prefix=settings.prefix,
        dimensions=run.embed.dimensions,
        encoding=run.embed.encoding,
    )
    return EmbedRows(task)


def sampling_defaults(run: RunConfig, model: ModelConfig) -> dict[str, Any]:
    """Return the defaults of a row's `sampling`: the config's `sampling` over the checkpoint's generation_config.

    Holds only keys that somebody set. Raises ConfigError.
    """
    own = dict(model.generation_defaults) if run.generation_config == "auto" else {}
    defaults = lay_over(own, run.sampling)
    try:
        convert(defaults, SamplingParams, under=("sampling",))
    except InvalidValue as error:
        raise ConfigError(
            f"{run.model}: generation_config.json and `sampling` together: {error.message}; "
            "`generation_config: none` leaves the checkpoint's defaults out"
        ) from None
    return defaults


def describe_not_applied(run: RunConfig, model: ModelConfig) -> str | None:
    """Describe the keys of generation_config.json that the run leaves without effect; None: there are none."""
    keys = []
    for key, value in model.not_applied.items() if run.generation_config == "auto" else ():
        instead = _INSTEAD.get(key)
        if instead not in run.sampling:
            keys.append(f"`{key}` {show(value)}{f' (set `sampling.{instead}`)' if instead else ''}")
    return f"not applied, unlike in transformers: {', '.join(keys)}" if keys else None


def row_keys(job: JobConfig) -> RowKeys:
    """Return the keys of a job's rows that mean something to nvcli."""
    prompt, messages = job.prompt_field, job.messages_field or MESSAGES_KEY
    named = [prompt] if prompt != PROMPT_KEY else []
    named += [messages] if job.messages_field is not None else []
    return RowKeys(
        prompt=prompt if prompt != messages else None,
        messages=messages,
        id=job.id_field,
        image=job.image_field,
        deciding=named[0] if len(named) == 1 else None,
    )
