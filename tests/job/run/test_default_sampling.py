"""A value of `sampling` in the configuration that no row could have ends the command, and nothing is started for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nvcli.core.config import load_sourced_config
from nvcli.errors import ConfigError
from nvcli.job.run.resolve import resolve_settings

pytestmark = pytest.mark.usefixtures("warm_engines")  # what makes grammars is a copy too

REFUSED = {
    "stop_token_ids=[5, 640]": "`sampling.stop_token_ids` holds 640; the model's tokens are 0 to 639",
    "allowed_token_ids=[9999]": "`sampling.allowed_token_ids` holds 9999",
    "logit_bias={9999: 1}": "`sampling.logit_bias` holds 9999",
    "logit_bias={zebra: 1}": '`sampling.logit_bias` holds "zebra", which is 4 tokens',
    f"bad_words=[{'a b ' * 40}]": "`sampling.bad_words` holds ",
    "bad_words=[[5, 640]]": "`sampling.bad_words` holds 640",
    "structured={regex: '('}": '`sampling.structured` cannot be used: at 1(8): invalid regex "("',
    "structured={json_schema: {type: foo}}": "`sampling.structured` cannot be used: Invalid type: foo",
    "structured={grammar: 'start: nothing'}": "`sampling.structured` cannot be used: ",
    "thinking_budget=5": "`sampling.thinking_budget` is given, and how this model marks its thoughts is not known",
    "max_tokens=2048": "`sampling.max_tokens` is 2048, and a prompt of 1 token leaves room for 2047",
    "min_tokens=2048": "`sampling.min_tokens` is 2048, and there is room for 2047 tokens",
}


@pytest.mark.parametrize("setting", REFUSED)
def test_what_no_row_could_have_is_refused(setting: str) -> None:
    run, source = load_sourced_config(None, ["model=demo", "device=cpu", f"sampling.{setting}"])
    with pytest.raises(ConfigError) as raised:
        resolve_settings(run, setter_of=source.setter)
    assert str(raised.value).startswith(f"--set: {REFUSED[setting]}")


def test_a_grammar_that_overflows_the_stack_is_refused() -> None:
    rules = "".join(f"r{number}: r{number + 1}\n" for number in range(15_000))
    sampling = {"structured": {"grammar": f'start: r0\n{rules}r15000: "a"'}}
    run, _ = load_sourced_config(None, settings={"model": "demo", "device": "cpu", "sampling": sampling})
    with pytest.raises(ConfigError, match="for it was killed by SIGSEGV, as happens where something is nested"):
        resolve_settings(run)


def test_a_line_of_a_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "conf.yaml"
    file.write_text("model: demo\nsampling:\n  temperature: 0\n  stop_token_ids: [640]\n")
    run, source = load_sourced_config(file)
    with pytest.raises(ConfigError, match=rf"^{file}:4: `sampling.stop_token_ids` holds 640"):
        resolve_settings(run, setter_of=source.setter)


@pytest.mark.parametrize(
    ("sampling", "is_loaded"),
    [
        ({}, False),
        ({"stop_token_ids": [5], "logit_bias": {"7": 1.0}, "structured": {"choice": ["a"]}}, False),
        ({"max_tokens": 2047, "logprobs": 20, "n": 3, "bad_words": [[5, 6]]}, False),
        ({"bad_words": ["a"]}, True),
        ({"logit_bias": {"a": 1.0}}, True),
    ],
)
def test_the_tokenizer_is_loaded_only_for_texts(sampling: dict[str, Any], is_loaded: bool) -> None:
    run, _ = load_sourced_config(None, settings={"model": "demo", "device": "cpu", "sampling": sampling})
    resolved = resolve_settings(run)
    assert (resolved.tokenizer is not None) == is_loaded
    if is_loaded:
        assert resolved.load_tokenizer() is resolved.tokenizer


def test_rows_that_are_scored_have_no_sampling() -> None:
    run, _ = load_sourced_config(None, settings={"model": "demo", "task": "score", "sampling": {"max_tokens": 9999}})
    resolve_settings(run)
