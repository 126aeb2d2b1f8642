"""The adapter of a call's rows: its own key, then the call's `lora`, for all rows or for each."""

from __future__ import annotations

from typing import Any

import pytest

from held_engine import MakeLLM
from nvcli.core.lora_config import LoraConfig
from nvcli.errors import ConfigError


def test_rows_have_the_adapter_of_the_call_unless_they_say_otherwise(
    make_llm: MakeLLM, named_adapters: LoraConfig
) -> None:
    """OpenAI rows choose by their model alone."""
    rows: list[Any] = ["a", {"prompt": "b", "lora": "two"}, {"prompt": "c", "lora": None}, [5, 6]]
    rows.append({"custom_id": "d", "url": "/v1/completions", "body": {"prompt": "d", "model": "two"}})
    rows.append({"custom_id": "e", "url": "/v1/completions", "body": {"prompt": "e", "model": "gpt"}})
    with make_llm(lora=named_adapters) as llm:
        assert llm.adapters == ("one", "two")
        received = make_llm.engines[0].received

        def adapters_of(answers: Any) -> list[int]:
            assert [answer.error for answer in answers if answer.error] == []
            adapters = [request.adapter for request in sorted(received, key=lambda request: request.row)]
            received.clear()  # a thread sends the next call's requests as soon as it is made
            return adapters

        assert adapters_of(llm.generate(rows)) == [0, 2, 0, 0, 2, 0]
        assert adapters_of(llm.generate(rows, lora="one")) == [1, 2, 0, 1, 2, 0]
        assert adapters_of(llm.generate(rows[:4], {"n": 1}, lora=["two", "one", "one", None])) == [2, 2, 0, 0]
        assert adapters_of(llm.generate(iter(["f", "g"]), [{"top_k": 1}, {}], lora=["one", "two"])) == [1, 2]
        assert adapters_of(llm.chat([[{"role": "user", "content": "h"}]] * 2, lora=["one", "two"])) == [1, 2]
        assert adapters_of(llm.stream(text, lora="two").answer for text in "i") == [2]


def test_a_name_that_no_adapter_has(make_llm: MakeLLM, named_adapters: LoraConfig) -> None:
    """It is the error of its row, or of a call all of whose rows it is for."""
    with make_llm(lora=named_adapters) as llm:
        first, second = llm.generate(["a", "b"], lora=["sql", "two"])
        assert second.error is None
        assert str(first.error) == 'rows[0]: `lora` is "sql", which is no adapter; allowed: one, two'
        (own,) = llm.generate([{"prompt": "a", "lora": 5}], lora="one")
        assert str(own.error) == "rows[0]: `lora` is 5, which is no adapter; allowed: one, two"
        for lora, message in (
            ("sql", '`lora` is "sql", which is no adapter; allowed: one, two'),
            (5, "`lora` is 5; give the name of an adapter, or a list with a name or None per row"),
            ([["one"]], "give the name of an adapter, or a list with a name or None per row"),
            (["one"], "lora has 1 item for 2 rows; give one for all rows, or one per row"),
        ):
            with pytest.raises(ConfigError, match=message):
                llm.generate(["a", "b"], lora=lora)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="sampling_params has 1 and lora has 2 items"):
            llm.generate(["a", "b"], [{}], lora=["one", None])
    with pytest.raises(ConfigError, match="this LLM has no adapters with names; give them when it is made: LLM"):
        make_llm().generate("a", lora="one")
