"""Names that programs written for other engines try: they mean the same here, or the error says what to use."""

from __future__ import annotations

import copy
import dataclasses
import logging
import pickle
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from held_engine import MakeLLM
from nvcli import SamplingParams
from nvcli.core.config import RunConfig
from nvcli.core.lora_config import LoraConfig
from nvcli.core.other_names import remarks
from nvcli.errors import ConfigError, RowError
from nvcli.llm.keywords import HARMLESS, NO_EFFECT, read_config, understood_settings
from nvcli.llm.llm import LLM

CONVERSATION = [{"role": "user", "content": "hi"}]
SAID = ">a<ih>u<"  # the conversation as the template renders it, reversed


class OtherParams(msgspec.Struct):
    """Sampling parameters as vLLM has them: a struct with defaults of its own."""

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = 16
    detokenize: bool = True
    logits_processors: Any = None
    output_kind: int = 2
    structured_outputs: Any = None
    _all_stop_token_ids: set[int] = set()


@pytest.fixture
def llm(make_llm: MakeLLM) -> LLM:
    return make_llm(sampling={"max_tokens": 30, "top_k": 3})


def test_the_first_program_of_a_vllm_user(llm: LLM) -> None:
    prompts = ["Hello, my name is", "The capital of France is"]
    params = SamplingParams(temperature=0.8, top_p=0.95)
    for prompts_given in ({"rows": prompts}, {"prompts": prompts}):
        outputs = llm.generate(**prompts_given, sampling_params=params, use_tqdm=False, lora_request=None)
        for output, prompt in zip(outputs, prompts, strict=True):
            assert output.prompt == prompt
            (one,) = output.outputs
            assert one.text == output.text == prompt[::-1]
            assert (one.index, one.finish_reason, one.logprobs) == (0, "stop", None)
            with pytest.raises(AttributeError, match="return_token_ids"):
                _ = one.token_ids


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"temperature": 0.5, "n": 2}, (0.5, 2, 20, 3, None)),
        (SamplingParams(temperature=0.5, n=2, seed=None, stop=None), (0.5, 2, 20, 3, None)),
        (types.SimpleNamespace(temperature=0.5, n=2, stop=None), (0.5, 2, 20, 3, None)),
        (dataclasses.make_dataclass("Params", [("temperature", float)])(0.5), (0.5, 1, 20, 3, None)),
        # All values of an object count, its defaults too.
        (OtherParams(temperature=0.5, seed=4), (0.5, 1, 16, 3, 4)),
        (None, (1.0, 1, 20, 3, None)),
    ],
)
def test_sampling_has_many_forms(make_llm: MakeLLM, llm: LLM, given: Any, wanted: tuple[Any, ...]) -> None:
    (one,) = llm.generate(["x"], given)
    (two,) = llm.generate(["x"], sampling=given)
    assert one.error is two.error is None
    stream = llm.stream("x", given)
    assert "".join(stream) == "x"
    for request in make_llm.engines[0].received:
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_k) == (wanted[0], wanted[3])
        assert request.seed == (wanted[4] if wanted[4] is not None else 0)
    assert len(one.outputs) == wanted[1]


def test_each_row_may_have_its_own_sampling(llm: LLM) -> None:
    rows: list[Any] = ["abcdef", {"prompt": "abcdef", "sampling": {"max_tokens": 1}}, CONVERSATION]
    params = [SamplingParams(max_tokens=2), {"max_tokens": 3}, OtherParams(max_tokens=4)]
    assert [answer.text for answer in llm.generate(rows, params)] == ["fe", "f", ">a<i"]
    assert [answer.text for answer in llm.generate(iter(rows), params)] == ["fe", "f", ">a<i"]
    assert [answer.text for answer in llm.chat([CONVERSATION] * 2, params[:2])] == [">a", ">a<"]
    with pytest.raises(
        ConfigError, match="sampling_params has 2 items for 3 rows; give one for all rows, or one per row"
    ):
        llm.generate(rows, params[:2])
    for count, message in [(2, "has 2 items for more rows"), (4, "has 4 items for 3 rows")]:
        answers = llm.generate(iter(rows), [{}] * count)
        for _ in range(min(count, 3)):
            next(answers)
        with pytest.raises(ConfigError, match=message):
            next(answers)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: SamplingParams(max_new_tokens=5),
            "unknown key `SamplingParams.max_new_tokens`; did you mean `max_tok",
        ),
        (lambda: SamplingParams(temprature=0), "unknown key `SamplingParams.temprature`; did you mean `temperature`"),
        (lambda: SamplingParams(top_p=7), "`SamplingParams.top_p` is 7; allowed: a number above 0 and at most 1"),
        (
            lambda: SamplingParams(logits_processors=[print]),
            "logits_processors`; nvcli runs no code",
        ),
        (lambda: SamplingParams(guided_decoding={"json": "{"}), "`SamplingParams.guided_decoding.json` is .* not JSON"),
        (lambda: setattr(SamplingParams(), "top_q", 1), "unknown key `SamplingParams.top_q`"),
    ],
)
def test_wrong_sampling_is_said_when_it_is_made(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_sampling_params_hold_what_was_given() -> None:
    params = SamplingParams(n=2, structured_outputs=types.SimpleNamespace(regex="a+"), detokenize=True)
    params.max_tokens = 5
    assert params == {"n": 2, "structured": {"regex": "a+"}, "max_tokens": 5}
    assert (params.n, params.top_p) == (2, 1.0)
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params
    assert repr(SamplingParams(n=2)) == "SamplingParams(n=2)"


def test_chat_answers_one_conversation_or_several(llm: LLM) -> None:
    for one in (CONVERSATION, "hi", {"messages": CONVERSATION, "id": "a"}):
        answer = llm.chat(one)
        assert (answer.text, answer.prompt) == (SAID, "hi" if one == "hi" else None)
    for several in ([CONVERSATION, "hi"], ({"messages": CONVERSATION} for _ in range(2)), iter(["hi", "hi"])):
        assert [answer.text for answer in llm.chat(several)] == [SAID] * 2
    assert list(llm.chat([])) == []
    with pytest.raises(ConfigError, match=r"a single conversation or row has a single Answer: use it without \[0\]"):
        _ = llm.chat(CONVERSATION)[0]
    kinds = [answer.error and answer.error.type for answer in llm.chat([5, {"prompt": "x"}, [1], "hi"])]
    assert kinds == ["not_an_object", "missing_prompt", "missing_prompt", None]


def test_what_is_said_to_chats_goes_beside_their_messages(llm: LLM) -> None:
    going_on = llm.chat(CONVERSATION, continue_final_message=True, add_generation_prompt=False, tools=None)
    assert going_on.text == "ih>u<"
    rows = [CONVERSATION, {"messages": CONVERSATION, "add_generation_prompt": True}]
    own = [answer.text for answer in llm.chat(rows, add_generation_prompt=False)]
    assert own == ["ih>u<", SAID]
    (bad,) = llm.chat([CONVERSATION], tools="x")
    assert bad.error is not None
    assert "`tools`" in bad.error.message


def test_answers_say_how_they_are_read(llm: LLM) -> None:
    answers = llm.generate(["ab", "cd"], {"return_token_ids": True, "n": 2})
    with pytest.raises(ConfigError, match=r"answers come one at a time; list\(answers\)\[1\]"):
        _ = answers[1]
    first, second = answers
    assert (first.index, second.index) == (0, 1)
    assert [output.text for output in second.outputs] == ["dc", "dc"]
    assert len(second.outputs[1].token_ids) == second["usage"]["completion_tokens"] // 2
    for name, message in [
        ("usage", r"use answer\[\"usage\"\]"),
        ("request_id", "use answer.*index"),
        ("embedding", r"use llm\.embed"),
        ("nothing", "no"),
    ]:
        with pytest.raises(AttributeError, match=message):
            getattr(first, name)
    with pytest.raises(KeyError):
        _ = first["nothing"]
    assert pickle.loads(pickle.dumps(first)).prompt == "ab"
    (bad,) = llm.generate([{"prompt": 5}])
    with pytest.raises(RowError):
        _ = bad.outputs


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"use_tqdm": True}, r"takes no `use_tqdm`; .*tqdm\(llm.generate\(rows\), total=len\(rows\)\)"),
        ({"lora_request": object()}, "takes no `lora_request`; LoRA adapters are given with the model"),
        ({"guided_json": {}}, 'put it into the sampling: sampling_params={"structured": {"json_schema": {}}}'),
        ({"temperature": 0}, 'takes no `temperature`; put it into the sampling: sampling_params={"temperature": 0}'),
        (
            {"max_new_tokens": 3},
            'takes no `max_new_tokens`; put it into the sampling: sampling_params={"max_tokens": 3}',
        ),
        ({"messages": []}, r"use llm.chat\(messages\)"),
        ({"ordr": "input"}, "takes no `ordr`; did you mean `order`"),
        ({"prompts": ["x"]}, "`prompts` is another name for `rows`, and both are given"),
        ({"sampling": {}, "sampling_params": {}}, "mean the same, and both are given"),
        ({"sampling_params": 5}, 'sampling_params is 5; give a dict such as {"temperature": 0}'),
        ({"sampling_params": [{}, {"top_q": 1}]}, r"unknown key `sampling_params\[1\].top_q`"),
    ],
)
def test_keywords_of_calls(llm: LLM, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        llm.generate(["x", "y"], **keywords)


def test_tables_are_rows_only_if_they_give_out_rows(llm: LLM) -> None:
    pandas = pytest.importorskip("pandas")
    table = pandas.DataFrame({"prompt": ["ab", "cd"]})
    with pytest.raises(
        ConfigError, match=r'table of pandas, which iterates over columns; give rows.to_dict\("records"\)'
    ):
        llm.generate(table)
    assert [answer.text for answer in llm.generate(table.to_dict("records"))] == ["ba", "dc"]
    assert [answer.text for answer in llm.generate(table["prompt"])] == ["ba", "dc"]


def test_methods_of_others_say_what_to_use(llm: LLM) -> None:
    with pytest.raises(AttributeError, match=r"an LLM has no `get_tokenizer`; use transformers\.AutoTokenizer"):
        _ = llm.get_tokenizer  # type: ignore[attr-defined]
    assert not hasattr(llm, "nothing")


def test_settings_of_others(caplog: pytest.LogCaptureFixture) -> None:
    given = {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.8,
        "max_model_len": 512,
        "enforce_eager": True,
        "dtype": "half",
        "kv_cache_dtype": "fp8_e4m3",
        "seed": 1,
        "quantization": "awq",
        "generation_config": "vllm",
        "tokenizer": "m",
        "trust_remote_code": True,
        "swap_space": 4,
        "enable_lora": False,
        "tokenizer_mode": "auto",
        "chat_template": None,
        "model_loader_extra_config": {},
        "speculative_config": {"method": "ngram"},
    }
    with caplog.at_level(logging.WARNING, "nvcli"):
        understood = understood_settings("m", given)
    assert understood == {
        "tensor_parallel_size": 2,
        "gpu_memory_utilization": 0.8,
        "max_model_len": 512,
        "enforce_eager": True,
        "dtype": "float16",
        "seed": 1,
        "quantization": "auto",
        "kv_cache_dtype": "fp8",
        "generation_config": "none",
    }
    assert [record.getMessage() for record in caplog.records] == [
        f"LLM: `{name}` has no effect here and is ignored; {remarks()[name]}"
        for name in ("trust_remote_code", "swap_space", "speculative_config")
    ]
    assert understood_settings("m", {"quantization": None, "max_model_len": None}) == {"max_model_len": None}
    assert read_config(Path("m"), None, {}, {"lora": Path("adapter")}).lora == "adapter"
    assert read_config("m", None, {}, {"lora": {"adapters": {"a": Path("b")}}}).lora == LoraConfig(adapters={"a": "b"})
    assert {*HARMLESS, *NO_EFFECT}.isdisjoint(RunConfig.__struct_fields__)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": "other"}, "unknown key `tokenizer`; the tokenizer is read from the model's folder"),
        ({"enable_lora": True}, "unknown key `enable_lora`; leave it out: naming an adapter"),
        ({"max_new_tokens": 5}, "did you mean `sampling.max_tokens`"),
        ({"max_tokens": 5}, 'LLM takes no `max_tokens`; it belongs in sampling={"max_tokens": 5}'),
        ({"system": "x"}, 'LLM takes no `system`; it belongs in job={"system": "x"}'),
        ({"order": "input"}, r'give it in each call: llm.generate\(rows, order="completion"\)'),
        ({"quantization": "bitsandbytes"}, '`quantization` is "bitsandbytes"; allowed: auto'),
        ({"config": {"model": "demo"}}, 'config={"model": "demo"}: allowed: the path of a YAML file'),
        ({"dtype": np.float32}, "`dtype` is \"<class 'numpy.float32'>\"; allowed: auto"),
        ({"max_seq_length": 5}, "unknown key `max_seq_length`; did you mean `max_model_len`"),
    ],
)
def test_wrong_settings_say_what_to_use(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM("demo", **settings)
