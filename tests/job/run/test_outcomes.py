"""How rows came out is counted with few and short examples."""

from __future__ import annotations

from nvcli.core.sampling_params import SamplingParams
from nvcli.job.job import Choice, ErrorInfo, JobResult, RowContext, Usage
from nvcli.job.run.counts import MAX_EXAMPLE_CHARS, MAX_EXAMPLES, Outcomes, bin_of

DEFAULT = SamplingParams(temperature=0.5)


def answered(index: int, *reasons: str, text: str = "yes") -> JobResult:
    choices = [Choice(index=number, text=text, finish_reason=reason) for number, reason in enumerate(reasons)]
    context = RowContext(id=f"r{index}", index=index, line=f"line {index + 1}")
    return JobResult(context=context, choices=choices, usage=Usage(prompt_tokens=10 + index))


def failed(index: int, kind: str) -> JobResult:
    context = RowContext(id=f"r{index}", index=index, line=f"line {index + 1}")
    return JobResult(context=context, error=ErrorInfo(type=kind, message=f"line {index + 1}: bad"))


def test_answers_and_errors_are_counted_by_kind() -> None:
    outcomes = Outcomes(DEFAULT)
    for index in range(5):
        outcomes.add(answered(index, "stop", "length"), DEFAULT)
    outcomes.add(failed(5, "invalid_json"), None)
    assert outcomes.finish_reasons == {"stop": 5, "length": 5}
    assert [example.id for example in outcomes.answer_examples["length"]] == ["r0", "r1", "r2"][:MAX_EXAMPLES]
    (example,) = outcomes.error_examples["invalid_json"]
    assert (example.id, example.index, example.text) == ("r5", 5, "line 6: bad")
    assert outcomes.prompt_lengths == {bin_of(10 + index): 1 for index in range(5)}
    assert outcomes.prompt_tokens == 60


def test_examples_are_rows_and_short() -> None:
    outcomes = Outcomes()
    outcomes.add(answered(0, *["stop"] * 9, text="x" * 10**6), None)
    outcomes.add(answered(1, "stop"), None)
    assert [(example.index, len(example.text)) for example in outcomes.answer_examples["stop"]] == [
        (0, MAX_EXAMPLE_CHARS),
        (1, 3),
    ]


def test_sampling_that_rows_bring_is_counted_by_parameter() -> None:
    outcomes = Outcomes(DEFAULT)
    for own in (DEFAULT, SamplingParams(temperature=0.5), SamplingParams(temperature=1, n=2), SamplingParams(n=1)):
        outcomes.add(answered(0, "stop"), own)
    assert outcomes.own_sampling == {"temperature": 2, "n": 1}
