"""Fits the coefficients by which launches of products with FP8 weights are chosen
(`kernels/triton/products/launch_rule.py`).

It reads what `measure_launches.py` wrote on a GPU, fits half of the weights' shapes, writes `launch_times.json`, and
says of the other half how much longer the chosen launches take than the fastest that were measured. It needs no GPU.

A GPU is slower under sustained load, for all launches alike: times of many rows are divided by how much longer than
estimated the launches of a product take in the middle. Times near the fastest of their product count most.
"""

from __future__ import annotations

import argparse
import json
import lzma
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nvcli.kernels.triton.products import launch_rule
from nvcli.kernels.triton.products.launch_rule import (
    Coefficients,
    Counts,
    Kind,
    Times,
    TorchLaunch,
    count,
    fastest,
    microseconds,
    read_launch,
    read_times,
    rounded,
)
from nvcli.kernels.triton.products.product_launch import DecodeLaunch, HopperFP8Launch, ProductLaunch

KEPT: dict[str, list[str]] = json.loads(Path(__file__).with_name("launches.json").read_text())["kept"]
"""The launches that there are; without any other one that was measured products take 0.3 % longer on average."""
START = (
    (3.0, 0.25, 0.3, 0.2, 1.0, 1.0, 0.5),
    (3.0, 0.2, 0.6, 0.3, 1.0, 1.0, 0.5),
    (5.0, 0.25, 0.1, 0.1, 0.3, 1.0, 0.5),
)
"""Coefficients that a fit begins with; the best end counts."""
LEAST, MOST = 1e-4, 1e3
NEAR = 0.15
"""Times that are longer than the fastest by this share count half."""
OUTLIER = 0.08
REFERENCE = "hopper,2,2,2"
SUSTAINED_ROWS = 1024
"""With more rows a GPU is slower."""
WHOLE_ROWS = 128

Floats = NDArray[np.float64]
Shape = tuple[int, int]


class Point(NamedTuple):
    """A product and what its launches take."""

    kind: Kind
    rows: int
    shape: Shape
    us: dict[str, float]
    rest_us: float
    """The part of all times that is behind the product, whatever its launch."""

    def counts(self, name: str, num_sms: int) -> Counts:
        return count(read_launch(name), self.kind, self.rows, *self.shape, num_sms)

    def may_take(self, name: str) -> bool:
        """Whether the rule considers such a launch."""
        is_whole = self.rows % WHOLE_ROWS == 0 or self.rows > SUSTAINED_ROWS
        return is_whole or not name.startswith("torch") or self.kind == "block"


class Measured(NamedTuple):
    gpu: dict[str, Any]
    """The facts about the GPU."""
    points: list[Point]
    long: list[Point]
    """Points measured under sustained load."""
    activations: list[tuple[float, float]]
    """Their megabytes and microseconds."""


def read(paths: Iterable[Path]) -> Measured:
    measured = Measured({}, [], [], [])
    for path in paths:
        with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as lines:
            measured.gpu.update(json.loads(next(lines)))
            for line in map(json.loads, lines):
                us, rows = line["us"], line["rows"]
                if "activate" in us and rows >= WHOLE_ROWS and not line["long"]:
                    measured.activations.append((rows * line["out"] * 2.5e-6, us["activate"]))
                times = {name: time for name, time in us.items() if name not in ("norm", "activate")}
                point = Point(line["kind"], rows, (line["out"], line["in"]), times, us.get("norm", 0.0))
                if times:
                    (measured.long if line["long"] else measured.points).append(point)
    return measured


def kernel_of(name: str) -> str:
    """Return the name of a launch without its number of parts."""
    return name.rpartition(",")[0] if name.startswith(("linear", "decode")) else name


def fit_launch(samples: Sequence[tuple[Point, str, float]], num_sms: int) -> Coefficients:
    """Fit the coefficients of a launch to the times of points, by Levenberg and Marquardt, in logarithms."""
    rows = [point.counts(name, num_sms) for point, name, _ in samples]
    counts = Counts(*np.array(rows, dtype=float).T)
    times = np.array([time for *_, time in samples])
    excess = [point.us[name] / min(point.us.values()) - 1 for point, name, _ in samples]
    weights = 1 / (1 + (np.array(excess) / NEAR) ** 2) + 0.02

    def errors(logs: Floats) -> Floats:
        return np.asarray(np.log(microseconds(counts, Coefficients(*np.exp(logs))) / times))

    def cost(found: Floats) -> float:
        size = np.abs(found)
        return float(np.sum(weights * np.where(size < OUTLIER, found**2 / 2, OUTLIER * (size - OUTLIER / 2))))

    ends = [_descend(errors, cost, weights, np.log(np.array(start))) for start in START]
    best = min(ends, key=lambda logs: cost(errors(logs)))
    numbers = np.exp(best)
    if not np.any(counts.megaparts):
        numbers[-1] = 0.0
    if not np.any(counts.ragged_steps):
        numbers[-2] = 0.0
    return Coefficients(*(float(f"{number:.4g}") if number > 2 * LEAST else 0.0 for number in numbers))


def _descend(errors: Any, cost: Any, weights: Floats, logs: Floats) -> Floats:
    damping, found, size = 1e-2, errors(logs), 1e-4
    for _ in range(100):
        steps = size * np.eye(len(logs))
        slopes = np.stack([(errors(logs + step) - found) / size for step in steps], 1)
        weighed = weights * np.where(np.abs(found) < OUTLIER, 1, OUTLIER / np.maximum(np.abs(found), 1e-9))
        curvature, gradient = (slopes * weighed[:, None]).T @ slopes, (slopes * weighed[:, None]).T @ found
        before = cost(found)
        for _ in range(10):
            damped = curvature + np.diag(damping * (np.diag(curvature) + 1e-6))
            step = np.clip(np.linalg.solve(damped, -gradient), -1, 1)
            moved = np.clip(logs + step, np.log(LEAST), np.log(MOST))
            if cost(errors(moved)) < before:
                logs, found, damping = moved, errors(moved), max(damping / 3, 1e-6)
                break
            damping *= 4
        if before - cost(found) < 1e-9 * before:
            break
    return logs


def fit(
    points: Sequence[Point], kept: Sequence[str], num_sms: int, slowdowns: dict[tuple[int, Shape], float]
) -> dict[str, Coefficients]:
    """Fit all launches: first to few rows, by which one knows how much slower the GPU was with many, then to all.

    `slowdowns` holds that, by rows and shapes, for other kinds of products of the same.
    """

    def fit_all(some: Sequence[Point]) -> dict[str, Coefficients]:
        samples = defaultdict(list)
        for point in some:
            for name, time in point.us.items():
                if kernel_of(name) in kept and point.may_take(name) and time > point.rest_us + 0.5:
                    samples[kernel_of(name)].append((point, name, time - point.rest_us))
        return {name: fit_launch(samples[name], num_sms) for name in kept}

    few = [point for point in points if point.rows <= SUSTAINED_ROWS]
    times = fit_all(few)

    def evened(point: Point) -> Point:
        names = [name for name in point.us if kernel_of(name) in kept]
        estimates = {name: float(microseconds(point.counts(name, num_sms), times[kernel_of(name)])) for name in names}
        slowdown = float(np.median([point.us[name] / estimates[name] for name in names]))
        slowdown = slowdowns.setdefault((point.rows, point.shape), slowdown)
        return point._replace(us={name: time / slowdown for name, time in point.us.items()})

    # The norm behind a sum is slowed down otherwise.
    return fit_all(few + [evened(point) for point in points if point.rows > SUSTAINED_ROWS and point.kind != "sum"])


def fit_sustained(
    long: Sequence[Point], times: dict[str, Coefficients], num_sms: int, references: dict[Shape, float]
) -> dict[str, Coefficients]:
    """Compare what launches take under sustained load with `REFERENCE`, whose ratio of times to estimates `references`
    holds for each shape."""
    ratios = defaultdict(list)
    for point in long:
        of_point = {
            name: time / float(microseconds(point.counts(name, num_sms), times[name]))
            for name, time in point.us.items()
            if name in times
        }
        reference = references.setdefault(point.shape, of_point.get(REFERENCE, 1.0))
        for name, ratio in of_point.items():
            ratios[name].append(ratio / reference)
    means = {name: float(f"{np.mean(found):.4g}") for name, found in ratios.items()}
    return {name: of._replace(sustained=means.get(name, 1.0)) for name, of in times.items()}


def fit_activation(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit a launch and a megabyte, by relative errors."""
    megabytes, times = np.array(samples).T
    columns = np.stack([1 / times, megabytes / times], 1)
    fixed, of_bytes = np.linalg.lstsq(columns, np.ones(len(times)), rcond=None)[0]
    return float(f"{fixed:.4g}"), float(f"{of_bytes:.4g}")


def report(name: str, points: Sequence[Point], times: Times, gpu: dict[str, Any]) -> None:
    """Print by what share the launches that the rule chooses take longer than the fastest ones."""
    lost = []
    for point in points:
        us = {read_launch(launch): time for launch, time in point.us.items() if not launch.endswith((",fast", ",0"))}
        kernels: tuple[type, ...] = (ProductLaunch, DecodeLaunch, HopperFP8Launch)
        if point.may_take("torch") and (point.kind != "block" or TorchLaunch("block") in us):
            kernels += (TorchLaunch,)
        of_gpu = (gpu["multiprocessors"], times.bandwidth / gpu["bandwidth"])
        product = (rounded(point.rows), *point.shape)
        _, launch = fastest(times, point.kind, *product, *of_gpu, "exact", kernels)
        assert launch is not None
        lost.append((us[launch] / min(us.values()) - 1) * 100)
    print(
        f"{name}: {len(lost)} products, % longer than the fastest: mean {np.mean(lost):.1f}, median "
        f"{np.median(lost):.1f}, 90th percentile {np.quantile(lost, 0.9):.1f}, worst {max(lost):.1f}; "
        f"{np.mean(np.array(lost) <= 5) * 100:.0f} % within 5 %"
    )


def fit_file(measured: Measured, fitted: set[Shape]) -> dict[str, Any]:
    """Return what is to be written to `launch_times.json`, by the weights' shapes in `fitted`."""
    data: dict[str, Any] = {"gpu": measured.gpu["gpu"], "bandwidth": measured.gpu["bandwidth"]}
    slowdowns: dict[tuple[int, Shape], float] = {}
    references: dict[Shape, float] = {}
    for group, kept in KEPT.items():
        kinds = ("channel", "sum") if group == "channel" else (group,)
        points = [point for point in measured.points if point.kind in kinds and point.shape in fitted]
        num_sms = measured.gpu["multiprocessors"]
        times = fit(points, kept, num_sms, slowdowns if group != "block" else {})
        long = [point for point in measured.long if point.kind in kinds]
        data[group] = fit_sustained(long, times, num_sms, references)
    data["activation"] = fit_activation(measured.activations)
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", type=Path, nargs="+", help="files of measure_launches.py, of one GPU")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--write", action="store_true", help="write launch_times.json")
    group.add_argument("--check", action="store_true", help="fit nothing: say how launch_times.json does on this GPU")
    arguments = parser.parse_args()
    measured = read(arguments.measured)
    shapes = sorted({point.shape for point in measured.points})
    random.Random(1).shuffle(shapes)
    fitted = set() if arguments.check else set(shapes[: len(shapes) // 2])
    path = Path(launch_rule.__file__).with_name("launch_times.json")
    data = json.loads(path.read_text()) if arguments.check else fit_file(measured, fitted)
    for kind in ("channel", "sum", "block"):
        points = [point for point in measured.points if point.kind == kind and point.shape not in fitted]
        report(kind, points, read_times(data), measured.gpu)
    if arguments.write:
        path.write_text(_to_json(data))


def _to_json(data: dict[str, Any]) -> str:
    """Write a line for each launch."""
    lines = []
    for key, value in data.items():
        if isinstance(value, dict):
            launches = ",\n".join(f"    {json.dumps(name)}: {json.dumps(list(of))}" for name, of in value.items())
            lines.append(f"  {json.dumps(key)}: {{\n{launches}\n  }}")
        else:
            lines.append(f"  {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
