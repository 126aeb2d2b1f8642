"""The estimate by which layouts are chosen is near what was measured on one, two and four GPUs."""

from __future__ import annotations

import pytest

from figures import RESULTS, read_results
from layout_times import estimated
from nvcli.tools.check.machine import named_gpus


@pytest.mark.parametrize(
    ("file", "least", "most"),
    [
        ("h200s-layouts-2", 0.97, 1.10),
        ("h200s-layouts-4", 0.96, 1.06),
        ("h200s-tp-2", 0.90, 1.13),
        ("h200s-tp-4", 0.95, 1.05),
        ("h200-fp8", 0.95, 1.15),
        ("h200-w4a16", 0.97, 1.06),
        ("h200-glm-4.7-flash", 0.97, 1.08),
        ("h200-latent-attention", 0.97, 1.06),
    ],
)
def test_estimates_are_near_what_was_measured(file: str, least: float, most: float) -> None:
    """Ratios of estimate and measurement lie close together, as layouts are chosen by the ratios of their estimates."""
    for name, result in read_results(RESULTS / f"{file}.json").items():
        gpus = named_gpus("h200", result.num_devices)
        assert gpus is not None
        layout, rate = estimated(result.command, gpus)
        ratio = rate / result.figures["output_tokens_per_second"]
        assert least < ratio < most, (name, layout, ratio)
