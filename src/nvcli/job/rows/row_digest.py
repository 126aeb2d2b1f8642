"""Digests of input rows: 16 bytes that tell whether a row is the one that was answered, wherever it stands.

    bytes 0 to 9      the digest of the row as it is read: of its line, or of a table's values as JSON
    bytes 10 to 15    the digest of the row's own id; zeros for a row without one

They depend on nothing but the row.
"""

from __future__ import annotations

from hashlib import blake2b

import msgspec

from nvcli.errors import RowError
from nvcli.job.job import JobId
from nvcli.job.line_splitter import DroppedLine
from nvcli.job.row_set import RowSet
from nvcli.job.rows.parser import PageRow, Row

DIGEST_BYTES = 16
_CONTENT_BYTES = 10
_ID_BYTES = DIGEST_BYTES - _CONTENT_BYTES
_NO_ID = bytes(_ID_BYTES)

_encode = msgspec.json.Encoder(enc_hook=str, order="deterministic").encode  # columns may be in another order


def row_digest(row: Row, own_id: JobId | None) -> bytes:
    """Return the digest of a row. `own_id` is the row's own id; None: it has none."""
    if isinstance(row, bytes):
        data = row.strip()  # the end of a line may be that of another system
    elif isinstance(row, str):
        data = row.encode()
    elif isinstance(row, DroppedLine):
        data = b"%d" % row.num_bytes
    elif isinstance(row, PageRow):
        data = row.key.encode(errors="surrogateescape")
    elif isinstance(row, RowError):
        data = f"{row.type}: {row.message}".encode()
    else:
        data = _encode(row)
    content = blake2b(data, digest_size=_CONTENT_BYTES).digest()
    if own_id is None:
        return content + _NO_ID
    return content + blake2b(msgspec.json.encode(own_id), digest_size=_ID_BYTES).digest()


class InputRows:
    """All rows of the inputs as they are now, by their digests, and their ids."""

    def __init__(self) -> None:
        self.digests = bytearray()
        """The digests, concatenated."""
        self.repeated = RowSet()
        """Rows with the id of an earlier row."""
        self._names: dict[int, str] = {}
        """Generated names other than `row-N`."""

    @property
    def count(self) -> int:
        return len(self.digests) // DIGEST_BYTES

    def add(self, digest: bytes, *, name: str | None, is_repeated: bool) -> None:
        """Add the next row. `name` is its generated name; None if it has an id."""
        index = self.count
        self.digests += digest
        if name is not None and name != f"row-{index}":
            self._names[index] = name
        if is_repeated:
            self.repeated.add(index)

    def name_of(self, index: int) -> str | None:
        """Return the generated name of a row; None for a row with its own id."""
        end = (index + 1) * DIGEST_BYTES
        if self.digests[end - _ID_BYTES : end] != _NO_ID:
            return None
        return self._names.get(index, f"row-{index}")
