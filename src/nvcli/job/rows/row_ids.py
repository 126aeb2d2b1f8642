"""The ids of rows: a compact set of those in use, and a decoder that finds a row's id without parsing it."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from nvcli.core.hash_set import HashSet
from nvcli.job.job import JobId

_MASK = (1 << 64) - 1
_NAME = re.compile(r"row-(0|[1-9][0-9]{0,17})")
"""The form of generated names."""
_ESCAPED = re.compile(r'["\\\x00-\x1f]')


class RowIdentity(NamedTuple):
    """The id of a row and its origin."""

    id: JobId
    is_named: bool
    """Whether the id is a generated name, because the row has none of its own."""
    is_repeated: bool
    """Whether an earlier row has this id."""

    @property
    def name(self) -> str | None:
        """The generated name; None if the row has its own id."""
        return str(self.id) if self.is_named else None

    @property
    def own_id(self) -> JobId | None:
        """The row's own id; None if it has none."""
        return None if self.is_named else self.id


class SeenIds:
    """A set of ids that costs nothing for rows without ids of their own, and 11 to 22 bytes for others.

    Ids are kept as 64-bit hashes, with a random key in each process: ten million different ids have a chance of three
    in a million that two are taken for one. The names of rows without an id are kept as ranges of their indices.
    """

    def __init__(self) -> None:
        self._hashes = HashSet()
        self._has_names = False
        """Whether a row's own id has the form of a generated name."""
        self._range_starts = array("q")
        self._range_ends = array("q")

    def add(self, row_id: JobId) -> bool:
        """Reserve a row's own id; False if it is taken."""
        if isinstance(row_id, str):
            if row_id.startswith("row-"):
                self._has_names = True
                name = _NAME.fullmatch(row_id)
                if name is not None and self._is_named(int(name[1])):
                    return False
            return self._hashes.add(hash(row_id) & _MASK)
        # The number's text is hashed: hashes of numbers are alike for -1 and -2, and for numbers 2⁶¹ - 1 apart. It is
        # hashed in a tuple, because the text alone may be the id of another row.
        return self._hashes.add(hash((str(row_id), "id")) & _MASK)

    def name(self, index: int) -> str:
        """Generate and reserve a name for a row without an id: `row-7`, or `row-7-2` if that is taken.

        Indices come in ascending order.
        """
        name = f"row-{index}"
        if self._has_names and (hash(name) & _MASK) in self._hashes:
            number = 2
            while not self._hashes.add(hash(f"{name}-{number}") & _MASK):
                number += 1
            return f"{name}-{number}"
        if self._range_ends and self._range_ends[-1] == index:
            self._range_ends[-1] = index + 1
        else:
            self._range_starts.append(index)
            self._range_ends.append(index + 1)
        return name

    def _is_named(self, index: int) -> bool:
        at = bisect_right(self._range_starts, index) - 1
        return at >= 0 and index < self._range_ends[at]


def is_escaped(key: str) -> bool:
    """Tell whether JSON escapes a character of a key, so that `id_decoder` cannot look for it."""
    return _ESCAPED.search(key) is not None


@lru_cache(maxsize=8)  # each input's first rows have a parser of their own
def id_decoder(id_key: str, keys: frozenset[str] = frozenset()) -> Callable[[bytes], Any]:
    """Return a decoder for a row's id, the two keys that identify OpenAI rows, and other `keys`.

    Its objects have the row's `id`, `custom_id` and `body`; UNSET stands for keys that a row does not have. Unlike the
    text of the row, they tell whatever way keys are escaped.
    """
    names = {name: name for name in ("custom_id", "body") if name != id_key} | {"id": id_key}
    names |= {f"own_{number}": key for number, key in enumerate(set(keys).difference(names.values()))}
    fields = [(name, msgspec.Raw if name in ("custom_id", "body") else Any, msgspec.UNSET) for name in names]
    return msgspec.json.Decoder(msgspec.defstruct("_Id", fields, rename=names)).decode
