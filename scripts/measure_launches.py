"""Measures products with FP8 weights on a GPU, in every launch that may be chosen.

`measure FILE` runs the products of the linear layers of many models, whole and as tensor parallelism cuts them, with
few and many rows, and writes a line of JSON for each product and number of rows: the microseconds of each launch. What
comes behind a product and depends on its launch is measured with it: the norm that adds up parts, and the activation.

Weights come from memory, as in a step: each launch of a CUDA graph has another one, and the L2 cache holds none of
them. The launches of a product take turns. Those of many rows are measured one after the other and again, so that the
GPU's power limits them as in long prompts. Shapes come in random order: what is written when time runs out is a sample.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from nvcli.kernels import fp8, fp8_block_product
from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.kernels.fp8_types import FP8, QuantisedRows
from nvcli.kernels.triton.elementwise import fp8 as fp8_kernels
from nvcli.kernels.triton.elementwise import norm
from nvcli.kernels.triton.products import fp8_linear, hopper_fp8, hopper_fp8_decode, launch_rule
from nvcli.kernels.triton.products.product_launch import DecodeLaunch, HopperFP8Launch
from nvcli.tools.bench.shapes import SHAPES

MODELS = (
    *("qwen3-0.6b", "qwen3-4b", "qwen3-8b", "qwen3-14b", "qwen3-32b", "llama-3.1-8b", "llama-3.1-70b", "gemma-3-27b"),
    *("gpt-oss-20b", "qwen3-30b-a3b"),
)
_SIZES = ("hidden_size", "num_attention_heads", "num_key_value_heads")
RANKS = (1, 2, 4, 8)
FEW_ROWS = (1, 16, 32, 64, 128, 256, 320, 512, 1024)
MANY_ROWS = (2048, 4096, 8192)
MORE_ROWS = (8, 24, 48, 96, 192, 384, 768)

TRIED: dict[str, list[list[int]]] = json.loads(Path(__file__).with_name("launches.json").read_text())["tried"]
"""By kind of product: tiles of rows, features and input features, stages and warps."""
DECODE = (32, 64, 128, 256)
NUM_PARTS = (1, 2, 3, 4)
HOPPER = ((2, 1, 1), (3, 1, 1), (2, 2, 2), (2, 2, 0))
"""Groups, blocks, and tiles of a unit; 0: all."""

SUSTAINED = (
    ("channel", (6144, 4096)),
    ("gated", (24576, 4096)),
    ("channel", (24576, 4096)),
    ("channel", (5120, 17408)),
    ("channel", (7168, 5120)),
)
"""Products that are measured for longer, one after the other: power limits a GPU after a while."""
POOL_BYTES = 2 << 30
CACHE_BYTES = 160 << 20
Kind = str
Shape = tuple[int, int]
Case = tuple[Kind, str, int]
"""A kind, a launch, and how many features compiling it depends on, or 0."""
Call = Callable[[Tensor], object]


class Data(NamedTuple):
    """Numbers that all products are cut from."""

    weights: Tensor
    codes: Tensor
    values: Tensor
    scales: Tensor


def make_data(device: torch.device, weight_bytes: int, value_count: int) -> Data:
    def numbers(count: int) -> Tensor:
        step = 1 << 26
        pieces = [torch.randn(min(step, count - i), device=device) * 64 for i in range(0, count, step)]
        return torch.cat([piece.clamp_(-448, 448).to(FP8).view(torch.uint8) for piece in pieces]).view(FP8)

    return Data(
        numbers(weight_bytes),
        numbers(value_count),
        torch.randn(value_count * 2, device=device, dtype=torch.bfloat16),
        torch.rand(1 << 24, device=device) * 1e-3 + 1e-4,
    )


def shapes() -> dict[Kind, list[Shape]]:
    """Return the output and input features of the weights of each kind."""
    found: dict[Kind, set[Shape]] = {"channel": set(), "sum": set(), "gated": set(), "block": set()}
    for config in map(SHAPES.__getitem__, MODELS):
        hidden, heads, kv_heads = (config[name] for name in _SIZES)
        size = config.get("head_dim", hidden // heads)
        has_experts = "num_experts_per_tok" in config
        features = 0 if has_experts else config["intermediate_size"]
        for ranks in RANKS:
            kv = max(1, kv_heads // ranks)
            found["channel"].add(((heads // ranks + 2 * kv) * size, hidden))
            behind = [(hidden, heads // ranks * size)]
            if features:
                found["channel"].add((2 * features // ranks, hidden))
                found["gated"].add((2 * features // ranks, hidden))
                behind.append((hidden, features // ranks))
            found["sum" if ranks == 1 else "channel"].update(behind)
    found["channel"] |= found["sum"]
    found["block"] = {shape for shape in found["channel"] if not any(n % 128 for n in shape)}
    found["gated"] = {(out, inner) for out, inner in found["gated"] if out % 256 == 0}
    lists = {kind: sorted(some) for kind, some in found.items()}
    generator = random.Random(0)
    for some in lists.values():
        generator.shuffle(some)
    lists["gated"] = lists["gated"][:16]
    lists["block"] = lists["block"][:48]
    return lists


def launches(kind: Kind, num_rows: int) -> Iterator[str]:
    """Yield the launches that are worth a try, and what has to be known beside them."""

    def fits(row_tile: int, most_tiles: int) -> bool:
        return row_tile <= max(32, 2 * num_rows - 1) and num_rows <= most_tiles * row_tile

    if kind == "gated":
        yield "activate"
        if num_rows >= 128:
            yield from ("hopper,2,2,2", "hopper,2,2,0")
        return
    for launch in TRIED[kind]:
        is_largest = launch[:2] in ([128, 128], [64, 128])
        if fits(launch[0], 4) or (is_largest and fits(launch[0], 128 if kind == "block" else 8)):
            for parts in NUM_PARTS if kind == "sum" else (1,):
                yield ",".join(map(str, ("linear", *launch, parts)))
    if kind != "block":
        for row_tile in DECODE:
            if fits(row_tile, 4):
                for parts in NUM_PARTS if kind == "sum" else (1,):
                    yield f"decode,{row_tile},{parts}"
    if num_rows >= 192:
        for groups, blocks, unit in HOPPER:
            if kind != "block" or (blocks, unit) == (1, 1):
                yield f"hopper,{groups},{blocks},{unit}"
    if kind != "block":
        yield from ("torch,exact", "torch,fast")
    elif num_rows % 128 == 0:
        yield "torch,block"
    if kind == "sum":
        yield "norm"


def product(kind: Kind, name: str, data: Data, num_rows: int, shape: Shape) -> Call:
    """Return what multiplies by a weight, in the launch that is named."""
    out_features, in_features = shape
    codes = data.codes[: num_rows * in_features].view(num_rows, in_features)
    if kind == "block":
        groups, strips = -(-in_features // 128), -(-out_features // 128)
        x = QuantisedRows(codes, data.scales[: num_rows * groups].view(num_rows, groups), torch.bfloat16)
        scales = data.scales[: strips * groups].view(strips, groups)
    else:
        x, scales = QuantisedRows(codes, data.scales[:num_rows], torch.bfloat16), data.scales[:out_features]
    sort, *words = name.split(",")
    multiply: Callable[[Tensor], Any]
    if sort == "linear":
        launch = launch_rule.read_launch(name)
        multiply = partial(_in_place, fp8_linear.fp8_linear, x, scales, launch)
    elif sort == "decode":
        multiply = partial(_in_place, hopper_fp8_decode.linear, x, scales, DecodeLaunch(*map(int, words)))
    elif sort == "hopper":
        groups, blocks, unit = map(int, words)
        hopper: Callable[..., object] = hopper_fp8.linear
        if kind == "gated":
            hopper = partial(hopper_fp8.gated_linear, activation=ExpertActivation())
        multiply = partial(_in_place, hopper, x, scales, HopperFP8Launch(groups, blocks, unit or None))
    elif name == "torch,block":
        multiply = partial(_in_place_of_three, fp8_block_product.block_product, x, scales)
    elif sort == "torch":
        multiply = partial(_by_torch, x, scales, words[0])
    elif sort == "activate":
        gate_up = data.values[: num_rows * out_features].view(num_rows, out_features)
        return lambda weight: fp8_kernels.activate_and_quantise(gate_up, "silu", "channel")
    else:
        delta = data.values[: num_rows * out_features].view(num_rows, out_features)
        multiply = partial(_same, delta)
    if kind != "sum":
        return multiply
    first = len(data.values) // 2
    residual = data.values[first : first + num_rows * out_features].view(num_rows, out_features)
    norm_weight = data.values[:out_features]
    return lambda weight: norm.norm_and_quantise(
        multiply(weight), residual, norm_weight, 1e-6, "channel", is_centered=False
    )


def _in_place(function: Callable[..., Any], x: QuantisedRows, scales: Tensor, launch: object, weight: Tensor) -> Any:
    return function(x, weight, scales, launch)


def _by_torch(x: QuantisedRows, scales: Tensor, accumulation: Any, weight: Tensor) -> Tensor:
    return fp8._scaled_product(x, weight, scales, None, accumulation)


def _in_place_of_three(function: Callable[..., Any], x: QuantisedRows, scales: Tensor, weight: Tensor) -> Any:
    return function(x, weight, scales)


def _same(delta: Tensor, weight: Tensor) -> Tensor:
    return delta


def cases() -> list[Case]:
    """Return what there is to compile, the slowest first."""
    of_kind = shapes()
    found: set[Case] = set()
    for kind in of_kind:
        names = {name for rows in (*FEW_ROWS, *MANY_ROWS) for name in launches(kind, rows)}
        for name in names:
            sort, *words = name.split(",")
            if sort in ("linear", "decode", "hopper"):
                has_parts = kind == "sum" and sort != "hopper" and words[-1] != "1"
                if has_parts:  # their number is not compiled into the kernel
                    name = ",".join((sort, *words[:-1], "2"))
                found.add(("channel" if kind == "sum" and not has_parts else kind, name, 0))
    # What comes behind depends on its features.
    for out in {out for out, _ in of_kind["sum"]}:
        found.add(("sum", "norm", out))
        found |= {("sum", f"linear,16,64,128,8,4,{parts}", out) for parts in NUM_PARTS[1:]}
    for out, _ in of_kind["gated"]:
        found |= {("gated", "activate", out), ("gated", "hopper,2,2,2", out)}
    order = ("hopper", "decode", "linear", "activate", "norm")

    def rank(case: Case) -> tuple[int, ...]:
        sort, *words = case[1].split(",")
        return (min(case[2], 1), order.index(sort), -int(words[0]) if words else 0)

    return sorted(found, key=rank)


def _compile(case: Case) -> tuple[Case, float, float]:
    """Run a small product once, which compiles it into Triton's cache on disk. Return the seconds, and for plain
    products the relative error."""
    begin = time.monotonic()
    kind, name, features = case
    device = torch.device("cuda")
    out_features = features or 768
    num_rows = 200 if kind == "gated" or name.startswith("hopper") else 40
    data = make_data(device, out_features * 1280, num_rows * max(out_features, 1280))
    weight = data.weights[: out_features * 1280].view(out_features, 1280)
    result = product(kind, name, data, num_rows, (out_features, 1280))(weight)
    torch.cuda.synchronize()
    error = 0.0
    if isinstance(result, Tensor) and name != "activate":
        if kind == "channel":
            x = data.codes[: num_rows * 1280].view(num_rows, 1280).float() * data.scales[:num_rows, None]
            expected = x @ (weight.float() * data.scales[:out_features, None]).t()
        else:
            groups = 10
            scales = data.scales[: num_rows * groups].view(num_rows, groups).repeat_interleave(128, 1)
            of_weight = data.scales[: out_features // 128 * groups].view(-1, groups)
            spread = of_weight.repeat_interleave(128, 0).repeat_interleave(128, 1)
            x = data.codes[: num_rows * 1280].view(num_rows, 1280).float() * scales
            expected = x @ (weight.float() * spread).t()
        error = float((result.float() - expected).norm() / expected.norm())
    return case, time.monotonic() - begin, error


def compile_all(seconds: float, processes: int) -> set[str]:
    """Compile all launches in parallel. Return the names of those that failed or are wrong."""
    end = time.monotonic() + seconds
    pool = multiprocessing.get_context("fork").Pool(processes)
    waiting = {case: pool.apply_async(_compile, (case,)) for case in cases()}
    failed = set()
    for case, result in waiting.items():
        try:
            _, took, error = result.get(max(0.1, end - time.monotonic()))
            print(f"compiled {case} in {took:.1f} s, error {error:.5f}", flush=True)
            if not error < 0.02:
                failed.add(case[1])
        except Exception as problem:  # whatever it is, the others are measured
            print(f"FAILED {case}: {type(problem).__name__} {str(problem)[:300]}", flush=True)
            failed.add(case[1] if not case[2] else "")
    pool.terminate()
    failed -= {""}
    return failed if len(failed) < len(waiting) / 2 else set()  # then processes do not share the GPU, or time was short


class Timer:
    """Times launches by CUDA graphs."""

    def __init__(self, data: Data, device: torch.device) -> None:
        self.data, self.device = data, device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle()
        self.first = torch.cuda.CUDAGraph()  # as long as one graph uses a pool, others may
        with torch.cuda.graph(self.first, pool=self.pool, stream=self.stream):
            torch.zeros(1, device=device)
        self.other = torch.zeros(CACHE_BYTES // 4, dtype=torch.int32, device=device)
        self.events = [(_event(), _event()) for _ in range(512)]

    def time(
        self,
        calls: dict[str, Call],
        shape: Shape,
        launch_us: float,
        *,
        round_us: float,
        rounds: int,
        is_flushed: bool = False,
        replays: int = 1,
        warm_replays: int = 0,
    ) -> dict[str, float]:
        """Return the microseconds of each call. `launch_us` estimates them; a replay takes `round_us` for each."""
        size = shape[0] * shape[1]
        step = -(-size // 4096) * 4096
        count = max(1, min(48, int(round_us / launch_us)))
        places = max(1, (len(self.data.weights) - size) // step)
        weights = [self.data.weights[i % places * step :][:size].view(shape) for i in range(count)]
        graphs: dict[str, torch.cuda.CUDAGraph] = {}
        with torch.cuda.stream(self.stream):
            for name, call in calls.items():
                try:
                    call(weights[0])
                    graph = torch.cuda.CUDAGraph()
                    graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                    try:
                        for weight in weights:
                            call(weight)
                    finally:
                        graph.capture_end()
                    graphs[name] = graph
                except Exception as problem:
                    print(f"FAILED {name} {shape}: {type(problem).__name__} {str(problem)[:200]}", flush=True)
            times: dict[str, list[float]] = {name: [] for name in graphs}
            noted: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
            for turn in range(rounds + 1):
                for name, graph in graphs.items():
                    begin, end = self.events[len(noted) % len(self.events)]
                    if is_flushed:
                        self.other.amax()
                    for _ in range(warm_replays):
                        graph.replay()
                    begin.record()
                    for _ in range(replays):
                        graph.replay()
                    end.record()
                    if turn:
                        noted.append((name, begin, end))
            self.stream.synchronize()
        for name, begin, end in noted:
            times[name].append(begin.elapsed_time(end) * 1000 / (count * replays))
        return {name: round(statistics.median(some), 2) for name, some in times.items()}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def estimate_us(num_rows: int, shape: Shape) -> float:
    work = 2 * num_rows * shape[0] * shape[1]
    moved = shape[0] * shape[1] + num_rows * (2 * shape[0] + shape[1])
    return max(4.0, work / 1.1e9, moved / 3.5e6)


def measure(path: Path, seconds: float, processes: int) -> None:
    begin = time.monotonic()
    failed = compile_all(min(80.0, seconds / 3), processes)
    print(f"compiled after {time.monotonic() - begin:.0f} s; left out: {sorted(failed)}", flush=True)
    device = torch.device("cuda")
    data = make_data(device, POOL_BYTES, 8192 * 28672)
    timer = Timer(data, device)
    of_kind = shapes()
    longest = max(map(len, of_kind.values()))
    turns = [(kind, some[i * len(some) // longest]) for i in range(longest) for kind, some in of_kind.items()]
    turns = list(dict.fromkeys(turns))
    with path.open("w") as out:
        properties = torch.cuda.get_device_properties(device)
        out.write(
            json.dumps(
                {
                    "gpu": properties.name,
                    "multiprocessors": properties.multi_processor_count,
                    "bandwidth": launch_rule._bandwidth(device),
                }
            )
            + "\n"
        )
        for rows_of_pass, share in ((FEW_ROWS, 0.62), (MANY_ROWS, 0.86), (MORE_ROWS, 0.97)):
            passed = 0
            for kind, shape in turns:
                if time.monotonic() - begin > share * seconds:
                    break
                for num_rows in rows_of_pass:
                    _measure_point(timer, kind, shape, num_rows, failed, out)
                passed += 1
            print(f"{rows_of_pass}: {passed} of {len(turns)} after {time.monotonic() - begin:.0f} s", flush=True)
            if rows_of_pass == MANY_ROWS:
                for kind, shape in SUSTAINED:
                    if time.monotonic() - begin < 0.92 * seconds:
                        _measure_point(timer, kind, shape, 8192, failed, out, is_long=True)


def _measure_point(
    timer: Timer, kind: Kind, shape: Shape, num_rows: int, failed: set[str], out: TextIO, *, is_long: bool = False
) -> None:
    names = [name for name in launches(kind, num_rows) if name not in failed]
    if kind == "block" and "torch,block" in names and (shape[1] % 512 or not fp8_block_product._is_right(timer.device)):
        names.remove("torch,block")
    calls = {name: product(kind, name, timer.data, num_rows, shape) for name in names}
    is_sustained = num_rows > 1024
    found = timer.time(
        calls,
        shape,
        estimate_us(num_rows, shape),
        round_us=6000 if num_rows > 4096 else 3000 if is_sustained else 150,
        rounds=2 if is_long else 3 if is_sustained else 5,
        is_flushed=not is_sustained,
        replays=30 if is_long else 1,
        warm_replays=15 if is_long else 0,
    )
    point = {"kind": kind, "rows": num_rows, "out": shape[0], "in": shape[1], "us": found, "long": is_long}
    out.write(json.dumps(point) + "\n")
    out.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--processes", type=int, default=15)
    arguments = parser.parse_args()
    measure(arguments.path, arguments.seconds, arguments.processes)


if __name__ == "__main__":
    main()
