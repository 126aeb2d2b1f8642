"""What of a row decides its answer, and what it takes in memory."""

from __future__ import annotations

import gc
from contextlib import closing
from typing import Any

import msgspec
import pytest

from nvcli.core.config_types import MAX_INT64, OnTooLong
from nvcli.core.messages import pack
from nvcli.core.sampling_params import SamplingParams
from nvcli.core.structured import Structured
from nvcli.demo import demo_path
from nvcli.errors import RowError
from nvcli.job.job import Job, JobResult, RowContext, RowForm
from nvcli.job.rows.parser import RowParser
from nvcli.job.rows.raw_values import MAX_LEVELS
from nvcli.job.text.grammar_maker import GrammarMaker
from nvcli.job.text.model_limits import ModelLimits, cut, encode_long
from nvcli.job.text.prepare import PreparedRow, Preparer
from nvcli.job.text.tokenizer import Tokenizer

LIMITS = ModelLimits(max_model_len=64, vocab_size=258, eos_token_ids=(1,))


def job(prompt: str = "abc", *, index: int = 0, extra: dict[str, Any] | None = None, **sampling: Any) -> Job:
    context = RowContext(
        id=index,
        index=index,
        line="line",
        extra={key: msgspec.Raw(msgspec.json.encode(value)) for key, value in (extra or {}).items()},
    )
    return Job(context=context, prompt=prompt, sampling=SamplingParams(**sampling))


def preparer_of(tokenizer: Tokenizer, limits: ModelLimits) -> Preparer:
    """These rows have no conversations."""
    return Preparer(tokenizer, limits, lambda conversations: [])


def prepare(tokenizer: Tokenizer, *jobs: Job) -> list[PreparedRow]:
    rows = preparer_of(tokenizer, LIMITS).prepare(jobs)
    assert all(isinstance(row, PreparedRow) for row in rows)
    return rows  # type: ignore[return-value]


def test_rows_have_the_same_key_if_and_only_if_their_answers_are_equal(tokenizer: Tokenizer) -> None:
    def same(one: Job, other: Job) -> bool:
        first, second = prepare(tokenizer, one, other)
        return first.answer_key is not None and first.answer_key == second.answer_key

    assert same(job(temperature=0), job(index=7, temperature=0, extra={"a": 1}))
    assert same(job(temperature=0, seed=3), job(index=7, temperature=0))  # greedy needs no seed
    assert same(job(seed=3, n=2), job(index=7, seed=3, n=2))
    assert not same(job(), job(index=7))  # what is drawn depends on the index
    assert not same(job(seed=3), job(seed=4))
    assert not same(job(temperature=0), job("abd", temperature=0))
    for change in (
        {"max_tokens": 5},
        {"ignore_eos": True},
        {"stop": "x"},
        {"n": 2},
        {"logprobs": 1},
        {"min_tokens": 2},
    ):
        assert not same(job(temperature=0), job(temperature=0, **change)), change


def test_the_same_ids_and_sampling_are_the_same_row_however_they_are_written(tokenizer: Tokenizer) -> None:
    text = job("abc", temperature=0)
    (row,) = prepare(tokenizer, text)
    ids = list(memoryview(row.prompt_ids).cast("i"))
    (other,) = prepare(tokenizer, Job(context=text.context, prompt_token_ids=ids, sampling=text.sampling))
    assert row.answer_key == other.answer_key is not None


def test_an_end_of_sequence_id_outside_the_vocabulary_does_not_reach_the_engine(tokenizer: Tokenizer) -> None:
    """A rank that forbids it, for `min_tokens`, would look for its logit: the run would end there."""
    limits = ModelLimits(max_model_len=64, vocab_size=258, eos_token_ids=(1, 300))
    (row,) = preparer_of(tokenizer, limits).prepare([job(min_tokens=2, stop_token_ids=[5])])
    assert isinstance(row, PreparedRow)
    assert row.stop_ids == [1, 5]


def test_the_usual_length_of_answers_makes_no_prompt_too_long(tokenizer: Tokenizer) -> None:
    """Rows that name no length get that of generation_config.json, and fail only for one of their own."""
    limits = msgspec.structs.replace(LIMITS, usual_max_tokens=40)
    jobs = [job(text, max_tokens=number) for text, number in (("a", 40), ("a" * 50, 40), ("a" * 50, 41), ("a", None))]
    rows = preparer_of(tokenizer, limits).prepare(jobs)
    room = LIMITS.max_model_len - 2  # behind the token that begins every text
    assert [row.max_tokens if isinstance(row, PreparedRow) else None for row in rows] == [40, room - 49, None, room]


def test_the_tokenizers_own_end_of_sequence_ends_answers_too(tokenizer: Tokenizer) -> None:
    """The config.json of a model that was trained further on conversations may be that of its base: answers ran on."""
    assert tokenizer.eos_token_id == 1
    (row,) = preparer_of(tokenizer, msgspec.structs.replace(LIMITS, eos_token_ids=(7,))).prepare([job()])
    assert isinstance(row, PreparedRow)
    assert row.stop_ids == [1, 7]


def test_what_is_passed_through_counts_as_memory(tokenizer: Tokenizer) -> None:
    small, large = prepare(tokenizer, job(), job(extra={"document": ["x" * 100_000, {"y": "ü" * 50_000}]}))
    assert 150_000 < large.num_bytes - small.num_bytes < 300_000


def test_the_deepest_row_and_the_largest_numbers_can_be_prepared(tokenizer: Tokenizer) -> None:
    depth = MAX_LEVELS - 1  # in the row itself
    sampling = b'{"temperature": 0, "top_k": %d}' % MAX_INT64
    line = b'{"prompt": "a", "sampling": %b, "x": %b1%b}' % (sampling, b'{"a":' * depth, b"}" * depth)
    parsed = RowParser({}).parse(line, index=0, where="line 1")
    assert isinstance(parsed, Job)
    (row,) = prepare(tokenizer, parsed)
    assert row.answer_key is not None


def test_errors_name_keys_as_the_row_has_them(tokenizer: Tokenizer) -> None:
    def message(form: RowForm, prompt_token_ids: list[int] | None = None, **sampling: Any) -> str:
        context = RowContext(id="a", index=0, line="line", form=form)
        prompt = "abc" if prompt_token_ids is None else None
        params = SamplingParams(**sampling)
        row = Job(context=context, prompt=prompt, prompt_token_ids=prompt_token_ids, sampling=params)
        (result,) = preparer_of(tokenizer, LIMITS).prepare([row])
        assert isinstance(result, JobResult)
        assert result.error is not None
        return result.error.message

    for form, under, ids in ((RowForm.NATIVE, "sampling", "prompt_token_ids"), (RowForm.CHAT, "body", "body.prompt")):
        assert f"`{under}.max_tokens` is 64" in message(form, max_tokens=64)
        assert f"`{under}.min_tokens` is 64" in message(form, min_tokens=64)
        assert f"`{under}.stop_token_ids` holds 300" in message(form, stop_token_ids=[300])
        assert f"`{under}.logit_bias` holds 300" in message(form, logit_bias={300: 1.0})
        assert f"`{ids}` holds 300" in message(form, [300])


def test_errors_do_not_keep_their_rows_alive(tokenizer: Tokenizer) -> None:
    """A line may have 50 MB, and the garbage collector comes late."""

    def errors_alive() -> int:
        return sum(type(thing) is RowError for thing in gc.get_objects())  # isinstance may wake lazy objects

    gc.collect()
    before = errors_alive()
    gc.disable()
    try:
        results = preparer_of(tokenizer, LIMITS).prepare([job("x" * 10_000), job("x" * 100), job("\ud800")])
        assert [isinstance(row, JobResult) for row in results] == [True] * 3
        assert errors_alive() == before
    finally:
        gc.enable()


class Watched:
    """A tokenizer that remembers what it was given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.encoded: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, texts: list[str], **options: Any) -> Any:
        self.encoded.extend(texts)
        return self._tokenizer.encode(texts, **options)


def prepare_watched(watched: Any, limits: ModelLimits, *jobs: Job) -> list[PreparedRow | JobResult]:
    return preparer_of(watched, limits).prepare(jobs)


def test_of_a_text_that_cannot_fit_little_is_tokenized(tokenizer: Tokenizer) -> None:
    watched = Watched(tokenizer)
    rows = prepare_watched(watched, LIMITS, job("ab"), job("x" * 100_000))
    assert [type(row) for row in rows] == [PreparedRow, JobResult]
    assert isinstance(rows[1], JobResult)
    assert rows[1].error is not None
    assert rows[1].error.type == "prompt_too_long"
    assert watched.encoded == ["x" * 16 * 64, "ab"]


@pytest.mark.parametrize("on_too_long", ["error", "truncate-left", "truncate-right"])
def test_of_a_long_text_only_what_matters_is_tokenized(tokenizer: Tokenizer, on_too_long: OnTooLong) -> None:
    limits = ModelLimits(max_model_len=64, vocab_size=258, eos_token_ids=(1,), on_too_long=on_too_long)
    text = "".join(chr(ord("a") + number * number % 26) for number in range(100_000))
    watched = Watched(tokenizer)
    (row,) = prepare_watched(watched, limits, job(text, max_tokens=10))
    assert sum(map(len, watched.encoded)) < 10_000
    if on_too_long == "error":
        assert isinstance(row, JobResult)
        assert row.error is not None
        assert row.error.type == "prompt_too_long"
        assert "has 100,000 characters" in row.error.message
    else:
        assert isinstance(row, PreparedRow)
        (ids,) = tokenizer.encode([text], add_special_tokens=True)
        assert isinstance(ids, list)
        assert row.prompt_ids == pack([ids[0], *ids[-53:]] if on_too_long == "truncate-left" else ids[:54])


def test_the_special_tokens_around_a_text_are_not_cut_off() -> None:
    """An embedding is mostly that of the last one: vectors of long texts were those of a word."""
    ids, around = [0, 5, 6, 7, 8, 1], (1, 1)
    assert cut(ids, 4, "truncate-right", around) == [0, 5, 6, 1]
    assert cut(ids, 4, "truncate-left", around) == [0, 7, 8, 1]
    assert cut(ids, 4, "truncate-left", (0, 0)) == [6, 7, 8, 1]
    assert cut(ids, 2, "truncate-right", around) == [0, 5]


def test_a_long_text_of_few_tokens_is_kept_whole(tokenizer: Tokenizer) -> None:
    text = "<|end|>" * 300  # 300 tokens of 7 characters; the tokens of 64 × 16 characters would fit
    limits = ModelLimits(max_model_len=302, vocab_size=258, eos_token_ids=(1,))
    (row,) = preparer_of(tokenizer, limits).prepare([job(text)])
    assert isinstance(row, PreparedRow)
    assert row.num_prompt_tokens == 301
    long = encode_long(
        text, lambda piece: [0] * (len(piece) // 7), max_model_len=300 // 16, on_too_long="truncate-right"
    )
    assert isinstance(long, list)
    assert 18 + 64 < len(long) <= 300
    assert encode_long(text, lambda piece: [0], max_model_len=8, on_too_long="error") == [0]


def test_the_numbers_that_a_row_may_be_answered_with_are_bounded(tokenizer: Tokenizer) -> None:
    """1,024 answers of 32,000 tokens with 20 alternatives each would take 50 GB in the engine."""
    limits = ModelLimits(max_model_len=40_000, vocab_size=258, eos_token_ids=(1,))
    rows = preparer_of(tokenizer, limits).prepare(
        [
            job(n=1024, logprobs=20, max_tokens=32_000),
            job(n=1024, return_token_ids=True),  # max_tokens is what is left
            job(n=1024, logprobs=20, max_tokens=780),
            job(n=419, return_token_ids=True),
            job(n=1024, max_tokens=32_000),
        ]
    )
    assert [type(row) for row in rows] == [JobResult, JobResult, PreparedRow, PreparedRow, PreparedRow]
    too_many = rows[0]
    assert isinstance(too_many, JobResult)
    assert too_many.error is not None
    assert too_many.error.type == "invalid_sampling"
    assert "hold 688,128,000 numbers; allowed: 16,777,216" in too_many.error.message


def test_stop_ids_that_leave_no_token_before_min_tokens(tokenizer: Tokenizer) -> None:
    limits = ModelLimits(max_model_len=64, vocab_size=258, eos_token_ids=(1,))
    preparer = preparer_of(tokenizer, limits)
    everything = [0, *range(2, 258)]  # with the end-of-sequence id 1
    row, fine, also_fine = preparer.prepare(
        [
            job(min_tokens=1, stop_token_ids=everything),
            job(min_tokens=1, stop_token_ids=everything[1:]),
            job(stop_token_ids=everything),
        ]
    )
    assert isinstance(row, JobResult)
    assert row.error is not None
    assert row.error.type == "invalid_sampling"
    assert "`sampling.min_tokens` is 1" in row.error.message
    assert isinstance(fine, PreparedRow)
    assert isinstance(also_fine, PreparedRow)


def test_rows_that_ask_for_the_same_share_its_grammar_and_its_objects() -> None:
    """Of many rows with one schema only the first takes its memory. Without a maker of grammars such rows are
    refused."""
    tokenizer = Tokenizer.load(demo_path())
    limits = ModelLimits(max_model_len=64, vocab_size=640, eos_token_ids=(0, 2))
    schema = {"type": "object", "properties": {f"property {i}": {"type": "integer"} for i in range(50)}}
    rows = [job(index=i, seed=1, structured=Structured(json_schema=dict(schema))) for i in range(3)]
    with closing(GrammarMaker(demo_path(), vocab_size=640, end_ids=(0, 2))) as grammars:
        prepared = Preparer(tokenizer, limits, lambda conversations: [], grammars).prepare([*rows, job()])
    first, *others, free = [row for row in prepared if isinstance(row, PreparedRow)]
    assert first.constraint is not None
    assert first.constraint.end_ids == [0, 2]
    assert all(row.sampling == first.sampling and row.answer_key == first.answer_key for row in others)
    assert all(row.sampling.structured is first.sampling.structured for row in others)
    assert all(row.constraint == first.constraint for row in others)
    assert first.num_bytes > 10_000 > others[0].num_bytes
    assert free.constraint is None
    (refused,) = Preparer(tokenizer, limits, lambda conversations: []).prepare(rows[:1])
    assert isinstance(refused, JobResult)
    assert refused.error is not None
    assert "`sampling.structured.json_schema` is not supported here" in refused.error.message
    limits = msgspec.structs.replace(limits, eos_token_ids=(900,))
    tokenizer._tokenizer.eos_token = None
    (refused,) = Preparer(tokenizer, limits, lambda conversations: [], grammars).prepare(rows[:1])
    assert isinstance(refused, JobResult)
    assert refused.error is not None
    assert "needs an end-of-sequence token, and the model has none" in refused.error.message
