"""Regular expressions that come with a checkpoint or an adapter. Those that could take long to match are refused."""

from __future__ import annotations

import re

_QUANTIFIED_GROUP = re.compile(r"\)[*+?{]")
_REPEATS = re.compile(r"(?<!\\)[*+{]")
_MOST_REPEATS = 5
"""With more repeats, matching a name of a hundred characters may take minutes."""
_MOST_CHARACTERS = 1000


class BadPattern(ValueError):
    """A pattern cannot be used; the message says why."""


def compile_pattern(pattern: str, expression: str | None = None) -> re.Pattern[str]:
    """Compile `expression`, which is made from `pattern`; None: `pattern` itself.

    Raises BadPattern if the pattern is not a regular expression or could take very long to match.
    """
    repeats = len(_REPEATS.findall(pattern))
    if len(pattern) > _MOST_CHARACTERS or repeats > _MOST_REPEATS or _QUANTIFIED_GROUP.search(pattern):
        raise BadPattern("could take very long to match")
    try:
        return re.compile(pattern if expression is None else expression)
    except re.error as error:
        raise BadPattern(f"is not a regular expression ({error.msg})") from None
    except (OverflowError, RecursionError):
        raise BadPattern("is too large for a regular expression") from None
