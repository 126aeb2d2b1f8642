"""The model of these tests: one token for each byte of a text, and no weights."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from nvcli.job.text.tokenizer import Tokenizer
from weightless_model import write_weightless_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_weightless_model(tmp_path_factory.mktemp("model"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import of transformers is not what these tests are about
        Tokenizer.load(folder)
    return folder
