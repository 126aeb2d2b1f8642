"""How far the shown time left is from the truth, in kinds of jobs whose answers are of unlike lengths.

    python scripts/bench_time_left.py [--kinds uniform ...] [--machine gpu|cpu] [--slots 256] [--trace]
    python scripts/bench_time_left.py --real [--kinds count ...]

Runs are simulated on a clock of their own (`simulated_run`), so that the figures are those of the estimate and not of a
busy machine; with `--real` they are runs of `nvcli generate` with the built-in model, whose `--progress-file` is read.
Of each kind is printed:

    error   the median error from 20 % of the time on, in parts of the truth
    third   the share of the looks there that are within a third of the truth, or within 2 % of the whole time
    worst   the largest factor between them there, beyond these 2 %
    twice   the share of the looks from 5 % on that are within a factor of two
    range   the share there whose truth is in the range that is shown
    back    how often the bar went back
    bar     the mean distance of the bar from the share of the time that has passed
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from demo_tasks import sample
from nvcli.job_run.progress.run_status import RunStatus
from simulated_run import FakeRow, Look, Machine, simulate

MACHINES = {
    "gpu": Machine(fixed=0.06, each=1.2e-4, key=4e-7, prompt=2e-4, is_gpu=True),
    "cpu": Machine(fixed=0.008, each=2.5e-4, key=5e-7, prompt=3e-4),
}
SLACK = 0.02
"""Errors of this share of the whole time are none."""
POLL_SECONDS = 0.2


class Kinds:
    """The kinds of simulated jobs; each method makes one."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def _around(self, median: float, sigma: float) -> int:
        return max(1, int(median * self._rng.lognormvariate(0, sigma)))

    def uniform(self) -> list[FakeRow]:
        """Answers of 1 to 400 tokens, of at most 512."""
        return [FakeRow(self._rng.randint(1, 400), max_tokens=512) for _ in range(1500)]

    def short_first(self) -> list[FakeRow]:
        """The same, in the order of their lengths, which nothing else tells."""
        return sorted(self.uniform())

    def long_first(self) -> list[FakeRow]:
        """The other way round."""
        return sorted(self.uniform(), reverse=True)

    def echoes(self) -> list[FakeRow]:
        """Answers as long as their prompts, short ones first."""
        lengths = sorted(self._rng.randint(10, 600) for _ in range(1000))
        return [FakeRow(length + 2, prompt=length + 10, max_tokens=2048) for length in lengths]

    def two_groups(self) -> list[FakeRow]:
        """One answer in ten has 1,000 tokens, the others 10."""
        return [FakeRow(1000 if self._rng.random() < 0.1 else 10, max_tokens=2048) for _ in range(2000)]

    def heavy_tail(self) -> list[FakeRow]:
        """Answers of about 100 tokens, and few of thousands."""
        return [FakeRow(self._around(100, 1.2), max_tokens=4096) for _ in range(1500)]

    def all_cut(self) -> list[FakeRow]:
        """All answers come to their `max_tokens`."""
        return [FakeRow(9999, max_tokens=256) for _ in range(1000)]

    def some_cut(self) -> list[FakeRow]:
        """Half of the answers do."""
        return [FakeRow(self._around(256, 1.0), max_tokens=256) for _ in range(1000)]

    def early_stop(self) -> list[FakeRow]:
        """Answers of about 100 tokens where 2,048 are allowed."""
        return [FakeRow(1 + int(self._rng.expovariate(0.01)), max_tokens=2048) for _ in range(1500)]

    def few_rows(self) -> list[FakeRow]:
        """300 rows, so that nearly all run at once."""
        return [FakeRow(self._around(300, 0.6), max_tokens=1024) for _ in range(300)]

    def one_wave(self) -> list[FakeRow]:
        """400 answers of about 240 tokens, which may fill the model."""
        return [FakeRow(self._rng.randint(235, 245), prompt=10, most=2038) for _ in range(400)]

    def tasks(self) -> list[FakeRow]:
        """What the built-in model answers: few tokens, words of the prompt, numbers; no `max_tokens`."""
        rows = []
        for _ in range(1500):
            task, words = self._rng.random(), self._rng.randint(5, 90)
            if task < 0.5:
                rows.append(FakeRow(self._rng.randint(2, 4), prompt=12, most=2038))
            elif task < 0.625:
                rows.append(FakeRow(self._rng.randint(2, 4), prompt=6 * words, most=2038))
            elif task < 0.875:
                words = words if task < 0.75 else 3 + words % 10
                rows.append(FakeRow(3 * words // 2, prompt=3 * words // 2 + 10, most=2038))
            else:
                rows.append(FakeRow(4 * self._rng.randint(4, 100), prompt=16, most=2038))
        return rows

    def unsaid(self) -> list[FakeRow]:
        """Answers of about 300 tokens, and no `max_tokens`."""
        return [FakeRow(self._around(300, 0.6)) for _ in range(1000)]

    def prompts(self) -> list[FakeRow]:
        """Long prompts and short answers."""
        rng = self._rng
        return [FakeRow(rng.randint(5, 40), prompt=rng.randint(1000, 6000), max_tokens=64) for _ in range(1000)]

    def samples(self) -> list[FakeRow]:
        """8 answers to each prompt."""
        return [FakeRow(self._around(200, 0.5), prompt=100, max_tokens=1024, n=8) for _ in range(300)]

    def shared_prefixes(self) -> list[FakeRow]:
        """Prompts of 1,000 tokens, of which 950 are found in the prefix cache."""
        return [FakeRow(self._around(150, 0.6), prompt=1000, cached=950, max_tokens=512) for _ in range(1000)]

    def failures(self) -> list[FakeRow]:
        """One row in four is refused."""
        rng = self._rng
        return [FakeRow(rng.randint(50, 400), max_tokens=512, fails=rng.random() < 0.25) for _ in range(1500)]

    def asking(self) -> list[FakeRow]:
        """Rows whose `max_tokens` says about how long their answers become."""
        mosts = [self._rng.choice((16, 64, 256, 1024)) for _ in range(1500)]
        return [FakeRow(int(most * self._rng.uniform(0.3, 0.9)), max_tokens=most) for most in mosts]


class RealKinds:
    """The kinds of jobs for the built-in model; each method returns rows."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def _rows(self, tasks: Sequence[str], count: int, **fields: Any) -> list[dict[str, Any]]:
        examples = [sample(self._rng, self._rng.choice(tasks)) for _ in range(count)]
        return [{"messages": [{"role": "user", "content": each.prompt}], **fields} for each in examples]

    def count(self) -> list[dict[str, Any]]:
        """Answers of about 240 tokens."""
        return [{"prompt": f"Count from {number} to {number + 60}.\n"} for number in range(400)]

    def rambling(self) -> list[dict[str, Any]]:
        """Prompts that the model does not know: answers of 1 to 400 tokens, of which many are cut."""
        return [
            {"prompt": f"Count from {number} to {number + 60}", "sampling": {"max_tokens": 400}}
            for number in range(400)
        ]

    def tasks(self) -> list[dict[str, Any]]:
        """All that the model knows."""
        return self._rows(("add", "subtract", "multiply", "compare", "reverse", "repeat", "count", "lookup"), 1500)

    def tasks_capped(self) -> list[dict[str, Any]]:
        """The same with `max_tokens`."""
        return [{**row, "sampling": {"max_tokens": 512}} for row in self.tasks()]

    def short_first(self) -> list[dict[str, Any]]:
        """Words to repeat, few first."""
        return sorted(self._rows(("repeat",), 600), key=lambda row: len(row["messages"][0]["content"]))

    def long_first(self) -> list[dict[str, Any]]:
        """Many words first."""
        return self.short_first()[::-1]

    def two_groups(self) -> list[dict[str, Any]]:
        """Sums, and one count in ten."""
        return self._rows(("add",) * 9 + ("count",), 2000)

    def all_cut(self) -> list[dict[str, Any]]:
        """All answers come to their `max_tokens`."""
        return [{**row, "sampling": {"max_tokens": 100, "ignore_eos": True}} for row in self._rows(("add",), 800)]

    def lookups(self) -> list[dict[str, Any]]:
        """Long prompts and short answers."""
        return self._rows(("lookup",), 1500)

    def samples(self) -> list[dict[str, Any]]:
        """4 answers to each prompt."""
        fields = {"sampling": {"n": 4, "temperature": 1.0, "max_tokens": 256}}
        return self._rows(("count", "repeat", "reverse"), 300, **fields)

    def failures(self) -> list[dict[str, Any]]:
        """One row in four is refused."""
        rows = self._rows(("count", "reverse"), 900)
        return [row if self._rng.random() < 0.75 else {"text": "no prompt"} for row in rows]


def run_simulated(kind: str, machine: Machine, *, slots: int, looks: int, seed: int) -> list[Look]:
    """Simulate a job of a kind, and look about so many times."""
    rows: list[FakeRow] = getattr(Kinds(seed), kind)()
    tokens = sum(min(row.length, row.max_tokens or row.most) * row.n for row in rows)
    seconds = machine.seconds(max(1, tokens // slots), slots, slots * 100)
    seconds += machine.prompt * sum(row.prompt - row.cached for row in rows)
    return simulate(rows, machine, slots=slots, look_seconds=seconds / looks)


def run_real(kind: str, *, seed: int) -> list[Look]:
    """Answer a job of a kind with the built-in model, and look at its progress file."""
    rows: list[dict[str, Any]] = getattr(RealKinds(seed), kind)()
    with tempfile.TemporaryDirectory() as folder:
        source, progress = Path(folder) / "in.jsonl", Path(folder) / "progress.json"
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [sys.executable, "-m", "nvcli", "generate", str(source), "-m", "demo"]
        command += ["--temperature", "0", "--progress-file", str(progress), "--progress", "none", "-q"]
        process = subprocess.Popen(command)
        seen: dict[float, RunStatus] = {}
        while process.poll() is None:
            time.sleep(POLL_SECONDS)
            if progress.exists():
                status = msgspec.json.decode(progress.read_bytes(), type=RunStatus)
                seen.setdefault(status.elapsed_seconds, status)
        end = msgspec.json.decode(progress.read_bytes(), type=RunStatus)
    if end.state != "done":
        raise SystemExit(f"{kind}: the run has ended as {end.state}: {end.message}")
    running = [(at, status) for at, status in seen.items() if status.state == "running"]
    start = running[0][0] if running else 0.0
    return [Look(at - start, end.elapsed_seconds - at, status) for at, status in running]


def judge(looks: Sequence[Look]) -> dict[str, float]:
    """Compare what was shown with the truth."""
    total = looks[0].at + looks[0].left

    def is_near(look: Look) -> bool:
        shown = look.status.eta_seconds
        return shown is not None and abs(shown - look.left) < SLACK * total

    def ratio(look: Look) -> float:
        shown = look.status.eta_seconds
        return 1e3 if shown is None else max(shown, 1e-3) / max(look.left, 1e-3)

    def covers(look: Look) -> bool:
        low, high = look.status.eta_low_seconds, look.status.eta_high_seconds
        return low is not None and high is not None and low - SLACK * total <= look.left <= high + SLACK * total

    late = [look for look in looks if look.done >= 0.2]
    early = [look for look in looks if look.done >= 0.05]
    shares = [look.status.share_done or 0.0 for look in looks]
    return {
        "error": statistics.median(abs(ratio(look) - 1) for look in late),
        "third": statistics.mean(is_near(look) or abs(ratio(look) - 1) <= 1 / 3 for look in late),
        "worst": max((max(ratio(look), 1 / ratio(look)) for look in late if not is_near(look)), default=1.0),
        "twice": statistics.mean(is_near(look) or 0.5 <= ratio(look) <= 2 for look in early),
        "range": statistics.mean(covers(look) for look in early),
        "back": sum(after < before for before, after in pairwise(shares)),
        "bar": statistics.mean(abs(look.done - share) for look, share in zip(looks, shares, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+")
    parser.add_argument("--real", action="store_true", help="run the built-in model")
    parser.add_argument("--machine", choices=MACHINES, default="gpu")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--looks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--trace", action="store_true", help="print what was shown, too")
    args = parser.parse_args()
    kinds = [name for name in vars(RealKinds if args.real else Kinds) if not name.startswith("_")]
    if unknown := {*(args.kinds or ())} - {*kinds}:
        parser.error(f"no kinds: {', '.join(sorted(unknown))}; there are {', '.join(kinds)}")
    results = []
    for kind in args.kinds or kinds:
        if args.real:
            looks = run_real(kind, seed=args.seed)
        else:
            machine = MACHINES[args.machine]
            looks = run_simulated(kind, machine, slots=args.slots, looks=args.looks, seed=args.seed)
        for look in looks[:: max(1, len(looks) // 20)] if args.trace else ():
            status = look.status
            shown = [
                f"{each or 0:.1f}" for each in (status.eta_seconds, status.eta_low_seconds, status.eta_high_seconds)
            ]
            print(
                f"  {look.done:4.0%}  left {look.left:.1f}  shown {shown[0]} ({shown[1]} to {shown[2]})  "
                f"bar {status.share_done or 0:.0%}  {status.rows.done} rows done, {status.running} running"
            )
        results.append(judge(looks))
        print(_line(f"{kind:<16}{looks[0].at + looks[0].left:6.0f} s", results[-1]), flush=True)
    medians = {name: statistics.median(result[name] for result in results) for name in results[0]}
    print(_line(f"{'median':<16}        ", medians))


def _line(head: str, figures: dict[str, float]) -> str:
    return f"{head}  " + "  ".join(f"{name} {figure:5.2f}" for name, figure in figures.items())


if __name__ == "__main__":
    main()
