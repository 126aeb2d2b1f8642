"""NamePatterns: which layers a quantised checkpoint left unquantised, by the list in its config.json.

transformers' lists hold names, beginnings or ends of names, and unmarked regular expressions; compressed-tensors' hold
names, and regular expressions prefixed with `re:`; NVIDIA's hold wildcards. A list comes from the checkpoint, so
regular expressions that could take very long to match are refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import translate
from functools import lru_cache

from nvcli.core.validation import show
from nvcli.errors import ConfigError
from nvcli.models.patterns import BadPattern, compile_pattern

_MARK = "re:"
_PLAIN = re.compile(r"[\w.-]*")


class NamePatterns:
    """A compiled list of patterns. Raises ConfigError for patterns that cannot be used."""

    def __init__(self, patterns: Iterable[str]) -> None:
        patterns = tuple(patterns)
        self._plain = frozenset(pattern for pattern in patterns if _PLAIN.fullmatch(pattern))
        self._expressions = tuple(_compile(pattern) for pattern in patterns if pattern not in self._plain)

    def match(self, name: str) -> bool:
        """Whether a pattern equals the name, or whole words at its beginning or end, or matches from its beginning to
        the end of one of its words."""
        words = name.split(".")
        parts = (".".join(words[:count]) for count in range(1, len(words) + 1))
        ends = (".".join(words[first:]) for first in range(len(words)))
        if self._plain and not self._plain.isdisjoint((*parts, *ends)):
            return True
        return any(expression.match(name) for expression in self._expressions)


@lru_cache(maxsize=8)  # the same list is asked for each layer
def name_patterns(patterns: tuple[str, ...]) -> NamePatterns:
    """Return the compiled patterns, which are cached. Raises ConfigError for those that cannot be used."""
    return NamePatterns(patterns)


def _compile(pattern: str) -> re.Pattern[str]:
    if not pattern.startswith(_MARK) and "*" in pattern and ".*" not in pattern:
        expression = translate(pattern)
    else:
        expression = rf"(?:{pattern.removeprefix(_MARK)})(?:(?<=\.)|(?=\.|$))"
    try:
        return compile_pattern(pattern, expression)
    except BadPattern as error:
        raise ConfigError(_message(pattern, str(error))) from None


def _message(pattern: str, problem: str) -> str:
    return (
        f"config.json: `quantization_config` leaves out layers by the pattern {show(pattern)}: {problem}; write the "
        "layers' names there, or use quantization: none, which needs no patterns"
    )
