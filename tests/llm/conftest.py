"""LLMs on engines without processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from held_engine import MakeLLM


@pytest.fixture
def make_llm(model_folder: Path, tokenizer: object) -> Iterator[MakeLLM]:
    """`tokenizer` imports transformers once, before the first LLM."""
    make = MakeLLM(model_folder)
    yield make
    for llm in make.made:
        llm.close()
    assert all(engine.closed for engine in make.engines)
