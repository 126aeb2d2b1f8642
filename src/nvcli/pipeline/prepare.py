"""Jobs → what the engine needs of them: token ids that fit the model, and how many tokens the answer may have."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from nvcli.config import OnTooLong
from nvcli.errors import RowError
from nvcli.jobs.job import Job, JobResult, Place, failed
from nvcli.messages import pack
from nvcli.pipeline.tokenizer import Tokenizer
from nvcli.sampling_params import SamplingParams


class ModelLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a model and its configuration allow a row."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    on_too_long: OnTooLong = "error"


class PreparedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row that the engine can take: at least one prompt token, and room for `max_tokens` more."""

    place: Place
    prompt_ids: bytes
    """Packed (`messages.pack`)."""
    num_prompt_tokens: int
    max_tokens: int
    stop_ids: list[int]
    sampling: SamplingParams


def prepare(
    rows: Sequence[Job | JobResult], tokenizer: Tokenizer, limits: ModelLimits
) -> list[PreparedRow | JobResult]:
    """One entry for each row, in their order; results (rows that failed before) are handed on as they are."""
    prompts: dict[int, list[int] | RowError] = {}
    plain: dict[int, str] = {}
    chats: dict[int, str] = {}
    for at, row in enumerate(rows):
        if not isinstance(row, Job):
            continue
        if row.prompt is not None:
            plain[at] = row.prompt
        elif row.messages is not None:
            try:
                chats[at] = tokenizer.render(row.messages)
            except RowError as error:
                prompts[at] = error
        else:
            assert row.prompt_token_ids is not None
            prompts[at] = row.prompt_token_ids
    # A chat template writes the special tokens itself.
    for texts, add_special_tokens in ((plain, True), (chats, False)):
        if texts:
            encoded = tokenizer.encode(list(texts.values()), add_special_tokens=add_special_tokens)
            prompts.update(zip(texts, encoded, strict=True))
    eos_ids = limits.eos_token_ids or tuple(eos for eos in (tokenizer.eos_token_id,) if eos is not None)
    return [
        _prepare_row(row, prompts[at], limits, eos_ids) if isinstance(row, Job) else row for at, row in enumerate(rows)
    ]


def _prepare_row(
    job: Job, prompt: list[int] | RowError, limits: ModelLimits, eos_ids: tuple[int, ...]
) -> PreparedRow | JobResult:
    try:
        if isinstance(prompt, RowError):
            raise prompt
        if not prompt:
            raise RowError("empty_prompt", "the prompt has no tokens")
        sampling = job.sampling
        _check_vocabulary("prompt_token_ids", prompt, limits)
        _check_vocabulary("sampling.stop_token_ids", sampling.stop_token_ids, limits)
        _check_vocabulary("sampling.logit_bias", list(sampling.logit_bias), limits)
        ids, max_tokens = _fit(prompt, sampling, limits)
        stop_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}
        return PreparedRow(
            place=job.place,
            prompt_ids=pack(ids),
            num_prompt_tokens=len(ids),
            max_tokens=max_tokens,
            stop_ids=sorted(stop_ids),
            sampling=sampling,
        )
    except RowError as error:
        return failed(job.place, error)


def _check_vocabulary(name: str, ids: Sequence[int], limits: ModelLimits) -> None:
    if ids and not (min(ids) >= 0 and max(ids) < limits.vocab_size):
        wrong = next(i for i in ids if not 0 <= i < limits.vocab_size)
        allowed = f"the model's tokens are 0 to {limits.vocab_size - 1}"
        raise RowError("token_out_of_vocabulary", f"`{name}` holds {wrong}; {allowed}")


def _fit(ids: list[int], sampling: SamplingParams, limits: ModelLimits) -> tuple[list[int], int]:
    """The prompt, cut if need be and allowed, and the most tokens that its answer may have. Raises RowError."""
    max_len = limits.max_model_len
    asked = sampling.max_tokens
    room = max_len - len(ids)
    if room < (asked or 1):
        if limits.on_too_long == "error":
            raise _too_long(len(ids), asked, max_len)
        answer_len = asked or max(1, max_len // 4)
        keep = max_len - answer_len
        if keep < 1:
            raise _too_long(1, asked, max_len)
        ids = ids[-keep:] if limits.on_too_long == "truncate-left" else ids[:keep]
        room = answer_len
    max_tokens = asked or room
    if sampling.min_tokens > max_tokens:
        raise RowError(
            "max_tokens_too_large",
            f"`sampling.min_tokens` is {sampling.min_tokens}, and there is room for {max_tokens} tokens of answer",
        )
    return ids, max_tokens


def _too_long(num_prompt_tokens: int, asked: int | None, max_len: int) -> RowError:
    if num_prompt_tokens >= max_len:
        return RowError(
            "prompt_too_long",
            f"the prompt has {num_prompt_tokens} tokens, and `max_model_len` is {max_len} with the answer; "
            "shorten it, or set `job.on_too_long` to cut it",
        )
    return RowError(
        "max_tokens_too_large",
        f"`sampling.max_tokens` is {asked}, and a prompt of {num_prompt_tokens} tokens leaves room for "
        f"{max_len - num_prompt_tokens} (`max_model_len` is {max_len}); lower it or leave it out",
    )
