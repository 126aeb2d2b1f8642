"""Engines that serve one job after another, as for a folder of outputs."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec

from fake_engine import FakeEngine
from file_jobs import generate
from nvcli.core.config import RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.engine.request import EngineStats
from nvcli.job.progress.display import Progress
from nvcli.job.progress.summary import Summary
from nvcli.job.run.engines import EngineSet


class Jobs:
    """Jobs of three rows each, which share their engines."""

    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = model
        self.started: list[FakeEngine] = []
        self.notes = io.StringIO()
        self.engines = EngineSet(self._start)

    def _start(self, config: EngineConfig) -> FakeEngine:
        self.started.append(FakeEngine(config))
        return self.started[-1]

    def run(self, name: str, **config: object) -> Summary:
        source = self._folder / f"{name}.jsonl"
        rows = [{"prompt": f"{name}{number}", "sampling": {"stop": f"1{name}"}} for number in range(3)]
        source.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        run = msgspec.convert({"model": str(self._model), "device": "cpu", "max_num_seqs": 8, **config}, RunConfig)
        return generate(run, inputs=[str(source)], output=None, progress=Progress(self.notes), engines=self.engines)

    def texts(self, name: str) -> list[str]:
        lines = (self._folder / f"{name}.out.jsonl").read_text().splitlines()
        return sorted(json.loads(line)["choices"][0]["text"] for line in lines)


def test_a_job_uses_the_engines_of_the_one_before_it(tmp_path: Path, model_folder: Path) -> None:
    jobs = Jobs(tmp_path, model_folder)
    jobs.run("a")
    (engine,) = jobs.started
    engine.stats = msgspec.structs.replace(engine.stats, prompt_tokens=50, cached_tokens=20, num_preemptions=1)
    summary = jobs.run("b")
    assert jobs.started == [engine]
    assert (jobs.texts("a"), jobs.texts("b")) == (["", "0a", "2a"], ["", "0b", "2b"])
    ids = [request.request_id for request in engine.requests]
    assert len(set(ids)) == len(ids) == 6  # answers to requests that were aborted may come late
    assert (summary.counts.engine_cached_tokens, summary.counts.engine_total("num_preemptions")) == (0, 0)
    assert jobs.notes.getvalue().count("is ready") == 1
    jobs.engines.close()
    assert engine.closed


def test_engines_that_do_not_fit_are_started_anew(tmp_path: Path, model_folder: Path) -> None:
    jobs = Jobs(tmp_path, model_folder)
    jobs.run("a")
    jobs.run("b", max_num_seqs=4)
    assert [engine.closed for engine in jobs.started] == [True, False]
    jobs.engines.are_sound = False  # as when a copy has died and the others went on
    jobs.run("c", max_num_seqs=4)
    assert [engine.closed for engine in jobs.started] == [True, True, False]
    jobs.engines.close()


def test_statistics_since_an_earlier_job() -> None:
    before = EngineStats(prompt_tokens=50, cached_tokens=20, num_running=3, kv_bytes_saved=7, drafted=(8, 4))
    now = EngineStats(prompt_tokens=60, cached_tokens=25, num_running=2, kv_bytes_saved=7, drafted=(9, 6))
    assert now.since(before) == EngineStats(prompt_tokens=10, cached_tokens=5, num_running=2, drafted=(1, 2))
    assert now.since(EngineStats()) is now
