"""Tokens that a checkpoint forbids in its generation_config.json, from the file to answers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from nvcli import LLM
from nvcli.demo import demo_path

pytestmark = pytest.mark.usefixtures("warm_engines")


def test_answers_avoid_what_transformers_avoids(tmp_path: Path) -> None:
    """Unless rows say otherwise."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = shutil.copytree(demo_path(), tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    two, ninety_five, ten = (tokenizer.encode(text) for text in ("2", "95", "10"))
    forbidden = {"suppress_tokens": [*two, 5000], "bad_words_ids": [ninety_five, ten, [0]]}
    values = {"do_sample": False, "eos_token_id": [2, 0], **forbidden}
    (folder / "generation_config.json").write_text(json.dumps(values))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    prompts, expected = ["What is 37 + 58?\n", "Count from 9 to 14.\n"], []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        answer = model.generate(ids, max_new_tokens=16)[0, ids.shape[1] :]
        expected.append(tokenizer.decode(answer, skip_special_tokens=True))
    with LLM(folder, device="cpu", dtype="float32", sampling={"max_tokens": 16}) as llm:
        assert [answer.text for answer in llm.generate(prompts, order="input")] == expected
        assert [answer.text for answer in llm.generate(prompts[:1], {"bad_words": []})] == ["95"] != expected[:1]
