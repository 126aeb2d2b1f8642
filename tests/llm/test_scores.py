"""Scores and embeddings for Python programs: one LLM generates and scores, another makes embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model_engine import ModelEngine, write_byte_model
from nvcli.core.config import RunConfig
from nvcli.core.validation import convert
from nvcli.errors import ConfigError
from nvcli.llm.llm import LLM

pytestmark = pytest.mark.usefixtures("tokenizer", "warm_engines")  # the first imports transformers once


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("models") / "byte-model")


def open_llm(model: Path, **config: Any) -> LLM:
    settings = {"model": str(model), "device": "cpu", "max_num_seqs": 4, "block_size": 4, **config}
    return LLM.from_config(convert(settings, RunConfig), start=ModelEngine, note=lambda line: None)


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with open_llm(model) as llm:
        yield llm


def test_one_llm_scores_and_generates(llm: LLM) -> None:
    tag = object()
    row = {"prompt": "abcd", "choices": ["e", "fg"], "answer": 1, "tag": tag}
    scored, whole = llm.score([row, "abcde"], order="input", normalize="tokens", token_logprobs=True)
    (generated,) = llm.generate("abcd", sampling={"max_tokens": 2, "temperature": 0})
    assert scored["tag"] is tag
    assert [choice["text"] for choice in scored["choices"]] == ["e", "fg"]
    assert scored["choices"][1]["score"] == pytest.approx(scored["choices"][1]["logprob"] / 2)
    assert scored["correct"] == (scored["best"] == 1)
    assert whole["choices"][0]["token_logprobs"][-1] == pytest.approx(scored["choices"][0]["logprob"], abs=1e-4)
    assert len(generated["choices"]) == 1
    assert (whole.text, whole.finish_reason) == ("", None)


def test_wrong_calls_are_said(llm: LLM) -> None:
    with pytest.raises(ConfigError, match=r'makes answers and scores alone; for `embed`, make it with task="embed"'):
        llm.embed("a")
    with pytest.raises(ConfigError, match=r"`score.normalize` is \"words\""):
        llm.score("a", normalize="words")  # type: ignore[arg-type]
    (bad,) = llm.score({"prompt": "a", "choices": "b"})
    assert bad.error is not None
    assert bad.error.type == "invalid_value"


def test_an_llm_for_scores_makes_nothing_else(model: Path) -> None:
    with open_llm(model, task="score") as llm:
        assert next(llm.score("abcd"))["best"] == 0
        with pytest.raises(ConfigError, match=r"makes scores alone; for `generate`, leave `task` out"):
            llm.generate("a")


def test_an_llm_for_embeddings_makes_nothing_else(model: Path) -> None:
    with open_llm(model, task="embed", embed={"dimensions": 4}) as llm:
        one, same, other = llm.embed(["abcd", {"prompt": "abcd"}, "x"], order="input")
        assert one["embedding"] == same["embedding"] != other["embedding"]
        assert np.linalg.norm(other["embedding"]) == pytest.approx(1)
        assert len(other["embedding"]) == 4
        for method in (llm.generate, llm.score, llm.stream):
            with pytest.raises(ConfigError, match="makes embeddings alone"):
                method("a")
    with pytest.raises(ConfigError, match=r"`embed.dimensions` is 99, and .* gives vectors of 32 numbers"):
        open_llm(model, task="embed", embed={"dimensions": 99})


def test_an_llm_for_classes_makes_nothing_else(tmp_path: Path) -> None:
    model = write_byte_model(tmp_path / "classifier", id2label={0: "reward"})
    with open_llm(model, task="classify") as llm:
        one, same, other = llm.classify(["abcd", {"prompt": "abcd"}, "x"], order="input")
        assert one["label"] == "reward"
        assert one["score"] == one["classes"][0]["logit"] == same["score"] != other["score"]
        with pytest.raises(AttributeError, match=r'answer\["classes"\]'):
            _ = one.outputs
        with pytest.raises(ConfigError, match="makes classes alone"):
            llm.generate("a")
    with pytest.raises(ConfigError, match="use `nvcli classify`"):
        open_llm(model)
