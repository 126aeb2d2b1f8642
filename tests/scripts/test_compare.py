"""`scripts/compare`: the same work for every engine, ratios round by round, and a word on every engine left out."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from comparison import main
from comparison.checkpoint import SHAPES
from comparison.child import run
from comparison.engines import ENGINES
from comparison.job import Job, Outcome
from comparison.main import make_job, parse_arguments
from comparison.report import format_table, standings
from fake_command import ENVIRON
from nvcli.demo import demo_path
from nvcli.errors import ConfigError
from nvcli.tools.bench.workload import Workload
from warm_process import run_warm

COMPARE = Path(__file__).parents[2] / "scripts" / "compare"
TINY = ("--model", "demo", "--num-requests", "3", "--input-len", "4:9", "--output-len", "3:6", "--threads", "1")
Compare = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def compare(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Compare:
    """Runs the command in this process, and engines of this Python as copies of a warm one, each once: in later rounds
    it is said to have done the same again."""
    outcomes: dict[str, str] = {}

    def run_engine(command: list[str], *, check: bool, **options: Any) -> subprocess.CompletedProcess[Any]:
        job, outcome = (Path(name) for name in command[3:])
        if known := outcomes.get(job.read_text()):
            outcome.write_text(known)
            return subprocess.CompletedProcess(command, 0)
        run = run_warm if command[0] == sys.executable else subprocess.run
        done = run(command, **options)
        if outcome.exists():
            outcomes[job.read_text()] = outcome.read_text()
        return done

    monkeypatch.setattr(main, "subprocess", SimpleNamespace(**{**vars(subprocess), "run": run_engine}))

    def run(*args: str) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        try:
            code = main.main(list(args))
        except SystemExit as end:
            code = int(str(end.code))
        return subprocess.CompletedProcess(args, code, *capsys.readouterr())

    return run


def job_for(*args: str) -> Job:
    return make_job(parse_arguments([*TINY, *args]), demo_path(), "cpu")


def test_engines_run_in_turn_and_absent_ones_are_named(compare: Compare) -> None:
    engines = ["nvcli", "generate", "continuous"]
    done = compare(*TINY, "--engines", *engines, "vllm", "--repeat", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert {row["engine"] for row in result["engines"]} == set(engines)
    assert [len(row["seconds"]) for row in result["engines"]] == [2, 2, 2]
    assert "vllm cannot be imported" in result["left_out"]["vllm"]
    timed = [line.split()[5] for line in done.stderr.splitlines() if line.startswith("compare: round")]
    assert timed == 2 * engines
    rows = Workload(num_requests=3, input_len=(4, 9), output_len=(3, 6)).rows(640)
    assert result["output_tokens"] == sum(length for _, length in rows)


def test_an_engine_that_fails_makes_code_1_and_the_others_go_on(compare: Compare) -> None:
    done = compare(*TINY, "--engines", "generate", "nvcli", "--python", "generate=/no/such/python")
    assert done.returncode == 1
    assert "left out: generate: failed in round 1: /no/such/python cannot be run" in done.stdout
    assert "\nnvcli" in done.stdout


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--model", "demo", "--input-len", "9:1"), "--input-len"),
        (("--model", "demo", "--input-len", "4000"), "--output-len"),
        (("--model", "demo", "--temperature", "-1"), "--temperature"),
        (("--model", "demo", "--python", "vllm"), "--python"),
        (("--model", "demo", "--engines", "nvcli", "nvcli"), "--engines"),
        (("--model", "no/such/folder"), "no/such/folder"),
    ],
)
def test_wrong_options_are_refused(args: tuple[str, ...], named: str, compare: Compare) -> None:
    done = compare(*args)
    assert done.returncode == 2
    assert named in done.stderr


def test_the_script_is_the_command() -> None:
    done = subprocess.run([sys.executable, str(COMPARE)], capture_output=True, text=True, env=ENVIRON, timeout=100)
    assert done.returncode == 2
    assert "--shape" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_job_carries_the_workload_and_travels_as_json(tmp_path: Path) -> None:
    job = job_for("--temperature", "0", "--max-num-seqs", "7", "--seed", "3")
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job
    assert job.rows == Workload(num_requests=3, input_len=(4, 9), output_len=(3, 6), seed=3).rows(640)
    assert (job.temperature, job.max_num_seqs, job.dtype) == (0.0, 7, "float32")
    assert not {tuple(prompt) for prompt, _ in job.warm_up} & {tuple(prompt) for prompt, _ in job.rows}


def test_requests_that_the_model_cannot_hold_are_refused() -> None:
    with pytest.raises(ConfigError, match="--input-len"):
        job_for("--input-len", "100000")


def test_an_engine_says_what_it_cannot_do() -> None:
    outcome = run(Job(**{**vars(job_for()), "engine": "generate", "tensor_parallel_size": 2}))
    assert outcome == Outcome(left_out="transformers is compared on one device; leave --tp out")


class FakeSamplingParams:
    """The sampling parameters of vLLM and nano-vllm, as far as the comparison sets them."""

    def __init__(self, *, max_tokens: int, ignore_eos: bool, temperature: float, detokenize: bool = True) -> None:
        assert ignore_eos
        self.max_tokens = max_tokens


@pytest.mark.parametrize(("name", "missing"), [("vllm", 0), ("nano-vllm", 0), ("vllm", 1), ("nano-vllm", 1)])
def test_engines_that_are_not_installed_here_are_asked_in_their_own_words(
    name: str, missing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the package answers with `missing` tokens too few: a short answer must not count as one."""
    asked: list[tuple[list[int], int]] = []

    class FakeLLM:
        def __init__(self, *args: Any, **options: Any) -> None:
            assert options["max_model_len"] == job.max_model_len

        def generate(self, prompts: list[Any], sampling: list[FakeSamplingParams], *, use_tqdm: bool) -> list[Any]:
            ids = [prompt["prompt_token_ids"] if name == "vllm" else prompt for prompt in prompts]
            asked.extend(zip(ids, (one.max_tokens for one in sampling), strict=True))
            answers = [[7] * (one.max_tokens - missing) for one in sampling]
            if name == "nano-vllm":
                return [{"token_ids": answer, "text": ""} for answer in answers]
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=answer)]) for answer in answers]

    engine = ENGINES[name]
    job = Job(**{**vars(job_for("--temperature", "0.6")), "engine": name, "device": "cuda"})
    package = ModuleType(engine.package)
    vars(package).update(LLM=FakeLLM, SamplingParams=FakeSamplingParams)
    monkeypatch.setitem(sys.modules, engine.package, package)
    try:
        if missing:
            with pytest.raises(AssertionError):
                run(job)
            assert asked == job.warm_up
        else:
            assert run(job).seconds is not None
            assert asked == [*job.warm_up, *job.rows]
    finally:
        sys.modules.pop(engine.module, None)


def test_ratios_are_of_the_same_round() -> None:
    first, second = standings({"a": [1.0, 2.0, 4.0], "b": [3.0, 3.0, 8.0]}, {"a": "1", "b": ""}, 120)
    assert (first.median_seconds, first.tokens_per_second, first.ratios) == (2.0, 60.0, [1.0, 1.0, 1.0])
    assert (second.ratios, second.median_ratio) == ([3.0, 1.5, 2.0], 2.0)
    table = format_table([first, second])
    assert table[1].split("  ")[0] == "a 1"
    assert table[2].split() == ["b", "3.0", "(3.0", "to", "8.0)", "40", "2.00", "(1.50", "to", "3.00)"]


def test_one_round_has_no_spread() -> None:
    assert format_table(standings({"a": [2.0]}, {"a": ""}, 10))[1].split() == ["a", "2.0", "5", "1"]
    assert format_table([]) == ["no engine could run"]


def test_the_small_shape_has_its_published_size() -> None:
    shape = SHAPES["qwen3-30m"]
    hidden, inner, width = shape["hidden_size"], shape["intermediate_size"], shape["head_dim"]
    heads, kv_heads = shape["num_attention_heads"], shape["num_key_value_heads"]
    layer = 2 * hidden * width * (heads + kv_heads) + 3 * hidden * inner + 2 * hidden + 2 * width
    total = shape["vocab_size"] * hidden + shape["num_hidden_layers"] * layer + hidden
    assert round(total / 1e6, 1) == 29.4
