"""Gives a line of an output the number that its row has now; its answer stays as it is, byte for byte."""

from __future__ import annotations

import msgspec

from nvcli.jobs.rows.openai_answer import BATCH_ID

_Values = dict[str, msgspec.Raw]

_split = msgspec.json.Decoder(_Values).decode
_join = msgspec.json.Encoder().encode


def moved_row(line: bytes, index: int, name: str | None) -> bytes:
    """Return a sound line of an output for another index.

    `name` is the name of a row without an id of its own, which follows from its index.
    """
    row = _split(line)
    if "index" in row:
        row["index"] = _raw(index)
        if name is not None:
            row["id"] = _raw(name)
        return _join(row)
    row["id"] = _raw(f"{BATCH_ID}{index}")
    response = _split(row["response"])
    response["request_id"] = _raw(f"req_{index}")
    body = _split(response["body"])
    if "id" in body:  # an answer, and no error
        body["id"] = _moved_id(body["id"], index)
    if "output" in body:  # of /v1/responses
        items = [_split(item) for item in msgspec.json.decode(body["output"], type=list[msgspec.Raw])]
        body["output"] = msgspec.Raw(_join([{**item, "id": _moved_id(item["id"], index)} for item in items]))
    response["body"] = msgspec.Raw(_join(body))
    row["response"] = msgspec.Raw(_join(response))
    return _join(row)


def _moved_id(raw: msgspec.Raw, index: int) -> msgspec.Raw:
    kind = str(msgspec.json.decode(raw)).rpartition("-")[0]
    return _raw(f"{kind}-{index}")


def _raw(value: str | int) -> msgspec.Raw:
    return msgspec.Raw(_join(value))
