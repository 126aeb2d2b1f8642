"""Compares two configurations, from files and settings to a report. Torch-free.

First both answer the prompts greedily, one after the other, with engines like those of `generate`. Then ranks that hold
both models read each prompt and its continuation, and compare the distributions of every next token.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence

import msgspec

from nvcli.core.byte_sizes import counted
from nvcli.core.config import RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.lora_config import adapter_choice
from nvcli.core.messages import TOKEN_BYTES
from nvcli.errors import ConfigError, NvcliError, reworded
from nvcli.job.planning.layout import resolve_layout
from nvcli.job.run.resolve import ResolvedModel, resolve_settings
from nvcli.tools.quality.passages import AnswerAgreement, Passage, agreement, greedy_answers, read_passages
from nvcli.tools.quality.ranks import ComparingRanks, PassageTask
from nvcli.tools.quality.statistics import Predictions, TokenSums

_SAY_SECONDS = 15.0
"""Seconds between two lines about progress."""


class QualityReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a comparison. A is the reference."""

    input: str
    model_a: str
    model_b: str
    differences: dict[str, tuple[object, object]]
    """The configuration keys in which A and B differ, with both values."""
    passages: int
    predictions: dict[str, Predictions]
    """Part → predictions: `all` tokens; if rows were answered, also `prompts` and A's `answers`."""
    answers: AnswerAgreement | None
    """None if no answers were requested."""


def compare_quality(
    run_a: RunConfig,
    run_b: RunConfig,
    input_file: str,
    *,
    limit: int,
    context: int,
    max_answer_tokens: int,
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> QualityReport:
    """Compare B with A on the rows or the text of a file (see `read_passages`).

    With `max_answer_tokens` 0 nothing is answered, and only the prompts of rows are read. `say` takes how far it is,
    and `note` the notes of the engines. Raises ConfigError if the two cannot be compared, and what the engines raise.
    """
    run_a, run_b = (msgspec.structs.replace(run, images="never") for run in (run_a, run_b))
    differences = _differences(run_a, run_b)
    if not differences:
        raise ConfigError("A and B are the same configuration; change B with --set-b or --config-b")
    if named := adapter_choice(run_a.lora).named or adapter_choice(run_b.lora).named:
        name, path = next(iter(named.items()))
        raise ConfigError(
            f"`lora` names adapters ({name}), which rows choose from, and all rows are compared with the same models; "
            f"give one without a name: --set-b lora={path}"
        )
    a, b = resolve_settings(run_a), _resolve_b(run_b)
    configs = _engine_configs(a, b, say)
    passages = read_passages(a, input_file, limit=limit, context=context, max_answer_tokens=max_answer_tokens, say=say)
    answers_a: Sequence[array[int] | None] = [None] * len(passages)
    agreed = None
    if max_answer_tokens:
        how_many = counted(len(passages), "prompt")
        say(f"A answers {how_many}")
        answers_a = greedy_answers(run_a, passages, note)
        say(f"B answers {how_many}")
        agreed = agreement(answers_a, greedy_answers(run_b, passages, note))
    tasks = [_task(passage, answer) for passage, answer in zip(passages, answers_a, strict=True)]
    lengths = [len(task.token_ids) // TOKEN_BYTES for task in tasks]
    if max(lengths) > configs[1].max_model_len:
        raise ConfigError(
            f"a passage has {max(lengths):,} tokens, but B's `max_model_len` is {configs[1].max_model_len:,}; raise it "
            "with --set-b, or lower --context and --answer-tokens"
        )
    say(f"A and B read {sum(lengths):,} tokens")
    prompts, answers = TokenSums(), TokenSums()
    with ComparingRanks(configs, max_tokens=max(lengths)) as ranks:
        for line in ranks.wait_ready():
            note(line)
        said_at = time.monotonic()
        for number, task in enumerate(tasks):
            if time.monotonic() - said_at > _SAY_SECONDS:
                said_at = time.monotonic()
                say(f"A and B have read {number:,} of {len(tasks):,} passages")
            of_prompt, of_answer = ranks.compare(task)
            prompts, answers = prompts + of_prompt, answers + of_answer
    parts = {"all": prompts + answers}
    if answers.positions:
        parts |= {"prompts": prompts, "answers": answers}
    return QualityReport(
        input=input_file,
        model_a=run_a.model,
        model_b=run_b.model,
        differences=differences,
        passages=len(tasks),
        predictions={name: Predictions.of(sums) for name, sums in parts.items()},
        answers=agreed,
    )


def _resolve_b(run: RunConfig) -> ResolvedModel:
    """Resolve B. Raises ConfigError and LoadError, which name B."""
    try:
        return resolve_settings(run)
    except NvcliError as error:
        raise reworded(error, f"B, as set by --set-b and --config-b: {error}") from error


def _task(passage: Passage, answer: array[int] | None) -> PassageTask:
    """Return the tokens that both models read: the prompt with the rest of its text or, failing that, A's answer."""
    answer = None if passage.rest else answer
    tokens = passage.prompt + (passage.rest or answer or array("i"))
    # The last token of a prompt predicts the first one of the answer.
    return PassageTask(tokens.tobytes(), len(passage.prompt) - 1 if answer else len(tokens))


def _differences(run_a: RunConfig, run_b: RunConfig) -> dict[str, tuple[object, object]]:
    a, b = (msgspec.to_builtins(run) for run in (run_a, run_b))
    return {key: (a[key], b[key]) for key in a if a[key] != b[key]}


def _engine_configs(
    a: ResolvedModel, b: ResolvedModel, say: Callable[[str], None]
) -> tuple[EngineConfig, EngineConfig]:
    """Return the configurations of the ranks that hold both models. Raises ConfigError if no rank can hold both."""
    if a.model.vocab_size != b.model.vocab_size:
        raise ConfigError(
            f"A ({a.run.model}) has a vocabulary of {a.model.vocab_size:,} tokens, but B ({b.run.model}) has "
            f"{b.model.vocab_size:,}; only models with the same tokens can be compared"
        )
    for name, one in (("A", a.config), ("B", b.config)):
        if one.pipeline_parallel_size > 1:
            raise ConfigError(
                f"`pipeline_parallel_size` of {name} is {one.pipeline_parallel_size}, but pipeline stages cannot be "
                "compared; leave it out and use --tp instead"
            )
    if a.config.device != b.config.device:
        raise ConfigError(f"`device` is {a.config.device} for A but {b.config.device} for B; use the same for both")
    layout = resolve_layout(msgspec.structs.replace(a.run, data_parallel_size=1), a.config, a.model)
    if layout.why:
        say(layout.why)
    config = layout.apply(a.config)
    size = config.tensor_parallel_size
    if b.run.tensor_parallel_size not in ("auto", size):
        raise ConfigError(
            f"`tensor_parallel_size` is {size} for A but {b.run.tensor_parallel_size} for B; the ranks hold both "
            "models, so both need the same --tp"
        )
    b.model.check_tensor_parallel(size)
    return config, msgspec.structs.replace(b.config, tensor_parallel_size=size, gpus=config.gpus)
