"""LLM: the rows and answers of `nvcli generate`, from iterables, in any number of calls at a time."""

from __future__ import annotations

import gc
import itertools
import json
import os
import pickle
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from file_jobs import generate
from held_engine import HeldEngine, MakeLLM
from kept_lines import KeptLines
from nvcli.core.config import JobConfig, RunConfig
from nvcli.errors import ClosedError, ConfigError, LoadError, RowError, WorkerError
from nvcli.job.run import plan
from nvcli.llm.answer import Answer
from nvcli.llm.llm import LLM, Answers


def until(is_so: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.005)


ROWS: list[dict[str, Any]] = [
    {"id": "a", "prompt": "hello", "topic": {"deep": [1, 2.5, None]}},
    {"prompt": "hello", "sampling": {"n": 2, "temperature": 0}},
    {"prompt": "hello", "sampling": {"n": 2, "temperature": 0}, "index": "mine", "input": 3},
    {"messages": [{"role": "user", "content": "hi"}], "sampling": {"stop": ["h"], "logprobs": 1}},
    {"prompt_token_ids": [5, 6, 7], "sampling": {"return_token_ids": True}},
    {"prompt": 5},
    {"id": "a", "prompt": "x"},
    {"prompt": "x", "sampling": {"temprature": 0}},
    {"prompt": "long" * 100},
    {"custom_id": "o", "url": "/v1/chat/completions", "body": {"messages": [{"role": "user", "content": "hi"}]}},
    {"custom_id": "p", "url": "/v1/completions", "body": {"prompt": "abc", "best_of": 2}, "id": 7},
]


@pytest.mark.parametrize("keys", [{}, {"keep_input": True, "text_field": "answer"}])
def test_answers_are_the_rows_that_a_job_writes(make_llm: MakeLLM, tmp_path: Path, keys: dict[str, Any]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    run = RunConfig(model=str(make_llm.model), device="cpu", max_num_seqs=8, job=JobConfig(order="input", **keys))
    llm = make_llm(job=run.job)
    generate(run, inputs=[str(source)], output=None, progress=KeptLines(), start=HeldEngine)
    written = [json.loads(line) for line in (tmp_path / "in.out.jsonl").read_text().splitlines()]
    answers = list(llm.generate(ROWS, order="input"))
    for answer, row in zip(answers, written, strict=True):
        for either in (answer, row):
            body = ((either.get("response") or {}).get("body")) or {}
            body.pop("created", None)
            for holder in (either, either.get("error"), body.get("error")):
                if holder and "message" in holder:  # the same error in another place
                    holder["message"] = holder["message"].partition(": ")[2]
        assert json.loads(json.dumps(answer)) == row
        assert list(answer) == list(row)


def test_rows_have_several_forms(make_llm: MakeLLM) -> None:
    llm = make_llm()
    messages = [{"role": "user", "content": "hi"}]
    rows = ["hi", messages, [3, 4], np.array([3, 4]), {"prompt_token_ids": np.array([3, 4])}, {"messages": messages}]
    texts = [answer.text for answer in llm.generate(rows, order="input")]
    assert texts[0] == "ih"
    assert texts[1] == texts[5] == ">a<ih>u<"
    assert texts[2] == texts[3] == texts[4]
    assert [answer.text for answer in llm.generate("hi")] == ["ih"]
    assert [answer.text for answer in llm.generate({"prompt": "hi"})] == ["ih"]


def test_a_bad_row_is_an_answer_with_an_error(make_llm: MakeLLM) -> None:
    rows: list[Any] = [5, None, b"bytes", {}, {"prompt": object()}, [], "", {"id": object(), "prompt": "x"}, "good"]
    answers = list(make_llm().generate(rows, order="input"))
    kinds = [None if answer.error is None else answer.error.type for answer in answers]
    assert kinds == [
        *("not_an_object", "not_an_object", "not_an_object", "missing_prompt", "invalid_value", "invalid_value"),
        *(None, "invalid_id", None),  # an empty text has the token of its beginning
    ]
    assert answers[0]["error"]["message"].startswith("rows[0]: expected a dict")
    with pytest.raises(RowError, match=r"rows\[3\]: none of `prompt`"):
        _ = answers[3].text
    error = pickle.loads(pickle.dumps(answers[3].error))
    assert (error.type, str(error)) == (answers[3].error.type, str(answers[3].error))
    assert (answers[3].finish_reason, answers[8].finish_reason, answers[8].text) == (None, "stop", "doog")


def test_what_is_passed_through_are_the_same_objects(make_llm: MakeLLM) -> None:
    thing, pair = object(), (1, {2})
    (answer,) = make_llm().generate([{"prompt": "x", "thing": thing, 3: pair, "error": thing}])
    assert answer["thing"] is thing
    assert answer[3] is pair  # type: ignore[index]
    assert answer["input"] == {"error": thing}
    assert answer.error is None
    assert isinstance(pickle.loads(pickle.dumps(Answer(answer | {"thing": 0, "input": 0}))), Answer)


def test_a_column_that_cannot_be_put_into_a_prompt(make_llm: MakeLLM) -> None:
    llm = make_llm(job=JobConfig(prompt_template="{a}{b}", chat="never"))
    rows = [{"a": "\ud800", "b": 1}, {"a": 1, "b": 2}, {"a": "x", 3: 4}]
    half, good, missing = llm.generate(rows, order="input")
    assert half.error is not None
    assert missing.error is not None
    assert "`a` is not text: it holds the lone surrogate \\ud800" in half.error.message
    assert "no column `b`, which `job.prompt_template` names; the row has `a`, `3`" in missing.error.message
    assert good.text == "21"


def test_rows_are_read_as_they_are_needed(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "MIN_WINDOW_ROWS", 100)
    llm = make_llm()
    numbers = itertools.count()
    for order in ("completion", "input"):
        first = next(numbers)
        answers = llm.generate((f"{number}" for number in numbers), order=order)
        for _ in range(500):
            next(answers)
        time.sleep(0.05)
        assert next(numbers) - first <= 500 + 100 + 1
        answers.close()
        assert list(answers) == []


def test_answers_come_before_later_rows_are_there(make_llm: MakeLLM) -> None:
    """A row may depend on the answer before it."""
    come = threading.Semaphore(1)

    def rows() -> Iterator[str]:
        for number in range(20):
            assert come.acquire(timeout=20)
            yield f"row {number}"

    for _ in make_llm().generate(rows()):
        come.release()


def test_orders(make_llm: MakeLLM) -> None:
    llm = make_llm()
    rows = [f"prompt {number}" for number in range(300)]
    assert [answer["index"] for answer in llm.generate(rows)] == list(range(300))
    indices = [answer["index"] for answer in llm.generate(rows, order="completion")]
    assert indices != list(range(300))
    assert sorted(indices) == list(range(300))


def test_a_slow_row_holds_the_window_back_and_no_other_call(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows behind it are computed as far as the window goes, and come in order once it is done."""
    monkeypatch.setattr(plan, "MIN_WINDOW_ROWS", 100)
    llm = make_llm()
    count = itertools.count()
    endless = ("hold" if number == 0 else f"row {number}" for number in count)
    answers = llm.generate(endless)
    others = llm.generate(itertools.chain(["hold too"], (f"other {number}" for number in itertools.count(1))))
    until(lambda: llm._session._counts.rows_done >= 190)
    time.sleep(0.05)
    assert next(count) <= 100 + 1
    assert [answer.text for answer in llm.generate(["ab", "cd"])] == ["ba", "dc"]
    assert len(list(llm.generate(["x"] * 30, order="completion"))) == 30
    others.close()
    make_llm.engines[0].may_go_on.set()
    taken = list(itertools.islice(answers, 300))
    assert [answer.index for answer in taken] == list(range(300))
    assert [answer.text for answer in taken[:2]] == ["dloh", "1 wor"]


def test_calls_run_at_the_same_time(make_llm: MakeLLM) -> None:
    """In several threads, and one reading from the answers of another."""
    llm = make_llm()
    seen: dict[int, list[str]] = {}

    def ask(number: int) -> None:
        rows = [f"{number}-{row}" for row in range(100)]
        seen[number] = [answer.text[::-1] for answer in llm.generate(rows, order="input")]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    twice = llm.generate(
        {"prompt": each.text, "at": each["index"]} for each in llm.generate(f"n{i}" for i in range(50))
    )
    assert {answer["at"]: answer.text for answer in twice} == {number: f"n{number}" for number in range(50)}
    for thread in threads:
        thread.join()
    assert seen == {number: [f"{number}-{row}" for row in range(100)] for number in range(4)}


def test_sampling_and_seeds(make_llm: MakeLLM) -> None:
    llm = make_llm(sampling={"max_tokens": 3}, seed=5)
    (first,) = llm.generate(["hello"])
    (second,) = llm.generate(
        [{"prompt": "hello", "sampling": {"max_tokens": 2}}], sampling={"max_tokens": 4, "top_k": 9}
    )
    (third,) = llm.generate(["hello"], seed=np.int64(6))  # type: ignore[arg-type]
    assert [answer.text for answer in (first, second, third)] == ["oll", "ol", "oll"]
    requests = make_llm.engines[0].received
    assert [(request.seed, request.row) for request in requests] == [(5, 0), (5, 0), (6, 0)]
    assert [request.sampling.top_k for request in requests] == [0, 9, 0]
    with pytest.raises(ConfigError, match=r"unknown key `sampling\.temprature`; did you mean `temperature`"):
        llm.generate([], sampling={"temprature": 1})


def test_a_call_that_is_left_is_aborted_and_the_llm_goes_on(make_llm: MakeLLM) -> None:
    llm = make_llm()
    engine_of = make_llm.engines.__getitem__
    answers = llm.generate(f"hold {number}" for number in range(1000))
    until(lambda: len(engine_of(0)._running) == 16)
    answers.close()
    until(lambda: len(engine_of(0).aborted) == 16)
    for answer in llm.generate(["short", *(f"hold {number}" for number in range(40))]):
        assert answer.text == "trohs"
        break  # the iterator is garbage here
    until(lambda: not engine_of(0)._running)
    assert len(list(llm.generate(["x"] * 30))) == 30
    assert len(engine_of(0).received) < 100  # of the rows that were read ahead, none was computed


def test_an_equal_row_of_another_call_is_still_computed(make_llm: MakeLLM) -> None:
    llm = make_llm(sampling={"temperature": 0})
    first = llm.generate(["hold me"])
    until(lambda: make_llm.engines[0]._running)
    second = llm.generate(["hold me"])
    until(lambda: llm._session._counts.num_waiting_for_equals)
    first.close()
    time.sleep(0.2)
    make_llm.engines[0].may_go_on.set()
    assert [answer.text for answer in second] == ["em dloh"]


def test_the_programs_own_error_comes_after_its_answers(make_llm: MakeLLM) -> None:
    def rows() -> Iterator[str]:
        yield from ("a", "b")
        raise LookupError("no more")

    answers = make_llm().generate(rows())
    assert {next(answers).text, next(answers).text} == {"a", "b"}
    with pytest.raises(LookupError, match="no more"):
        next(answers)
    assert list(answers) == []


def test_a_dead_engine_says_so_in_all_calls(make_llm: MakeLLM) -> None:
    llm = make_llm(engine={"dies_after_polls": 0})
    answers = llm.generate(["hold"])
    with pytest.raises(WorkerError, match=r"was killed by signal 9$"):
        list(answers)
    with pytest.raises(WorkerError, match=r"(?s)was killed by signal 9.*this LLM has ended; make a new one"):
        llm.generate(["x"])
    llm.close()
    with pytest.raises(WorkerError, match="was killed by signal 9"):
        llm.stream("x")


def test_a_closed_llm_says_so(make_llm: MakeLLM) -> None:
    with make_llm() as llm:
        answers, stream = llm.generate(["hold"]), llm.stream("hold")
        until(lambda: len(make_llm.engines[0]._running) == 2)
    for use in (lambda: next(answers), lambda: next(stream), lambda: llm.generate(["x"])):
        with pytest.raises(ClosedError, match="this LLM"):
            use()
    llm.close()


def test_what_cannot_be_loaded(make_llm: MakeLLM, tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="no weights"):
        make_llm(engine={"load_error": LoadError("no weights")})
    assert make_llm.engines[0].closed
    for settings, message in [
        ({"blok_size": 3}, "blok_size=3: unknown key `blok_size`; did you mean `block_size`"),
        ({"block_size": 0}, "block_size=0: `block_size` is 0"),
        ({"sampling": {"top_p": 7}}, "`sampling.top_p` is 7"),
        ({"tp": 2, "tensor_parallel_size": 1}, "`tensor_parallel_size` and its short name `tp` are given"),
        ({"pp": 2, "pipeline_parallel_size": 1}, "`pipeline_parallel_size` and its short name `pp` are given"),
        ({"dp": 2, "data_parallel_size": 1}, "`data_parallel_size` and its short name `dp` are given"),
        ({"config": tmp_path / "none.yaml"}, "cannot read the configuration file"),
    ]:
        with pytest.raises(ConfigError, match=message):
            LLM("demo", **settings)
    with pytest.raises(ConfigError, match="no model given"):
        LLM()
    (tmp_path / "c.yaml").write_text("block_size: 16\nsampling: {top_k: 3}\n")
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens=1: .* is smaller than `max_num_seqs` \(2\)"):
        LLM("demo", config=tmp_path / "c.yaml", sampling={"top_p": 0.5}, max_num_batched_tokens=1, max_num_seqs=2)


def test_wrong_arguments(make_llm: MakeLLM) -> None:
    llm = make_llm()
    for arguments, message in [
        ({"rows": 5}, "rows is 5; give an iterable"),
        ({"rows": np.array(5)}, "rows is .*; give an iterable"),
        ({"rows": b"x"}, "give an iterable"),
        ({"rows": [], "order": "random"}, 'order="random": allowed: input or completion'),
        ({"rows": [], "seed": -1}, "seed=-1: allowed"),
        ({"rows": [], "seed": np.float32(1.5)}, "seed=.*1.5.*: allowed"),
    ]:
        with pytest.raises(ConfigError, match=message):
            llm.generate(**arguments)  # type: ignore[arg-type]
    for kept, message in ((llm, "an LLM cannot be pickled"), (llm.generate([]), r"list\(answers\) waits")):
        with pytest.raises(TypeError, match=message):
            pickle.dumps(kept)


def test_an_interrupt_leaves_the_llm_usable(make_llm: MakeLLM) -> None:
    llm = make_llm()
    before = signal.getsignal(signal.SIGINT)
    answers = llm.generate(["hold"])
    until(lambda: make_llm.engines[0]._running)
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        next(answers)
    until(lambda: not make_llm.engines[0]._running)
    assert [answer.text for answer in llm.generate(["ab"])] == ["ba"]
    assert signal.getsignal(signal.SIGINT) is before


def test_a_forked_process_cannot_use_the_llm(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    answers = llm.generate(["hold"])
    until(lambda: make_llm.engines[0]._running)
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: 1)
        with pytest.raises(ClosedError, match=rf"belongs to process {llm._session._pid}, and this is a fork"):
            llm.generate(["x"])
        with pytest.raises(ClosedError, match="and this is a fork"):
            next(answers)
        answers.close()
        llm._session.close()
    assert not make_llm.engines[0].closed
    assert [answer.text for answer in llm.generate(["ab"])] == ["ba"]


def test_garbage_is_closed(make_llm: MakeLLM) -> None:
    llm = make_llm.unkept()
    answers: Answers | None = llm.generate(["hold"])
    del llm
    gc.collect()
    assert not make_llm.engines[0].closed  # the answers are still wanted
    assert answers is not None
    answers = None
    gc.collect()
    until(lambda: make_llm.engines[0].closed)


def test_a_text_streams(make_llm: MakeLLM) -> None:
    llm = make_llm(engine={"tokens_per_poll": 1})
    prompt = "grüße 😀 an alle"
    stream = llm.stream({"prompt_token_ids": list(reversed(token_ids(prompt))), "kind": 3})
    pieces = list(stream)
    assert "".join(pieces) == stream.text == stream.answer.text == prompt
    assert len(pieces) == len(prompt)  # no character in parts
    assert (stream.answer["kind"], stream.answer.finish_reason) == (3, "stop")
    stopped = llm.stream("fe dcb a", sampling={"stop": ["bcd e", "cx"]})
    assert "".join(stopped) == stopped.answer.text == "a "
    held = llm.stream("fe dcb a", sampling={"stop": ["cx"], "n": 2})
    assert "".join(held) == "a bcd ef"
    assert held.answer.texts == ["a bcd ef"] * 2
    best = llm.stream("fe dcb a", sampling={"best_of": 2})
    assert list(best) == [best.answer.text] == ["a bcd ef"]
    bad = llm.stream({"prompt": 3})
    assert list(bad) == []
    assert bad.answer.error is not None


def test_a_text_streams_whose_answer_is_known(make_llm: MakeLLM) -> None:
    llm = make_llm(sampling={"temperature": 0})
    streams = [llm.stream("abc"), llm.stream("abc")]
    assert ["".join(stream) for stream in streams] == ["cba", "cba"]
    assert "".join(llm.stream("abc")) == "cba"


def test_a_stream_that_is_closed(make_llm: MakeLLM) -> None:
    llm = make_llm()
    stream = llm.stream("hold")
    until(lambda: make_llm.engines[0]._running)
    stream.close()
    assert list(stream) == []
    with pytest.raises(ClosedError, match="was closed before its answer"):
        _ = stream.answer
    until(lambda: not make_llm.engines[0]._running)


def token_ids(text: str) -> list[int]:
    from tokenizers import pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ((word, _),) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [2 + letters.index(letter) for letter in word]


def test_warnings_are_notes(make_llm: MakeLLM) -> None:
    list(make_llm().generate([{"prompt": "x", "temperature": 0}]))
    assert any(note.startswith("warning: rows[0] has `temperature` at its top level") for note in make_llm.notes)


def test_calls_that_come_and_go_at_random(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each answer is that of its own row, whatever other calls do; what was left is forgotten everywhere."""
    monkeypatch.setattr(plan, "MIN_WINDOW_ROWS", 20)
    llm = make_llm(sampling={"temperature": 0}, engine={"tokens_per_poll": 2}, data_parallel_size=2)
    failures: list[BaseException] = []

    def use(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(12):
            prompts = [f"{rng.randrange(40)}" * rng.randrange(1, 9) for _ in range(rng.randrange(1, 60))]
            if rng.random() < 0.3:
                stream = llm.stream(prompts[0])
                pieces = list(itertools.islice(stream, rng.randrange(5)))
                assert prompts[0][::-1].startswith("".join(pieces))
                if rng.random() < 0.5:
                    assert stream.answer.text == prompts[0][::-1]
                stream.close()
                continue
            order = rng.choice(["completion", "input"])
            answers = llm.generate(iter(prompts), order=order, sampling={"stop": ["~"]} if rng.random() < 0.5 else {})
            taken = list(itertools.islice(answers, rng.choice([0, 3, 1000])))
            assert [answer.text for answer in taken] == [prompts[answer["index"]][::-1] for answer in taken]
            indices = [answer["index"] for answer in taken]
            assert len(set(indices)) == len(taken)
            assert order == "completion" or indices == list(range(len(taken)))
            assert len(taken) in (0, 3, len(prompts)) or len(prompts) < 3
            answers.close()

    def try_to_use(seed: int) -> None:
        try:
            use(seed)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=try_to_use, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    until(lambda: not any(engine._running for engine in make_llm.engines))
    session = llm._session
    assert not session._calls
    loop = session._loop
    assert loop is not None
    duplicates = loop._duplicates
    assert duplicates is not None
    # All at once: a row on its way from the plan to a replica is in neither.
    until(
        lambda: (
            not loop._planner.num_rows
            and not any(replica.rows for replica in loop._replicas)
            and (duplicates.num_rows, duplicates._followers) == (0, {})
        )
    )
    loop._planner.check_integrity()


def thinking_template(folder: Path) -> str:
    """A template that names the marks of thoughts, and adds nothing to one message."""
    path = folder / "thinking.jinja"
    path.write_text("{# <think></think> #}{% for m in messages %}{{ m.content }}{% endfor %}")
    return str(path)


def test_a_thought_is_shown_as_it_comes_and_told_apart_in_the_answer(make_llm: MakeLLM, tmp_path: Path) -> None:
    llm = make_llm(job=JobConfig(chat_template=thinking_template(tmp_path)), engine={"tokens_per_poll": 3})
    said = "<think>mm</think>\nhello"
    messages = [{"role": "user", "content": said[::-1]}]
    stream = llm.stream(messages)
    assert "".join(stream) == said
    (answer,) = llm.generate([messages])
    for each in (stream.answer, answer):
        assert (each.text, each.reasoning_content, each.tool_calls) == ("hello", "mm", [])
    body = {"messages": [{"role": "user", "content": said[:-5][::-1]}]}
    (openai,) = llm.generate([{"custom_id": "a", "url": "/v1/chat/completions", "body": body}])
    assert (openai.text, openai.reasoning_content) == ("", "mm")
    (failed,) = llm.generate([{"messages": []}])
    assert (failed.reasoning_content, failed.tool_calls) == (None, [])


def test_an_echo_does_not_show_twice(make_llm: MakeLLM) -> None:
    stream = make_llm().stream("abc", sampling={"echo": True})
    assert ("".join(stream), stream.answer.text) == ("cba", "abccba")
