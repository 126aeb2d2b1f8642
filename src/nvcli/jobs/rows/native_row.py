"""Makes a `Job` of a row in nvcli's own form. Raises RowError."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from nvcli.errors import RowError
from nvcli.jobs.job import Job, JobId, Place
from nvcli.jobs.rows.conversation import check_messages
from nvcli.sampling_params import MAX_INT, SamplingParams
from nvcli.validation import InvalidValue, convert, show


class RowKeys(msgspec.Struct, frozen=True, kw_only=True):
    """The keys under which a row says something to nvcli; every other key is passed through."""

    prompt: str = "prompt"
    messages: str = "messages"
    prompt_token_ids: str = "prompt_token_ids"
    id: str = "id"
    sampling: str = "sampling"

    @property
    def prompts(self) -> tuple[str, ...]:
        return self.prompt, self.messages, self.prompt_token_ids

    @property
    def all(self) -> frozenset[str]:
        return frozenset((*self.prompts, self.id, self.sampling))


class RowDefaults:
    """The defaults of `sampling`, over which a row's own keys go."""

    def __init__(self, defaults: Mapping[str, Any]) -> None:
        """`defaults` are valid as SamplingParams."""
        self._values = dict(defaults)
        self._sampling = convert(self._values, SamplingParams)

    def sampling(self, own: Mapping[str, Any], *, under: str) -> SamplingParams:
        """Return the sampling of a row. `under` is where its keys stand in the row. Raises RowError."""
        if not own:
            return self._sampling
        try:
            return convert({**self._values, **own}, SamplingParams, under=(under,))
        except InvalidValue as error:
            raise RowError("invalid_sampling", error.message) from None


def native_id(row: dict[str, Any], keys: RowKeys, line_id: int) -> JobId:
    if keys.id not in row:
        return line_id
    value = row[keys.id]
    if isinstance(value, str):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and -MAX_INT - 1 <= value <= MAX_INT:
        return value
    raise RowError("invalid_id", f"`{keys.id}` is {show(value)}; allowed: text or an integer of 64 bits")


def native_job(row: dict[str, Any], place: Place, keys: RowKeys, defaults: RowDefaults) -> Job:
    own = row.get(keys.sampling, {})
    if not isinstance(own, dict):
        raise RowError("invalid_sampling", f"`{keys.sampling}` is {show(own)}; expected an object with keys")
    sampling = defaults.sampling(own, under=keys.sampling)
    prompt = row.get(keys.prompt)
    if isinstance(prompt, str) and keys.messages not in row and keys.prompt_token_ids not in row:
        return Job(place=place, prompt=prompt, sampling=sampling)  # most rows
    given = [key for key in keys.prompts if key in row]
    if not given:
        names = "`{}`, `{}` and `{}`".format(*keys.prompts)
        raise RowError("missing_prompt", f"none of {names} is given; give one")
    if len(given) > 1:
        names = " and ".join(f"`{key}`" for key in given)
        raise RowError("conflicting_prompts", f"{names} are given; give one of them")
    (key,) = given
    try:
        if key == keys.prompt:
            return Job(place=place, prompt=convert(row[key], str, under=(key,)), sampling=sampling)
        if key == keys.messages:
            return Job(place=place, messages=check_messages(row[key], under=(key,)), sampling=sampling)
        ids = convert(row[key], list[int], under=(key,))
        return Job(place=place, prompt_token_ids=ids, sampling=sampling)
    except InvalidValue as error:
        raise RowError("invalid_value", error.message) from None
