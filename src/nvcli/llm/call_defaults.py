"""CallDefaults: the sampling and the adapter of the rows of a call that name none.

A call gives either for all its rows, or a list with one for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any

from nvcli.core.byte_sizes import counted
from nvcli.core.sampling_params import lay_over
from nvcli.core.validation import InvalidValue, show
from nvcli.errors import ConfigError
from nvcli.job.rows.native_row import RowDefaults
from nvcli.job.rows.parser import no_adapter

Lora = str | Sequence[str | None] | None
"""The name of an adapter for all rows, or a list with one for each (None: none); None: not given."""


class CallDefaults:
    """The defaults of each row of a call."""

    def __init__(
        self,
        session_sampling: Mapping[str, Any],
        sampling: Mapping[str, Any] | Sequence[Mapping[str, Any]],
        lora: Lora,
        *,
        adapters: Sequence[str],
    ) -> None:
        """`sampling` goes over the session's; `adapters` are the names that rows may choose. Raises ConfigError."""
        check_lora(lora, adapters)
        self._lengths = {
            name: len(given)
            for name, given in (("sampling_params", sampling), ("lora", lora))
            if not isinstance(given, Mapping | str | None)
        }
        if len(set(self._lengths.values())) > 1:
            numbers = " and ".join(f"{name} has {length}" for name, length in self._lengths.items())
            raise ConfigError(f"{numbers} items; give one for all rows, or one per row")
        length = next(iter(self._lengths.values()), 1)
        samplings = [sampling] * length if isinstance(sampling, Mapping) else sampling
        loras = [lora] * length if isinstance(lora, str | None) else lora
        made: dict[tuple[int, str | None], RowDefaults] = {}  # one object may stand for many rows
        self._defaults: list[RowDefaults] = []
        try:
            for own, name in zip(samplings, loras, strict=True):
                key = id(own), name
                if key not in made:
                    made[key] = RowDefaults(lay_over(session_sampling, own), adapter=name)
                self._defaults.append(made[key])
        except InvalidValue as error:
            raise ConfigError(error.message) from None

    def of_row(self, index: int) -> RowDefaults:
        """Return the defaults of a row. Raises ConfigError if there are more rows than items."""
        if not self._lengths:
            return self._defaults[0]
        if index >= len(self._defaults):
            raise self._wrong_length("more rows")
        return self._defaults[index]

    def check_length(self, num_rows: int) -> None:
        """Raise ConfigError unless there is an item for each of `num_rows`."""
        if self._lengths and num_rows != len(self._defaults):
            raise self._wrong_length(counted(num_rows, "row"))

    def check_rows(self, rows: object) -> None:
        """Raise ConfigError if it is known before they are read that there are not as many rows as items."""
        if isinstance(rows, Sized):
            self.check_length(len(rows))

    def _wrong_length(self, rows: str) -> ConfigError:
        name, length = next(iter(self._lengths.items()))
        return ConfigError(f"{name} has {counted(length, 'item')} for {rows}; give one for all rows, or one per row")


def check_lora(lora: object, adapters: Sequence[str]) -> None:
    """Raise ConfigError if a call's `lora` is not a name, or a list of names, or there is none to choose from. Names
    in a list that no adapter has are errors of their rows."""
    if lora is None:
        return
    names = [lora] if isinstance(lora, str) else lora
    if not isinstance(names, list | tuple) or not all(isinstance(name, str | None) for name in names):
        raise ConfigError(f"`lora` is {show(lora)}; give the name of an adapter, or a list with a name or None per row")
    if not adapters:
        raise ConfigError(
            f"`lora` is {show(lora)}, and this LLM has no adapters with names; give them when it is made: "
            'LLM(model, lora={"adapters": {"NAME": PATH}})'
        )
    if isinstance(lora, str) and lora not in adapters:
        raise ConfigError(no_adapter("lora", lora, adapters))
