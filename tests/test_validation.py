"""Suggestions for unknown names are near in meaning, or absent."""

from __future__ import annotations

import pytest

from nvcli.config import RunConfig
from nvcli.errors import RowError
from nvcli.jobs.job import Place, RowForm
from nvcli.jobs.rows.native_row import RowDefaults
from nvcli.jobs.rows.openai_row import openai_job
from nvcli.jobs.rows.prompt_rules import PromptRules
from nvcli.sampling_params import SamplingParams
from nvcli.validation import suggest


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
        ("length_penalty", None),
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
        ("max_length", "max_model_len"),
        ("gpu_mem_utilization", "gpu_memory_utilization"),
        ("worker_cls", None),
        ("load_in_8bit", None),
    ],
)
def test_names_of_the_configuration(name: str, meant: str | None) -> None:
    assert suggest(name, RunConfig.__struct_fields__).startswith(f"did you mean `{meant}`?" if meant else "known: ")


def test_a_batch_row_is_offered_what_works() -> None:
    place = Place(id="a", index=0, line="line 1", form=RowForm.CHAT)
    row = {"url": "/v1/chat/completions", "body": {"messages": [], "modality": "low"}}
    with pytest.raises(RowError) as error:
        openai_job(row, place, RowDefaults({}), PromptRules())
    offered = str(error.value).partition("known: ")[2].split(", ")
    assert "max_completion_tokens" in offered
    assert "response_format" in offered
    assert not {"functions", "best_of", "user", "stream"} & set(offered)
