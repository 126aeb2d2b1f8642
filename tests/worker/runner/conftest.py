"""What tests of runners on a GPU share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def memory_is_given_back() -> Iterator[None]:
    """The next test finds the GPU's memory free."""
    yield
    import torch

    gc.collect()  # a runner's parts refer to each other
    torch.cuda.empty_cache()
