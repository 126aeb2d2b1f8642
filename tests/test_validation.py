"""Suggestions for unknown names are near in meaning, or absent."""

from __future__ import annotations

import pytest

from nvcli.core.config import SECTIONS, RunConfig, all_keys
from nvcli.core.other_names import own_keys, remarks
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.structured import Structured
from nvcli.core.validation import suggest
from nvcli.errors import RowError
from nvcli.job.job import RowContext, RowForm
from nvcli.job.rows.native_row import RowDefaults
from nvcli.job.rows.openai_row import openai_job
from nvcli.job.rows.prompt_rules import PromptRules


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("temprature", "temperature"),
        ("temp", "temperature"),
        ("topp", "top_p"),
        ("maxtokens", "max_tokens"),
        ("max_new_tokens", "max_tokens"),
        ("num_return_sequences", "n"),
        ("stop_sequences", "stop"),
        ("repeat_penalty", "repetition_penalty"),
        ("best_out_of", None),
        ("reasoning_effort", None),
        ("top_n", None),
        ("top_logprobs", "logprobs"),
        ("guided_json", "structured.json_schema"),
        ("pre", None),
    ],
)
def test_names_of_sampling(name: str, meant: str | None) -> None:
    text = suggest(name, SamplingParams.__struct_fields__)
    assert text == (f"did you mean `{meant}`?" if meant else f"known: {', '.join(SamplingParams.__struct_fields__)}")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("tp_size", "tensor_parallel_size"),
        ("max_length", "sampling.max_tokens` or `max_model_len"),
        ("max_new_tokens", "sampling.max_tokens"),
        ("rope_scaling", "hf_overrides"),
        ("gpu_mem_utilization", "gpu_memory_utilization"),
        ("worker_cls", None),
        ("load_in_8bit", "quantization"),
    ],
)
def test_names_of_the_configuration(name: str, meant: str | None) -> None:
    assert suggest(name, RunConfig.__struct_fields__).startswith(f"did you mean `{meant}`?" if meant else "known: ")


@pytest.mark.parametrize("names", [SamplingParams.__struct_fields__, RunConfig.__struct_fields__])
def test_what_there_is_not_says_so(names: tuple[str, ...]) -> None:
    assert suggest("num_beams", names).startswith("nvcli samples and has no beam search")
    assert suggest("trust_remote_code", names).startswith("leave it out: nvcli never runs code")


def test_names_of_other_tools_lead_to_keys_that_there_are() -> None:
    known = [*all_keys(), *SECTIONS, *(f"sampling.structured.{form}" for form in Structured.__struct_fields__)]
    assert [(name, key) for name, keys in own_keys().items() for key in keys if key not in known] == []
    own = {key.rpartition(".")[2] for key in all_keys()}
    assert own & (own_keys().keys() | remarks().keys()) == set(), "a name of ours is no other's"


def test_a_batch_row_is_offered_what_works() -> None:
    context = RowContext(id="a", index=0, line="line 1", form=RowForm.CHAT)
    row = {"url": "/v1/chat/completions", "body": {"messages": [], "modality": "low"}}
    with pytest.raises(RowError) as error:
        openai_job(row, context, RowDefaults({}), PromptRules())
    offered = str(error.value).partition("known: ")[2].split(", ")
    assert "max_completion_tokens" in offered
    assert "response_format" in offered
    assert not {"functions", "best_of", "user", "stream"} & set(offered)
