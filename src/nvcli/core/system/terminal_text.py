"""Makes untrusted texts harmless for a terminal.

An answer, a prompt or an error message may hold control characters: escape sequences that move the cursor, change
the title or fill the clipboard, and marks that change the writing direction. They are made visible. Addresses may
hold passwords, which are hidden.
"""

from __future__ import annotations

import re

_KEPT = "\n\t"
_DIRECTION_MARKS = (0x061C, *range(0x200E, 0x2010), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_USER = re.compile(r"""([a-z][a-z0-9+.-]*://)(?:[^\s'"/?\#]+|[^\s'"/?\#:@]*:(?!\d+/)[^\s'"]*)@""", re.IGNORECASE)
"""The user of an address. A password after it, such as an S3 key, may contain slashes and the like."""
_QUERY = re.compile(r"""(https?://[^\s'"?\#]*\?)[^\s'"]+?(?=:?(?:[\s'"]|$))""", re.IGNORECASE)
"""The query of a web address, which holds a key in signed ones."""
_PICTURES = 0x2400
"""Unicode's pictures of the control characters begin here."""
_SHOWN = (
    {code: chr(_PICTURES + code) for code in range(0x20) if chr(code) not in _KEPT}
    | {0x7F: "\u2421"}
    | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
    | {code: f"\\u{code:04x}" for code in (*_DIRECTION_MARKS, 0x2028, 0x2029)}
)


def harmless(text: str) -> str:
    """Return a text with its control characters made visible, except newlines and tabs."""
    return text.translate(_SHOWN)


def without_secrets(text: str) -> str:
    """Return a text with `***` in place of users, passwords and queries of addresses."""
    return _QUERY.sub(r"\1***", _USER.sub(r"\1***@", text)) if "://" in text else text


def one_line(text: str, limit: int | None = None) -> str:
    """Return a harmless text on one line, cut to `limit` characters ending in `…`; None: whole."""
    line = " ".join(text.split()) if limit is None else " ".join(text[: 2 * limit].split())
    if limit is not None and (len(line) > limit or len(text) > 2 * limit):
        line = f"{line[: limit - 1]}…"
    return harmless(line)
