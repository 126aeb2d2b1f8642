"""nvcli beside other engines: one workload, a fresh process for each engine and round, in turn (A B C A B C).

    python scripts/compare --shape qwen3-0.6b --repeat 3
    python scripts/compare --model demo --num-requests 8 --input-len 8:32 --output-len 8:32 --engines nvcli generate
    python scripts/compare --shape qwen3-8b --engines nvcli vllm --python vllm=/opt/vllm/bin/python

Every engine loads the same checkpoint and answers the same prompts with the same numbers of tokens; timed is the
generation alone, after a small warm-up. An engine that is not installed, or cannot do the job, is named as left out.
Exit codes: 0; 1 an engine failed; 2 wrong options; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from comparison.checkpoint import SHAPES, write_checkpoint
from comparison.engines import ENGINES
from comparison.job import Job, Outcome
from comparison.report import format_table, standings
from nvcli.errors import ConfigError, NvcliError
from nvcli.job.run.device import detect_device
from nvcli.models.checkpoint import resolve_model
from nvcli.models.config import load_model_config
from nvcli.tools.bench.command import parse_range
from nvcli.tools.bench.workload import Workload

_SCRIPTS = Path(__file__).parent.parent
_USUAL_MODEL_LEN = 4096


class EngineFailed(Exception):
    """An engine's process ended without an outcome; the message is its last word."""


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    about = "\n".join(f"  {name:<12} {engine.about}" for name, engine in ENGINES.items())
    parser = argparse.ArgumentParser(
        prog="compare",
        description=f"{__doc__}\nengines:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", metavar="PATH|NAME", help="folder, Hugging Face id, or `demo`")
    model.add_argument("--shape", choices=SHAPES, help="made-up weights of a known shape")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="the first is the measure")
    parser.add_argument("--num-requests", type=_positive, default=256)
    parser.add_argument("--input-len", default="100:1024", metavar="A:B", help="prompt tokens, uniform")
    parser.add_argument("--output-len", default="100:1024", metavar="A:B", help="answer tokens, uniform")
    parser.add_argument("--temperature", type=_temperature, default=0.6, help="0: greedy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeat", type=_positive, default=1, metavar="N", help="rounds")
    parser.add_argument("--tp", type=_positive, default=1, metavar="N", help="GPUs for each engine")
    parser.add_argument("--max-num-seqs", type=_positive, metavar="N", help="requests that run at a time")
    parser.add_argument("--batch-size", type=_positive, default=32, metavar="N", help="of generate")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--threads", type=_positive, default=len(os.sched_getaffinity(0)), help="on a CPU")
    parser.add_argument(
        "--python", action="append", default=[], metavar="ENGINE=PATH", help="an engine's own interpreter; repeatable"
    )
    parser.add_argument("--timeout", type=_positive, default=3600, metavar="SECONDS", help="of each process")
    parser.add_argument("--json", action="store_true", help="the result as JSON, on standard output")
    chosen = parser.parse_args(arguments)
    chosen.interpreters = dict.fromkeys(ENGINES, sys.executable)
    for text in chosen.python:
        engine, _, path = text.partition("=")
        if engine not in ENGINES or not path:
            parser.error(f"--python {text!r}: give ENGINE=PATH, with one of {', '.join(ENGINES)}")
        chosen.interpreters[engine] = path
    if len(set(chosen.engines)) < len(chosen.engines):
        parser.error("--engines names one twice")
    return chosen


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def _temperature(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 100:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 100")
    return number


def make_job(chosen: argparse.Namespace, model_path: Path, device: str) -> Job:
    """For the first engine. Raises ConfigError or LoadError."""
    model = load_model_config(model_path)
    workload = Workload(
        num_requests=chosen.num_requests,
        input_len=parse_range("--input-len", chosen.input_len),
        output_len=parse_range("--output-len", chosen.output_len),
        temperature=chosen.temperature,
        seed=chosen.seed,
    )
    # Other tokens than the workload's, so that no prefix is found.
    warm_up = Workload(num_requests=4, input_len=(8, 32), output_len=(4, 8), seed=chosen.seed + 1)
    longest = max(workload.max_model_len, warm_up.max_model_len)
    if longest > model.max_position_embeddings:
        raise ConfigError(
            f"requests of up to {longest} tokens do not fit the model, which was made for "
            f"{model.max_position_embeddings}; lower --input-len or --output-len"
        )
    return Job(
        engine=chosen.engines[0],
        model=str(model_path),
        device=device,
        dtype=model.dtype if device == "cuda" else "float32",
        tensor_parallel_size=chosen.tp,
        max_model_len=min(max(_USUAL_MODEL_LEN, longest), model.max_position_embeddings),
        max_num_seqs=chosen.max_num_seqs,
        batch_size=chosen.batch_size,
        temperature=chosen.temperature,
        warm_up=warm_up.rows(model.vocab_size),
        rows=workload.rows(model.vocab_size),
    )


def run_engine(job: Job, python: str, *, threads: int, timeout: float) -> Outcome:
    """One process. What it prints goes to standard error. Raises EngineFailed."""
    with tempfile.TemporaryDirectory(prefix="nvcli-compare-") as folder:
        job_file, outcome_file, log_file = (Path(folder, name) for name in ("job.json", "outcome.json", "log"))
        job.write(job_file)
        paths = [str(_SCRIPTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        if job.device == "cpu":
            environment["OMP_NUM_THREADS"] = str(threads)
        command = [python, "-m", "comparison.child", str(job_file), str(outcome_file)]
        try:
            with log_file.open("wb") as log:  # no pipe: a process that an engine leaves behind would hold it open
                done = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False, timeout=timeout)
        except OSError as error:
            raise EngineFailed(f"{python} cannot be run: {error.strerror}") from None
        except subprocess.TimeoutExpired:
            raise EngineFailed(f"no end within --timeout ({timeout:g} s)") from None
        if done.returncode or not outcome_file.exists():
            log_text = log_file.read_text(encoding="utf-8", errors="replace").strip()
            sys.stderr.write(f"{log_text}\n")
            raise EngineFailed(f"exit code {done.returncode}: {(log_text.splitlines() or ['no message'])[-1]}")
        return Outcome.read(outcome_file)


@dataclass
class Rounds:
    """The results of all rounds."""

    seconds: dict[str, list[float]]
    """Seconds by engine, of those that ran every round so far."""
    versions: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """Engine → why it did not."""
    any_failed: bool = False


def run_rounds(chosen: argparse.Namespace, job: Job) -> Rounds:
    """All engines in turn, `--repeat` times. One that cannot run, or fails, is left out from there on."""
    rounds = Rounds({engine: [] for engine in chosen.engines})
    for number in range(1, chosen.repeat + 1):
        for engine in list(rounds.seconds):
            one = replace(job, engine=engine)
            try:
                outcome = run_engine(one, chosen.interpreters[engine], threads=chosen.threads, timeout=chosen.timeout)
            except EngineFailed as error:
                outcome = Outcome(left_out=f"failed in round {number}: {error}")
                rounds.any_failed = True
            if outcome.seconds is None:
                rounds.left_out[engine] = outcome.left_out or ""
                del rounds.seconds[engine]
                _say(f"{engine} is left out: {outcome.left_out}")
            else:
                rounds.seconds[engine].append(outcome.seconds)
                rounds.versions[engine] = outcome.version
                _say(f"round {number} of {chosen.repeat}: {engine} {outcome.seconds:.1f} s")
    return rounds


def main(arguments: list[str] | None = None) -> int:
    """The command; gives its exit code."""
    chosen = parse_arguments(arguments)
    try:
        return run(chosen)
    except NvcliError as error:
        _say(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 130


def run(chosen: argparse.Namespace) -> int:
    """Raises ConfigError or LoadError."""
    device = detect_device() if chosen.device == "auto" else chosen.device
    with tempfile.TemporaryDirectory(prefix="nvcli-compare-") as folder:
        if chosen.shape is not None:
            dtype = "bfloat16" if device == "cuda" else "float32"
            path = write_checkpoint(chosen.shape, Path(folder), dtype)
        else:
            path = resolve_model(chosen.model)
        job = make_job(chosen, path, device)
        num_prompt_tokens = sum(len(prompt) for prompt, _ in job.rows)
        num_tokens = sum(length for _, length in job.rows)
        title = (
            f"{chosen.shape or chosen.model}, {device}, {job.dtype}: {len(job.rows)} requests, "
            f"{num_prompt_tokens:,} prompt and {num_tokens:,} generated tokens, temperature {job.temperature:g}"
        )
        _say(title)
        rounds = run_rounds(chosen, job)
    rows = standings(rounds.seconds, rounds.versions, num_tokens)
    if chosen.json:
        result = {
            "model": chosen.shape or chosen.model,
            "device": device,
            "dtype": job.dtype,
            "num_requests": len(job.rows),
            "prompt_tokens": num_prompt_tokens,
            "output_tokens": num_tokens,
            "engines": [asdict(row) for row in rows],
            "left_out": rounds.left_out,
        }
        print(json.dumps(result))
    else:
        print(
            "\n".join(
                [title, *format_table(rows), *(f"left out: {name}: {why}" for name, why in rounds.left_out.items())]
            )
        )
    return 1 if rounds.any_failed else 0


def _say(text: str) -> None:
    print(f"compare: {text}", file=sys.stderr, flush=True)
