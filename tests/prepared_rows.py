"""Prepared rows for tests of the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nvcli.core.messages import pack
from nvcli.core.sampling_params import SamplingParams
from nvcli.job.job import RowContext
from nvcli.job.text.prepare import PreparedRow


def prepared_row(index: int, prompt: Sequence[int], **fields: Any) -> PreparedRow:
    """`max_tokens` is asked for where it is given."""
    max_tokens = fields.pop("max_tokens", None)
    defaults: dict[str, Any] = {
        "context": RowContext(id=index, index=index, line=f"line {index + 1}"),
        "sampling": SamplingParams(max_tokens=max_tokens),
        "stop_ids": [],
        "num_bytes": 4 * len(prompt),
    }
    return PreparedRow(
        prompt_ids=pack(prompt), num_prompt_tokens=len(prompt), max_tokens=max_tokens or 10, **{**defaults, **fields}
    )
