"""The model of these tests, made once."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from nvcli.job_run.text.tokenizer import Tokenizer
from weightless_model import write_weightless_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weightless_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import of transformers is not what these tests are about
        return Tokenizer.load(model_folder)
