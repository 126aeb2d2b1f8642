#!/usr/bin/env python3
"""What LoRA adapters cost: the output tokens per second of requests with adapters against those of the base model, in
one start of one engine with made-up weights.

    python3 scripts/bench_adapters.py SHAPE [--rank 16] [--quantization TYPE] [--mode batched|merged]
        [--adapters 1,8,64] [--num-requests 256] [--running 256] [--input-len A:B] [--output-len A:B] [--in-order]
        [--passes 2] [--result FILE.json]

A pass gives the requests one of so many adapters each, in turn or with --in-order adapter by adapter, as the planner of
a job would; with --mode merged they are merged into the weights in turn. Passes without adapters come before, between
and after the others, and a ratio is of means. The first pass of each kind is not counted: graphs are captured and
adapters read in it. Its answers are an eighth as long. Each pass says where its time went: how many steps of decode
rows alone, of prompts alone and of both, their seconds, and for how long the device waited.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

import msgspec

from nvcli.core.config import RunConfig
from nvcli.engine.request import Request
from nvcli.engine.step_recorder import StepRecord
from nvcli.job.run.engine_settings import load_checkpoint, resolve_engines
from nvcli.models.config import load_model_config
from nvcli.tools.bench.adapters import write_adapters
from nvcli.tools.bench.command import parse_range
from nvcli.tools.bench.engines import Engines
from nvcli.tools.bench.shapes import SHAPES, write_shape
from nvcli.tools.bench.workload import Workload


def with_adapters(requests: list[Request], num_adapters: int, *, in_order: bool) -> list[Request]:
    """Give the requests adapters; 0: none."""
    if num_adapters == 0:
        return requests
    last = len(requests)
    numbers = (i * num_adapters // last if in_order else i % num_adapters for i in range(last))
    pairs = zip(requests, numbers, strict=True)
    return [msgspec.structs.replace(request, adapter=1 + number) for request, number in pairs]


def steps_of(records: list[StepRecord]) -> str:
    """Describe the steps of a pass."""
    by_mode = defaultdict(list)
    for record in records:
        by_mode[record.mode.name].append(record.seconds)
    kinds = [
        f"{len(seconds)} {mode} {sum(seconds):.2f} s, median {1e3 * statistics.median(seconds):.1f} ms"
        for mode, seconds in by_mode.items()
    ]
    longest = 1e3 * max(record.idle_seconds for record in records)
    waited = sum(record.idle_seconds for record in records)
    return f"{'; '.join(kinds)}; waited {waited:.2f} s, at most {longest:.0f} ms"


def measure(
    engines: Engines, requests: list[Request], mixes: list[int], passes: int, *, in_order: bool
) -> dict[int, float]:
    """Return the mean output tokens per second of each mix, 0: without adapters."""
    rates: dict[int, list[float]] = defaultdict(list)
    short = [msgspec.structs.replace(request, max_tokens=-(-request.max_tokens // 8)) for request in requests]
    for number in range(passes + 1):
        given = requests if number else short
        for mix in (0, *mixes, 0):
            done = engines.run(with_adapters(given, mix, in_order=in_order))
            rate = done.output_tokens / done.seconds
            print(f"{mix:4} adapters: {rate:9,.0f} output tokens/s{'' if number else ' (not counted)'}", flush=True)
            print(f"      {steps_of(done.records[0])}", flush=True)
            if number:
                rates[mix].append(rate)
    return {mix: statistics.mean(of_mix) for mix, of_mix in rates.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--mode", choices=("batched", "merged"), default="batched")
    parser.add_argument("--adapters", default="1,8,64", help="numbers of adapters, each in passes of its own")
    parser.add_argument("--num-requests", type=int, default=256)
    parser.add_argument("--running", type=int, default=256, help="requests that run at a time")
    parser.add_argument("--input-len", default="128")
    parser.add_argument("--output-len", default="128")
    parser.add_argument("--in-order", action="store_true", help="adapter by adapter")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--result", type=Path, help="write the rates and ratios there")
    options = parser.parse_args()
    mixes = [int(mix) for mix in options.adapters.split(",")]
    input_len, output_len = (
        parse_range(f"--{x}", y) for x, y in (("input-len", options.input_len), ("output-len", options.output_len))
    )
    workload = Workload(num_requests=options.num_requests, input_len=input_len, output_len=output_len)
    with tempfile.TemporaryDirectory() as folder:
        path, made_up = Path(folder, "model"), Path(folder, "adapters")
        path.mkdir()
        made_up.mkdir()
        path = write_shape(options.shape, path, quantization=options.quantization)
        lora = write_adapters(load_model_config(path), made_up, rank=options.rank, num_adapters=max(mixes), seed=0)
        run = msgspec.convert(
            {
                "model": options.shape,
                "quantization": options.quantization,
                "max_num_seqs": options.running,
                "max_model_len": max(512, sum(map(max, (input_len, output_len)))),
            },
            RunConfig,
        )
        run = msgspec.structs.replace(run, lora=msgspec.structs.replace(lora, mode=options.mode))
        model, config, *_ = resolve_engines(run, path, load_checkpoint(run, path))
        engines = Engines(msgspec.structs.replace(config, load_format="dummy", record_steps=True), 1)
        try:
            ready = engines.wait_ready()
            print(*ready.notes, f"at most {ready.max_loaded_adapters} adapters on the device at a time", sep="\n")
            requests = workload.requests(model.vocab_size)
            rates = measure(engines, requests, mixes, options.passes, in_order=options.in_order)
        finally:
            engines.close()
    ratios = {mix: rates[mix] / rates[0] for mix in mixes}
    for mix, ratio in ratios.items():
        print(f"{mix} adapters: {ratio:.3f} of {rates[0]:,.0f} output tokens/s")
    if options.result is not None:
        options.result.write_text(json.dumps({"rates": rates, "ratios": ratios}))


if __name__ == "__main__":
    main()
