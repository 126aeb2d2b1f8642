"""The estimate by which layouts are chosen is near what was measured on two and four GPUs."""

from __future__ import annotations

import pytest

from figures import RESULTS, read_results
from layout_times import estimated
from nvcli.tools.check.machine import named_gpus


@pytest.mark.parametrize(
    ("file", "error"),
    [("h200s-layouts-2", 0.15), ("h200s-layouts-4", 0.15), ("h200s-tp-2", 0.35), ("h200s-tp-4", 0.3)],
)
def test_estimates_are_near_what_was_measured(file: str, error: float) -> None:
    for name, result in read_results(RESULTS / f"{file}.json").items():
        gpus = named_gpus("h200", result.num_devices)
        assert gpus is not None
        layout, rate = estimated(result.command, gpus)
        assert rate == pytest.approx(result.figures["output_tokens_per_second"], rel=error), (name, layout)
