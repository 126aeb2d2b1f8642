"""LLMs on engines without processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from held_engine import MakeLLM
from nvcli.core.lora_config import LoraConfig
from nvcli.models.config import load_model_config
from nvcli.tools.bench.adapters import write_adapters


@pytest.fixture
def make_llm(model_folder: Path, tokenizer: object, warm_engines: None) -> Iterator[MakeLLM]:
    """`tokenizer` imports transformers once, before the first LLM; with `warm_engines` what renders is a copy."""
    make = MakeLLM(model_folder)
    yield make
    for llm in make.made:
        llm.close()
    assert all(engine.closed for engine in make.engines)


@pytest.fixture(scope="session")
def named_adapters(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> LoraConfig:
    """The adapters one and two of the model, which no engine without processes reads."""
    folder = tmp_path_factory.mktemp("adapters")
    made = write_adapters(load_model_config(model_folder), folder, rank=2, num_adapters=2, seed=0)
    return LoraConfig(adapters=dict(zip(("one", "two"), made.adapters.values(), strict=True)))
