"""The harness of the benchmarks `bench_*.py`: shared options, warm-up, turns, medians, a table and JSON.

A benchmark yields its cases and calls `run_benchmark`. A case returns its figures by column, whose name says the unit.
All cases have one pass before any has its second, so that a machine that changes its speed is the same to all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Figures = Mapping[str, float]
_NAME_WIDTH, _COLUMN_WIDTH = 42, 9


@dataclass(frozen=True, slots=True)
class Case:
    """One line of the table."""

    name: str
    measure: Callable[[int], Figures]
    """Measures once, given the number of the pass, from 0."""
    warm_up: Callable[[], object] | None = None
    """Runs once before the first pass of any case."""


def run_benchmark(
    doc: str | None,
    cases: Callable[[argparse.Namespace, ExitStack], Iterable[Case]],
    add_options: Callable[[argparse.ArgumentParser], object] | None = None,
    *,
    repeat: int = 1,
    compared: str | None = None,
    shows_median: bool = False,
) -> None:
    """Parse the command line, measure the cases, and print their figures.

    `cases` makes the cases from the options; what it enters into the stack is closed at the end. `repeat` is the usual
    number of passes. The column `compared` is also shown as a share of the first case's. With `shows_median` a last
    line has the medians over the cases.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if add_options is not None:
        add_options(parser)
    parser.add_argument("--repeat", type=int, default=repeat, help="passes over all cases [default: %(default)s]")
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="only the cases whose names hold one of these")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures of all passes there")
    options = parser.parse_args()
    with ExitStack() as stack:
        found = measure_cases(
            [
                case
                for case in cases(options, stack)
                if not options.only or any(text in case.name for text in options.only)
            ],
            repeat=options.repeat,
            compared=compared,
        )
    if shows_median and found:
        medians = [_medians(passes) for passes in found.values()]
        columns = [column for column in medians[0] if all(column in each for each in medians)]
        print(_line("median", {column: statistics.median(each[column] for each in medians) for column in columns}))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


def measure_cases(
    cases: Sequence[Case], *, repeat: int = 1, compared: str | None = None, is_shown: bool = True
) -> dict[str, list[Figures]]:
    """Measure the cases in turns, and return the figures of each pass by name. A line is printed for each case."""
    for case in cases:
        if case.warm_up is not None:
            case.warm_up()
    found: dict[str, list[Figures]] = {case.name: [] for case in cases}
    columns: list[str] = []
    for number in range(repeat):
        for case in cases:
            found[case.name].append(case.measure(number))
            if number < repeat - 1 or not is_shown:
                continue
            figures = dict(_medians(found[case.name]))
            if compared is not None:
                first = _medians(found[cases[0].name])
                figures["share"] = figures[compared] / first[compared]
            if columns != list(figures):
                columns = list(figures)
                print(_line("", columns))
            spread = [each[columns[0]] for each in found[case.name]]
            shown = f"  ({_text(min(spread))} to {_text(max(spread))})" if repeat > 1 else ""
            print(_line(case.name, figures) + shown, flush=True)
    return found


def _medians(passes: Sequence[Figures]) -> Figures:
    return {column: statistics.median(each[column] for each in passes) for column in passes[-1]}


def _line(name: str, cells: Figures | Sequence[str]) -> str:
    """Return a line of the table: the figures of a case, or the names of the columns."""
    texts = [_text(cell) for cell in cells.values()] if isinstance(cells, Mapping) else cells
    return f"{name:<{_NAME_WIDTH}}" + "".join(
        f"  {text:>{max(len(column), _COLUMN_WIDTH)}}" for text, column in zip(texts, cells, strict=True)
    )


def _text(figure: float) -> str:
    return f"{figure:,.0f}" if abs(figure) >= 1000 or figure == int(figure) else f"{figure:.4g}"


def wall_seconds(run: Callable[[], object]) -> float:
    """Return the seconds of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def capture(run: Callable[[], object], calls: int = 1) -> torch.cuda.CUDAGraph:
    """Return a CUDA graph of so many calls, after one outside of it."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    return graph


def gpu_microseconds(run: Callable[[], object], calls: int = 20, *, repeats: int = 9) -> float:
    """Return the microseconds of one call: the median over replays of a CUDA graph of `calls` calls.

    So launches cost what they cost in a decode step. Inputs are in the L2 cache where they fit.
    """
    import torch

    graph = capture(run, calls)
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def measure_in_child(script: str, arguments: Sequence[str], lines: Iterable[bytes]) -> dict[str, float]:
    """Run a script anew, feed it `lines` on standard input, and return the figures that it prints as JSON."""
    child = subprocess.Popen([sys.executable, script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def feed() -> None:
        assert child.stdin is not None
        with child.stdin:
            child.stdin.writelines(lines)

    feeder = threading.Thread(target=feed)
    feeder.start()
    assert child.stdout is not None
    report: dict[str, float] = json.loads(child.stdout.read())
    feeder.join()
    if child.wait():
        raise SystemExit(f"{script} {' '.join(arguments)} ended with exit code {child.returncode}")
    return report


def peak_mebibytes() -> float:
    """Return the most memory that this process has held: `ru_maxrss` starts with what the parent had."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024
