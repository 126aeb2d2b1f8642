"""Measures how far the shown time left is from the truth, in kinds of jobs with answers of unlike lengths.

    python scripts/bench_time_left.py [--kinds uniform ...] [--machine gpu|cpu] [--slots 256] [--trace]

Runs are simulated on a clock of their own (`simulated_run`), so that the figures are those of the estimate and not of a
busy machine. Of each kind is printed:

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
import random
import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise

from benchmark import Case, Figures, run_benchmark
from simulated_run import FakeRow, Look, Machine, simulate

MACHINES = {
    "gpu": Machine(fixed=0.06, each=1.2e-4, key=4e-7, prompt=2e-4, is_gpu=True),
    "cpu": Machine(fixed=0.008, each=2.5e-4, key=5e-7, prompt=3e-4),
}
SLACK = 0.02
"""Errors of this share of the whole time are none."""


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
        """Answers as the built-in model gives them: few tokens, words of the prompt, numbers; no `max_tokens`."""
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


def run_simulated(kind: str, machine: Machine, *, slots: int, looks: int, seed: int) -> list[Look]:
    """Simulate a job of a kind, and look about so many times."""
    rows: list[FakeRow] = getattr(Kinds(seed), kind)()
    tokens = sum(min(row.length, row.max_tokens or row.most) * row.n for row in rows)
    seconds = machine.seconds(max(1, tokens // slots), slots, slots * 100)
    seconds += machine.prompt * sum(row.prompt - row.cached for row in rows)
    return simulate(rows, machine, slots=slots, look_seconds=seconds / looks)


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


def trace(looks: Sequence[Look]) -> None:
    """Print what was shown at twenty moments."""
    for look in looks[:: max(1, len(looks) // 20)]:
        status = look.status
        eta, low, high = (each or 0 for each in (status.eta_seconds, status.eta_low_seconds, status.eta_high_seconds))
        print(
            f"  {look.done:4.0%}  left {look.left:.1f}  shown {eta:.1f} ({low:.1f} to {high:.1f})  "
            f"bar {status.share_done or 0:.0%}  {status.rows.done} rows done, {status.running} running"
        )


def measure(kind: str, options: argparse.Namespace, number: int) -> Figures:
    machine = MACHINES[options.machine]
    looks = run_simulated(kind, machine, slots=options.slots, looks=options.looks, seed=options.seed + number)
    if options.trace:
        trace(looks)
    return {"seconds": looks[0].at + looks[0].left, **judge(looks)}


def cases(options: argparse.Namespace, stack: ExitStack) -> Iterator[Case]:
    for kind in options.kinds:
        yield Case(kind, partial(measure, kind, options))


def add_options(parser: argparse.ArgumentParser) -> None:
    kinds = [name for name in vars(Kinds) if not name.startswith("_")]
    parser.add_argument("--kinds", nargs="+", default=kinds, choices=kinds)
    parser.add_argument("--machine", choices=MACHINES, default="gpu")
    parser.add_argument("--slots", type=int, default=256)
    parser.add_argument("--looks", type=int, default=100)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--trace", action="store_true", help="print what was shown, too")


if __name__ == "__main__":
    run_benchmark(__doc__, cases, add_options, shows_median=True)
