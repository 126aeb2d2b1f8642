"""The parent's whole way, files to files, with engines that answer each prompt with its reverse."""

from __future__ import annotations

import csv
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fake_engine import FakeEngine
from file_jobs import generate
from kept_lines import KeptLines
from nvcli.core.config import JobConfig, MessageTemplate, RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import unpack
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.request import Request, RequestOutput
from nvcli.errors import CapacityError, ConfigError, LoadError, WorkerError
from nvcli.job.progress.summary import Summary, format_summary
from nvcli.job.run.feeder import Feeder
from nvcli.job.text.tokenizer import Tokenizer
from scheduler_engine import SchedulerEngine

# Imports transformers once, before the runs; what renders conversations is a copy.
pytestmark = pytest.mark.usefixtures("tokenizer", "warm_engines")


class Runs:
    """Runs jobs on fake engines and keeps what they did."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.engines: list[FakeEngine] = []
        self.progress = KeptLines()
        self.summary: Summary | None = None

    def __call__(
        self,
        rows: list[dict[str, Any] | str],
        *,
        config: dict[str, Any] | None = None,
        engine: dict[str, Any] | None = None,
        **options: Any,
    ) -> list[dict[str, Any]]:
        """Output rows, in the order of the file."""
        source = self.folder / "in.jsonl"
        source.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))

        def start(engine_config: EngineConfig) -> FakeEngine:
            made = FakeEngine(engine_config, **(engine or {}))
            self.engines.append(made)
            return made

        run = RunConfig(model=str(self.model), device="cpu", **{"max_num_seqs": 8, **(config or {})})
        try:
            self.summary = generate(
                run,
                **{"inputs": [str(source)], "output": None, "start": start, **options},
                progress=self.progress,
                overwrite=True,
            )
        finally:
            assert all(made.closed for made in self.engines)
        return self.output()

    def output(self) -> list[dict[str, Any]]:
        data = (self.folder / "in.out.jsonl").read_bytes()
        assert not data or data.endswith(b"\n")
        return [json.loads(line) for line in data.splitlines()]


@pytest.fixture
def run(tmp_path: Path, model_folder: Path) -> Runs:
    return Runs(tmp_path, model_folder)


def texts(row: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in row["choices"]]


def test_each_row_is_answered_once_with_its_own_answer(run: Runs) -> None:
    prompts = [f"prompt {number} ü😀"[: 3 + number % 12] for number in range(500)]
    rows = run([{"id": f"r{number}", "prompt": prompt, "number": number} for number, prompt in enumerate(prompts)])
    assert sorted(row["index"] for row in rows) == list(range(500))
    assert [row["index"] for row in rows] != list(range(500))  # as they were completed
    for row in rows:
        prompt = prompts[row["index"]]
        assert (row["id"], row["number"], row["error"]) == (f"r{row['index']}", row["index"], None)
        (choice,) = row["choices"]
        # The reverse of the bytes; a beginning-of-sequence token comes last there and is not text.
        assert choice == {
            "index": 0,
            "text": prompt.encode()[::-1].decode(errors="replace"),
            "finish_reason": "stop",
        }
        length = len(prompt.encode()) + 1
        assert row["usage"] == {"prompt_tokens": length, "completion_tokens": length + 1, "cached_tokens": 4}
    assert run.engines[0].max_held == 16  # twice max_num_seqs, and never more
    assert run.summary is not None
    assert (run.summary.rows, run.summary.errors) == (500, {})
    assert run.summary.counts.completion_tokens == sum(row["usage"]["completion_tokens"] for row in rows)


def test_input_order(run: Runs) -> None:
    rows = run([{"prompt": f"p{number}"} for number in range(100)], config={"job": JobConfig(order="input")})
    assert [row["index"] for row in rows] == list(range(100))
    assert [row["id"] for row in rows] == [f"row-{index}" for index in range(100)]


def test_bad_rows_are_errors_and_the_others_are_answered(run: Runs) -> None:
    rows = run(
        [
            {"prompt": "good"},
            "not json",
            {"prompt": "x" * 64},
            {"prompt": "x", "sampling": {"max_tokens": 63}},
            {"prompt": "x", "sampling": {"max_tokens": 62}},
            {"prompt": "x", "sampling": {"min_tokens": 63}},
            {"prompt_token_ids": []},
            {"prompt_token_ids": [5, 258]},
            {"prompt_token_ids": [5, -1]},
            {"prompt": "x", "sampling": {"stop_token_ids": [999]}},
            {"prompt": "x", "sampling": {"logit_bias": {"999": 1}}},
            {"messages": [{"role": "forbidden", "content": "x"}]},
            {"prompt": "fail in the engine"},
            {"prompt": "good again"},
        ],
        engine={"fails": lambda request: len(unpack(request.prompt_ids)) == 19},
    )
    errors = {row["index"]: row["error"] for row in sorted(rows, key=lambda row: row["index"])}
    assert [error and error["type"] for error in errors.values()] == [
        None,
        "invalid_json",
        "prompt_too_long",
        "max_tokens_too_large",
        None,
        "max_tokens_too_large",
        "empty_prompt",
        "token_out_of_vocabulary",
        "token_out_of_vocabulary",
        "token_out_of_vocabulary",
        "token_out_of_vocabulary",
        "chat_template_error",
        "kv_cache_too_small",
        None,
    ]
    for index, error in errors.items():
        assert error is None or error["message"].startswith(f"line {index + 1}: ")
    assert "no such role" in errors[11]["message"]
    assert "`prompt_token_ids` holds 258; the model's tokens are 0 to 257" in errors[7]["message"]
    assert run.summary is not None
    assert (run.summary.rows, run.summary.rows_failed) == (14, 11)


def test_chat_rows_go_through_the_template_and_get_no_second_bos(run: Runs) -> None:
    (row,) = run([{"messages": [{"role": "user", "content": "hi"}]}])
    assert texts(row) == ["<u>hi<a>"[::-1]]
    assert row["usage"]["prompt_tokens"] == len("<u>hi<a>")


def test_samples_of_a_row_are_one_result_in_their_order(run: Runs) -> None:
    rows = run(
        [{"prompt": "abc", "sampling": {"n": 3}}, {"prompt": "xyz", "sampling": {"n": 2, "stop": "y"}}],
        engine={"tokens_per_poll": 1},
    )
    rows.sort(key=lambda row: row["index"])
    assert texts(rows[0]) == ["cba"] * 3
    assert texts(rows[1]) == ["z"] * 2
    assert [choice["index"] for choice in rows[0]["choices"]] == [0, 1, 2]
    assert [choice["finish_reason"] for choice in rows[1]["choices"]] == ["stop", "stop"]
    assert rows[0]["usage"] == {"prompt_tokens": 4, "completion_tokens": 15, "cached_tokens": 4}
    assert [(request.row, request.sample) for request in run.engines[0].requests] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
    ]


def test_a_row_is_sent_once_and_without_what_the_engine_does_not_need(run: Runs) -> None:
    """200,000 stop strings and 1,024 samples took 13 GB in the engine."""
    stop = [f"stop {number}" for number in range(1024)]
    (row,) = run([{"prompt": "abc", "sampling": {"n": 50, "stop": stop}}])
    assert texts(row) == ["cba"] * 50
    (request,) = run.engines[0].received
    assert request.n == 50
    assert request.stream
    assert request.sampling == SamplingParams(n=50)


def test_an_error_of_one_sample_ends_the_others_of_its_row(run: Runs) -> None:
    rows = run(
        [{"prompt": "ab", "sampling": {"n": 3, "stop": "zzz"}}, {"prompt": "cd"}],
        engine={"fails": lambda request: request.row == 0 and request.sample == 1, "tokens_per_poll": 1},
    )
    assert sorted((row["index"], row["error"] is None) for row in rows) == [(0, False), (1, True)]
    assert {0, 2} & set(run.engines[0].aborted)


@pytest.mark.parametrize("tokens_per_poll", [1, 2, 5, 100])
def test_stop_strings_cut_the_answer_and_end_the_request(run: Runs, tokens_per_poll: int) -> None:
    rows = run(
        [
            {"prompt": "0123456789", "sampling": {"stop": ["54", "zzz"], "return_token_ids": True, "logprobs": 1}},
            {"prompt": "ab", "sampling": {"stop": "zzz"}},
            {"prompt": "a😀b", "sampling": {"stop": "no"}},
        ],
        engine={"tokens_per_poll": tokens_per_poll},
    )
    rows.sort(key=lambda row: row["index"])
    (choice,) = rows[0]["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("9876", "stop")
    assert rows[0]["usage"]["completion_tokens"] == 6 == len(choice["token_ids"]) == len(choice["logprobs"]["tokens"])
    assert choice["logprobs"]["tokens"] == ["9", "8", "7", "6", "5", "4"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 6
    assert texts(rows[1]) == ["ba"]
    assert rows[1]["usage"]["completion_tokens"] == 4  # with bos, whose text is nothing, and the end token
    if tokens_per_poll < 5:
        assert run.engines[0].aborted == [0]


def test_length_and_ignored_end_tokens(run: Runs) -> None:
    rows = run(
        [
            {"prompt": "abcdef", "sampling": {"max_tokens": 3}},
            {"prompt": "abcdef", "sampling": {"ignore_eos": True}},
            {"prompt": "abcdef", "sampling": {"ignore_eos": True, "stop_token_ids": [9, 3]}},
        ]
    )
    rows.sort(key=lambda row: row["index"])
    assert [(texts(row), row["choices"][0]["finish_reason"]) for row in rows] == [
        (["fed"], "length"),
        (["fedcba"], "length"),
        (["fedcba"], "stop"),
    ]
    requests = sorted(run.engines[0].requests, key=lambda request: request.row)
    assert [request.max_tokens for request in requests] == [3, 57, 57]
    assert [request.stop_ids for request in requests] == [[1], [], [3, 9]]


def test_seeds(run: Runs) -> None:
    run([{"prompt": "a"}, {"prompt": "b", "sampling": {"seed": 5}}, {"prompt": "c"}], config={"seed": 7})
    requests = sorted(run.engines[0].requests, key=lambda request: request.request_id)
    assert [(request.seed, request.row, request.sample) for request in requests] == [(7, 0, 0), (5, 0, 0), (7, 2, 0)]


@pytest.mark.parametrize(("how", "expected"), [("truncate-left", "b"), ("truncate-right", "a")])
def test_prompts_that_are_too_long_can_be_cut(run: Runs, how: str, expected: str) -> None:
    prompt = "a" * 60 + "b" * 60
    rows = run(
        [
            {"prompt": prompt},
            {"prompt": prompt, "sampling": {"max_tokens": 20}},
            {"prompt": "ab", "sampling": {"max_tokens": 64}},
            {"prompt": "ab"},
        ],
        config={"job": JobConfig(on_too_long=how)},  # type: ignore[arg-type]
    )
    rows.sort(key=lambda row: row["index"])
    assert [row["usage"]["prompt_tokens"] for row in rows] == [48, 44, 0, 3]
    assert texts(rows[1])[0][:20] == expected * 20
    assert rows[2]["error"]["type"] == "max_tokens_too_large"


def test_defaults_of_config_and_checkpoint(run: Runs, model_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in model_folder.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 9, "eos_token_id": [1, 5]}))
    run.model = folder
    rows: list[dict[str, Any] | str] = [{"prompt": "a", "sampling": {"top_p": 0.2}}, {"prompt": "b"}]
    run(rows, config={"sampling": {"top_k": 3}})
    sampling = [request.sampling for request in run.engines[0].requests]
    assert [(params.temperature, params.top_k, params.top_p) for params in sampling] == [(0.5, 3, 0.2), (0.5, 3, 1.0)]
    assert run.engines[0].requests[0].stop_ids == [1, 5]
    run(rows, config={"generation_config": "none"})
    assert run.engines[1].requests[1].sampling.temperature == 1.0
    run(rows, config={"sampling": {"logit_bias": {5: 1.0, "6": 2.0}}})  # as YAML has it
    assert [request.sampling.logit_bias for request in run.engines[2].requests] == [{5: 1.0, 6: 2.0}] * 2


def test_replicas_share_the_rows_and_know_their_number(run: Runs) -> None:
    rows = run([{"prompt": f"p{number}"} for number in range(300)], config={"data_parallel_size": 3})
    assert sorted(row["index"] for row in rows) == list(range(300))
    assert [engine.config.replica for engine in run.engines] == [0, 1, 2]
    shares = [len(engine.requests) for engine in run.engines]
    assert sum(shares) == 300
    assert min(shares) > 50
    assert run.progress.details.count("a note of the engine") == 1
    assert run.progress.lines.count("a warning of the engine") == len(run.engines)


def test_limit(run: Runs) -> None:
    rows = run([{"prompt": "a"}] * 50, limit=7)
    assert sorted(row["index"] for row in rows) == list(range(7))


def test_nothing_to_do_waits_for_no_engine(run: Runs) -> None:
    never = {"polls_until_ready": 10**9}
    assert run([], engine=never) == []
    assert [row["error"]["type"] for row in run(["bad"], engine=never)] == ["invalid_json"]
    assert (run.folder / "in.out.jsonl").exists()


def test_the_first_rows_are_sent_before_the_input_ends(run: Runs, tmp_path: Path) -> None:
    fifo = tmp_path / "pipe"
    os.mkfifo(fifo)
    seen: list[int] = []

    def write() -> None:
        with fifo.open("w") as pipe:
            pipe.write('{"prompt": "first"}\n')
            pipe.flush()
            deadline = time.monotonic() + 20
            while not (run.engines and run.engines[0].requests) and time.monotonic() < deadline:
                time.sleep(0.01)
            seen.append(len(run.engines[0].requests))
            pipe.write('{"prompt": "second"}\n')

    writer = threading.Thread(target=write)
    writer.start()
    rows = run([], inputs=[str(fifo)], output=str(run.folder / "in.out.jsonl"))
    writer.join()
    assert seen == [1]
    assert [texts(row) for row in rows] == [["tsrif"], ["dnoces"]]


def test_a_dead_engine_ends_the_run_with_what_was_answered(run: Runs) -> None:
    with pytest.raises(WorkerError, match="rank 0"):
        run([{"prompt": f"p{number}"} for number in range(400)], engine={"dies_after_polls": 4})
    rows = run.output()
    assert 0 < len(rows) < 400
    assert all(row["error"] is None for row in rows)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT])
def test_a_signal_ends_the_run_with_what_was_answered(run: Runs, number: signal.Signals) -> None:
    polls = iter(range(10**9))

    def on_poll() -> None:
        if next(polls) == 3:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt):
        run([{"prompt": f"p{number}"} for number in range(400)], engine={"on_poll": on_poll})
    assert 0 < len(run.output()) < 400
    assert signal.getsignal(number) == before


def test_errors_before_the_first_row(run: Runs, model_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"`max_model_len` is 65, and .* at most 64"):
        run([{"prompt": "a"}], config={"max_model_len": 65})
    with pytest.raises(ConfigError, match="tensor_parallel_size 3"):
        run([{"prompt": "a"}], config={"tensor_parallel_size": 3})
    assert run.engines == []
    assert not (run.folder / "in.out.jsonl").exists()
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    run.model = folder
    with pytest.raises(LoadError, match="no tokenizer"):
        run([{"prompt": "a"}])
    assert run.engines == []
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(LoadError, match="cannot load the tokenizer"):
        run([{"prompt": "a"}], engine={"polls_until_ready": 10**9})
    (folder / "chat_template.jinja").symlink_to("nowhere")
    with pytest.raises(LoadError, match=r"chat_template\.jinja: cannot be read: a link to nowhere"):
        run([{"prompt": "a"}])
    run.model = model_folder
    with pytest.raises(CapacityError, match="does not fit"):
        run([{"prompt": "a"}], engine={"load_error": CapacityError("it does not fit")})
    assert not (run.folder / "in.out.jsonl").exists()


def test_wrong_columns_leave_an_output_alone_that_is_to_be_overwritten(run: Runs) -> None:
    run([{"prompt": "a"}])
    before = (run.folder / "in.out.jsonl").read_bytes()
    with pytest.raises(
        ConfigError, match=r"its columns are `question`.*\n  name the column.*: --prompt-field question"
    ):
        run([{"question": "a"}] * 3)
    assert len(run.engines) == 1
    assert (run.folder / "in.out.jsonl").read_bytes() == before
    rows = run([{"question": "a"}, {"other": "b"}], config={"job": JobConfig(prompt_field="question")})
    assert sorted(row["error"] is None for row in rows) == [False, True]
    rows = run([{"question": "a"}], config={"job": JobConfig(check_columns=False)})
    assert rows[0]["error"]["type"] == "missing_prompt"


def test_tables_in_and_out(run: Runs) -> None:
    """The rows of a CSV file reach the engine, and a CSV file holds the answers, the prompts and the ids."""
    source = run.folder / "q.csv"
    source.write_text('key,question,sampling\n7,"abc, d","{""n"": 2}"\nx,xyz,\n8,only\n')
    job = JobConfig(
        prompt_field="question", chat="never", id_field="key", keep_input=True, text_field="said", order="input"
    )
    with pytest.raises(FileNotFoundError):  # of JSONL
        run([], inputs=[str(source)], config={"job": job})
    with (run.folder / "q.out.csv").open(newline="") as file:
        rows = list(csv.DictReader(file, strict=True))
    assert [(row["id"], row["key"], row["question"], row["said"]) for row in rows] == [
        ("7", "7", "abc, d", "d ,cba"),
        ("x", "x", "xyz", "zyx"),
        ("row-2", "", "", ""),
    ]
    assert [len(json.loads(row["choices"])) for row in rows] == [2, 1, 0]
    assert json.loads(rows[0]["sampling"]) == {"n": 2}
    assert json.loads(rows[2]["error"])["message"].startswith("line 4: it has 2 cells, and there are 3 columns")


def test_an_input_that_breaks_off_is_an_error_after_its_rows(run: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    import gzip

    path = run.folder / "in.jsonl.gz"
    data = gzip.compress(b"".join(b'{"prompt":"%s"}\n' % os.urandom(8).hex().encode() for _ in range(2000)))
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(ConfigError, match="cannot be read past line"):
        run([], inputs=[str(path)], config={"max_num_seqs": 200})
    assert len(run.output()) > 100


def test_what_prints_to_standard_output_does_not_reach_it(run: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    (run.folder / "in.out.jsonl").touch()
    run([{"prompt": "ab"}], output="-", engine={"on_poll": lambda: os.write(1, b"chatter\n")})
    captured = capfd.readouterr()
    assert [json.loads(line)["choices"][0]["text"] for line in captured.out.splitlines()] == ["ba"]
    assert "chatter" in captured.err


def test_requests_fit_the_model(run: Runs, tokenizer: Tokenizer) -> None:
    run([{"prompt": "ab"}])
    (request,) = run.engines[0].requests
    assert isinstance(request, Request)
    assert unpack(request.prompt_ids)[0] == 0
    assert request.max_tokens == 61
    assert not request.stream


@pytest.mark.parametrize("order", ["completion", "input"])
def test_equal_rows_are_computed_once_and_answered_each(run: Runs, order: str) -> None:
    greedy = {"temperature": 0}
    rows: list[dict[str, Any] | str] = [
        {"id": f"r{number}", "prompt": f"p{number % 7}", "sampling": greedy, "number": number} for number in range(3000)
    ]
    rows += [{"id": f"s{number}", "prompt": "p0"} for number in range(5)]  # drawn by the index: different rows
    answers = run(rows, config={"job": JobConfig(order=order)})  # type: ignore[arg-type]
    assert len(answers) == 3005
    if order == "input":
        assert [row["index"] for row in answers] == list(range(3005))
    assert len(run.engines[0].requests) == 7 + 5
    for row in answers:
        index = row["index"]
        assert row["id"] == (f"r{index}" if index < 3000 else f"s{index - 3000}")
        assert row.get("number") == (index if index < 3000 else None)
        assert texts(row) == [f"{index % 7 if index < 3000 else 0}p"]
        assert row["usage"]["prompt_tokens"] == 3
        assert row["usage"]["completion_tokens"] == 4
        assert row["usage"]["cached_tokens"] in (3, 4)  # 4 is what the fake engine says of rows that it answers
    assert run.summary is not None
    assert (run.summary.rows, run.summary.counts.rows_deduplicated) == (3005, 2993)
    assert run.summary.counts.completion_tokens == 12 * 4  # of rows that were computed


def test_equal_rows_share_an_error(run: Runs) -> None:
    rows = run([{"prompt": "ab", "sampling": {"seed": 1}}] * 4, engine={"fails": lambda request: True})
    assert sorted(row["error"]["message"] for row in rows) == [
        f"line {number}: this request can never fit" for number in range(1, 5)
    ]
    assert len(run.engines[0].requests) == 1


def test_without_a_plan_every_row_is_computed_in_the_order_of_the_input(run: Runs) -> None:
    rows: list[dict[str, Any] | str] = [
        {"prompt": f"p{number % 3}", "sampling": {"temperature": 0, "max_tokens": 1 + number % 50}}
        for number in range(300)
    ]
    answers = run(rows, config={"job": JobConfig(plan=False)})
    assert len(answers) == 300
    assert [request.row for request in run.engines[0].requests] == list(range(300))


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_shared_prefixes_are_computed_once_though_the_cache_is_small(
    run: Runs, num_replicas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 prefixes of 40 tokens, in random order; the KV cache holds three of them and what four rows add."""
    # All rows are read before the engine is ready, as they are where a model takes a while to load.
    monkeypatch.setattr(Feeder, "start", lambda feeder: feeder._run())
    num_prefixes, num_rows, block_size = 20, 600, 4
    order = [number % num_prefixes for number in range(num_rows)]
    random.Random(0).shuffle(order)
    rows: list[dict[str, Any] | str] = [
        {"prompt_token_ids": [10 + number] * 40 + [50 + index % 200, 3, 4], "sampling": {"max_tokens": 4}}
        for index, number in enumerate(order)
    ]
    computed, answers = {}, {}
    for plan in (False, True):
        engines: list[SchedulerEngine] = []

        def start(config: EngineConfig, engines: list[SchedulerEngine] = engines) -> SchedulerEngine:
            engines.append(SchedulerEngine(config, num_blocks=3 * 40 // block_size + 4 * 3))
            return engines[-1]

        job = JobConfig(plan=plan)
        settings = {"job": job, "block_size": block_size, "max_num_seqs": 4, "data_parallel_size": num_replicas}
        answers[plan] = sorted((row["index"], texts(row)) for row in run(rows, config=settings, start=start))
        stats = [engine.stats for engine in engines]
        computed[plan] = sum(one.prompt_tokens - one.cached_tokens for one in stats)
        for engine in engines:
            engine.scheduler.check_integrity()
    assert answers[False] == answers[True]
    least = num_prefixes * 40 + num_rows * 3
    assert computed[True] <= least * (1.0 if num_replicas == 1 else 1.1)
    assert computed[False] > 5 * least


class BusyEngine(FakeEngine):
    """Has its hands full for 100 polls."""

    busy_polls = 100

    def poll(self, timeout: float) -> list[RequestOutput]:
        if self._running and self.busy_polls:
            self.busy_polls -= 1
            return []
        return super().poll(timeout)


def test_a_replica_that_starts_later_gets_its_share_of_a_small_job(run: Runs) -> None:
    def start(config: EngineConfig) -> FakeEngine:
        run.engines.append(BusyEngine(config, polls_until_ready=2 + 20 * config.replica))
        return run.engines[-1]

    lengths = [4] * 60 + [40] * 20
    rows: list[dict[str, Any] | str] = [
        {"prompt": f"p{number}", "sampling": {"max_tokens": length}} for number, length in enumerate(lengths)
    ]
    run(rows, config={"data_parallel_size": 2, "max_num_seqs": 64}, start=start)
    shares = [[request.max_tokens for request in engine.requests] for engine in run.engines]
    assert [len(share) for share in shares] == [40, 40]
    assert [share.count(40) for share in shares] == [10, 10]


def test_a_replica_that_never_starts_keeps_no_rows(run: Runs) -> None:
    start = replicas(run, {}, {"polls_until_ready": 1_000_000})
    rows = run([{"prompt": f"p{number}"} for number in range(90)], config={"data_parallel_size": 2}, start=start)
    assert len(rows) == len(run.engines[0].requests) == 90


def replicas(run: Runs, *options: dict[str, Any]) -> Any:
    """Starts engines that differ."""

    def start(config: EngineConfig) -> FakeEngine:
        made = FakeEngine(config, **options[config.replica])
        run.engines.append(made)
        return made

    return start


def varied_rows() -> list[dict[str, Any] | str]:
    """Samples, stop strings, equal rows and bad ones."""
    rows: list[dict[str, Any] | str] = []
    for number in range(400):
        sampling = [{}, {"n": 3}, {"stop": "p"}, {"temperature": 0}, {"n": 2, "stop": "1"}][number % 5]
        rows.append({"prompt": f"p{number % 90} and more", "sampling": sampling})
    return [*rows, "not json"]


def by_index(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without what depends on the state of a prefix cache."""
    for row in rows:
        row.get("usage", {}).pop("cached_tokens", None)
    return sorted(rows, key=lambda row: row["index"])


@pytest.mark.parametrize("order", ["completion", "input"])
@pytest.mark.parametrize("polls", [0, 1, 7])
def test_the_rows_of_a_dead_replica_are_computed_by_the_others(run: Runs, order: str, polls: int) -> None:
    two = {"data_parallel_size": 2, "job": JobConfig(order=order)}  # type: ignore[arg-type]
    whole = by_index(run(varied_rows(), config=two))
    run.engines.clear()
    settings = {"data_parallel_size": 3, "job": JobConfig(order=order, keep_going=True)}  # type: ignore[arg-type]
    start = replicas(run, {}, {"dies_after_polls": polls}, {"seed": 3})
    rows = run(varied_rows(), config=settings, start=start)
    if order == "input":
        assert [row["index"] for row in rows] == list(range(401))
    assert by_index(rows) == whole
    (warning,) = [note for note in run.progress.lines if "a copy of the model died" in note]
    assert "copy 1 of the model: rank 0 (pid 1) was killed by signal 9" in warning
    assert run.summary is not None
    assert run.summary.counts.num_lost_replicas == 1
    computed_twice = sum(len(engine.requests) for engine in run.engines) - len(
        {(request.row, request.sample) for engine in run.engines for request in engine.requests}
    )
    assert 0 < computed_twice <= 2 * 8 + 2, "no more than the dead one held"


def test_a_replica_that_does_not_start_is_done_without(run: Runs) -> None:
    settings = {"data_parallel_size": 2, "job": JobConfig(keep_going=True)}
    start = replicas(run, {"load_error": CapacityError("GPU 0 is full")}, {})
    assert len(run([{"prompt": f"p{number}"} for number in range(50)], config=settings, start=start)) == 50
    assert any(
        "its 0 unfinished rows go to the others: copy 0 of the model: GPU 0 is full" in n for n in run.progress.lines
    )


def test_the_last_replica_ends_the_run(run: Runs) -> None:
    rows: list[dict[str, Any] | str] = [{"prompt": f"p{number}"} for number in range(400)]
    settings = {"data_parallel_size": 2, "job": JobConfig(keep_going=True)}
    start = replicas(run, {"dies_after_polls": 9}, {"dies_after_polls": 3})
    with pytest.raises(WorkerError, match="copy 0 of the model: rank 0"):
        run(rows, config=settings, start=start)
    assert 0 < len(run.output()) < 400
    with pytest.raises(WorkerError, match="copy 1 of the model: rank 0"):  # without --keep-going the first one does
        run(rows, config={"data_parallel_size": 2}, start=start)
    assert sum("a copy of the model died" in note for note in run.progress.lines) == 1


def test_a_model_that_no_replica_can_load_ends_the_run(run: Runs) -> None:
    settings = {"data_parallel_size": 2, "job": JobConfig(keep_going=True)}
    with pytest.raises(LoadError, match="no such tensor"):
        run([{"prompt": "a"}], config=settings, engine={"load_error": LoadError("no such tensor")})


def test_what_a_job_and_its_rows_say_to_the_chat_template(run: Runs) -> None:
    """A row's variables were copied to the output and had no effect."""
    template = run.folder / "t.jinja"
    template.write_text("{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}{{ think }}")
    hi = [{"role": "user", "content": "hi"}]
    job = JobConfig(
        order="input",
        system="S",
        chat_template=str(template),
        chat_template_kwargs={"think": "yes", "thinck": 1},
    )
    rows = run(
        [
            {"messages": hi},
            {"messages": hi, "chat_template_kwargs": {"think": "no"}},
            {"messages": hi, "chat_template_kwargs": {"think": "yes", "thinq": 1}, "temperature": 20.5},
            {"messages": [{"role": "system", "content": "own"}, *hi], "temperature": 21.5},
            {"prompt": "bare"},
        ],
        config={"job": job, "sampling": {"temperature": 0}},
    )
    prompts = [row["choices"][0]["text"][::-1] for row in rows]
    assert prompts == ["s:S u:hi yes", "s:S u:hi no", "s:S u:hi yes", "s:own u:hi yes", "bare"]
    assert len(run.engines[0].requests) == 4  # the third row is equal to the first one
    assert rows[2]["temperature"] == 20.5
    warnings = [note for note in run.progress.lines if note.startswith("warning: ")]
    assert len(warnings) == 4
    assert "does not know `thinck`, " in warnings[0]
    assert "line 3 has `temperature`" in warnings[1]
    assert "does not know `thinq` of line 3, " in warnings[2]
    assert "line 5 is not a conversation" in warnings[3]
    assert run.summary is not None
    assert "`temperature` stood at the top level of 2 rows" in format_summary(run.summary)


def test_prompts_made_of_columns(run: Runs) -> None:
    messages = [MessageTemplate(role="user", content="{q}?")]
    job = JobConfig(order="input", messages_template=messages)
    good, bad = run([{"q": "a", "prompt": None}, {"Q": "b"}], config={"job": job})
    assert (texts(good), good["q"]) == ([">a<?a>u<"], "a")
    assert bad["error"]["message"] == "line 2: no column `q`, which `job.messages_template` names; the row has `Q`"
