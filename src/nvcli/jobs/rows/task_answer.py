"""Makes the output row of a result that is scored or embedded, in nvcli's own form."""

from __future__ import annotations

from typing import Any

from nvcli.jobs.job import JobResult, RowForm
from nvcli.jobs.tasks import EmbedAnswer, ScoreAnswer


def task_row(result: JobResult) -> dict[str, Any]:
    """Return the output row without what the input row passed through. A failed row has the same keys."""
    place, answer = result.place, result.answer
    row: dict[str, Any] = {"id": place.id, "index": place.index}
    if place.form is RowForm.EMBEDDING:
        row["embedding"] = answer.embedding if isinstance(answer, EmbedAnswer) else None
        return {**row, "usage": result.usage, "error": result.error}
    scores = answer if isinstance(answer, ScoreAnswer) else None
    row["choices"] = [] if scores is None else scores.choices
    row["best"] = None if scores is None else scores.best
    if scores is not None and scores.correct is not None:
        row["correct"] = scores.correct
    return {**row, "usage": result.usage, "error": result.error}
