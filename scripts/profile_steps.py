#!/usr/bin/env python3
"""Where the time of a step goes on this GPU: kernels by kind, and the idle time between steps.

    python3 scripts/profile_steps.py SHAPE [--tp N [--ep] [--attention-dp]] [--running N] [--steps N]
        [--trace FILE.json] [--kernels N] [--quantization TYPE] [--kv-cache-dtype TYPE]
        [--shared-prefix 1024,1024:8] [--input-len 64] [--output-len 128] [--generated 20 | --prompts]
        [--speculate mtp --drafts 3] [--max-model-len 4096] [--hf-overrides '{"num_hidden_layers": 8}']

A rank in this process answers nano-vllm's workload with made-up weights, with one step in flight as in a run; with
--tp the others follow it in processes of their own. Torch's profiler records this rank's steps once all requests
decode, or with --prompts the first steps, which are full of prompts; their kernels are sorted by kind, and with
--kernels the longest are listed. Requests that the KV cache does not hold to the end of their answers wait
(--output-len), and the recording with them. Tracing costs some time between kernels, none inside them but in those
that wait for other ranks. The other options are as in `nvcli bench`; with --drafts every row has so many drafts in each
step, of which few are right.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile

from nvcli.core.config import RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import StepInput
from nvcli.core.speculation_config import SpeculationConfig
from nvcli.engine.block_manager import BlockManager
from nvcli.engine.core import EngineCore
from nvcli.engine.engine_process import scheduler_limits
from nvcli.engine.scheduler import Scheduler
from nvcli.job.run.engine_settings import load_checkpoint, resolve_engines
from nvcli.tools.bench.command import parse_range, parse_shared_prefix
from nvcli.tools.bench.shapes import SHAPES, write_shape
from nvcli.tools.bench.workload import Workload
from nvcli.worker.distributed.rendezvous import create_store
from nvcli.worker.runner.interface import RankContext
from nvcli.worker.runner.model_runner import ModelRunner
from rank_executor import RankExecutor

KINDS = {
    "sums over the ranks": r"_one_shot|_two_shot|nccl",
    "choice of tokens over the ranks": r"_max_kernel",
    "q/k norm, RoPE, KV store": r"qk_norm_rope",
    "SiLU": r"silu",
    "quantised to FP8": r"_quantise_kernel",
    "attention": r"attention|segment|hopper_prefill|plan_",
    "norms": r"rms_norm",
    "sampler": r"_sample_|_min_kept|_choose_candidates",
    "step inputs": r"prepare_inputs|write_tokens",
    "copies": r"Memcpy|Memset|copy|fill|index",
    "matrix products": r"gemm|cutlass|nvjet|_linear_kernel|splitK",
}
"""Patterns of kernels' names; the first that matches counts."""

_ACCEPT_RATE = 0.1
"""The share of drafts that is accepted. More would end the answers before they are recorded."""
_RECORDINGS = 2
"""The first one sets the profiler up."""


class RanksExecutor(RankExecutor):
    """Stands in for `Executor`, with rank 0 in this process and its peers in others."""

    def __init__(self, runner: ModelRunner, peers: Sequence[Connection]) -> None:
        super().__init__(runner)
        self._peers = peers

    def submit(self, step: StepInput) -> None:
        message = msgspec.msgpack.encode(step)
        for peer in self._peers:
            peer.send_bytes(message)
        super().submit(step)

    def recover(self, *, max_num_seqs: int, max_num_batched_tokens: int) -> int | None:
        raise torch.OutOfMemoryError(f"{max_num_seqs} requests and {max_num_batched_tokens} tokens are too many")


def run_peer(config: EngineConfig, rank: int, store_path: str, control: Connection) -> None:
    """One of the other ranks: takes every step that rank 0 takes."""
    context = RankContext(rank=rank, report_phase=lambda phase: None, store_path=store_path)
    runner = ModelRunner(config, context)
    while True:
        try:
            message = control.recv_bytes()
        except EOFError:
            os._exit(0)
        runner.launch(msgspec.msgpack.decode(message, type=StepInput))


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name)), f"other: {name[:50]}")


def start_engine(run: RunConfig, workload: Workload, tp: int) -> EngineCore:
    """Start an engine of `tp` ranks on the shape that `run.model` names, and give it the workload's requests."""
    spawn = multiprocessing.get_context("spawn")
    peers: list[Connection] = []
    store_path = f"/proc/{os.getpid()}/fd/{create_store()}"

    with tempfile.TemporaryDirectory() as folder:
        path = write_shape(run.model, Path(folder), quantization=run.quantization)
        model, config, *_ = resolve_engines(run, path, load_checkpoint(run, path))
        always = run.speculation.policy == "always"
        config = msgspec.structs.replace(
            config,
            load_format="dummy",
            tensor_parallel_size=tp,
            enable_expert_parallel=run.enable_expert_parallel,
            enable_attention_dp=run.enable_attention_dp,
            draft_accept_rate=_ACCEPT_RATE if always else None,
        )
        for rank in range(1, tp):
            mine, theirs = spawn.Pipe()
            spawn.Process(target=run_peer, args=(config, rank, store_path, theirs), daemon=True).start()
            theirs.close()
            peers.append(mine)
        context = RankContext(rank=0, report_phase=lambda phase: None, store_path=store_path)
        runner = ModelRunner(config, context)
    ready = runner.ready
    limits = scheduler_limits(config, ready)
    scheduler = Scheduler(limits, BlockManager(ready.num_blocks))
    core = EngineCore(scheduler, RanksExecutor(runner, peers), max_in_flight=config.max_steps_in_flight)
    core.scheduler.add(workload.requests(model.vocab_size))
    return core


def report(events: Sequence[tuple[float, float, str]], num_steps: int) -> None:
    """`events`: (start, end, name) in microseconds, of kernels and copies on the device."""
    events = sorted(events)
    busy: dict[str, float] = {}
    for start, end, name in events:
        busy[kind_of(name)] = busy.get(kind_of(name), 0.0) + end - start
    between, within, last_end, last_name = [], 0.0, events[0][0], ""
    for start, end, name in events:
        gap = max(0.0, start - last_end)
        if "DtoH" in last_name:  # the copy of the ids ends a step
            between.append(gap)
        else:
            within += gap
        if end > last_end:
            last_end, last_name = end, name
    span = events[-1][1] - events[0][0]
    print(f"{num_steps} steps, {span / num_steps:,.0f} µs each under the profiler; a step's time, µs:")
    for kind, total in sorted(busy.items(), key=lambda item: -item[1]):
        print(f"  {kind:<60} {total / num_steps:9.1f}  {100 * total / span:5.1f} %")
    print(f"  {'between kernels of a step':<60} {within / num_steps:9.1f}  {100 * within / span:5.1f} %")
    between.sort()
    print(f"  {'idle between steps':<60} {sum(between) / num_steps:9.1f}  {100 * sum(between) / span:5.1f} %")
    if between:
        print(f"idle between steps: median {between[len(between) // 2]:.1f} µs, most {between[-1]:.1f} µs")


def report_kernels(events: Sequence[tuple[float, float, str]], num_steps: int, num_kernels: int) -> None:
    """List the kernels that take the most time of a step."""
    times: dict[str, list[float]] = {}
    for start, end, name in events:
        times.setdefault(name, []).append(end - start)
    for name, spans in sorted(times.items(), key=lambda item: -sum(item[1]))[:num_kernels]:
        a_step, mean = sum(spans) / num_steps, sum(spans) / len(spans)
        print(f"  {a_step:9.1f} µs a step, {len(spans) / num_steps:6.1f} times {mean:8.1f} µs  {name[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--tp", type=int, default=1, help="GPUs that share the model")
    parser.add_argument("--ep", action="store_true", help="whole experts on each of these GPUs")
    parser.add_argument("--attention-dp", action="store_true", help="all heads of some requests on each of them")
    parser.add_argument("--running", type=int, default=256, help="requests that run at a time")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--trace", help="write a Chrome trace there")
    parser.add_argument("--kernels", type=int, default=0, help="list so many kernels, the longest")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--hf-overrides", type=json.loads, default={}, help="settings in place of the shape's, as JSON")
    parser.add_argument("--shared-prefix", help="prompt tokens that requests share: 2048, 2048:16, 1024,1024:8")
    parser.add_argument("--input-len", default="100:1024", help="prompt tokens behind a shared prefix")
    parser.add_argument("--output-len", default="900:1024", help="tokens of an answer")
    parser.add_argument("--generated", type=int, default=300, help="tokens that answers have before steps are recorded")
    parser.add_argument("--speculate", default="auto", help="where drafts come from")
    parser.add_argument("--drafts", type=int, default=0, help="drafts of a row in each step; 0: as many as pay")
    parser.add_argument("--prompts", action="store_true", help="record the first steps, which compute prompts")
    options = parser.parse_args()
    output_len = parse_range("--output-len", options.output_len)
    most_tokens = options.generated + _RECORDINGS * options.steps
    if most_tokens >= output_len[0] and not options.prompts:
        parser.error(
            f"--generated {options.generated} and {_RECORDINGS} recordings of --steps {options.steps} take answers of "
            f"more than {most_tokens:,} tokens, but --output-len {options.output_len} has some of {output_len[0]:,}: "
            "lower --generated or --steps, or raise --output-len"
        )
    run = msgspec.convert(
        {
            "model": options.shape,
            "max_model_len": options.max_model_len,
            "hf_overrides": options.hf_overrides,
            "max_num_seqs": options.running,
            "device": "cuda",
            "quantization": options.quantization,
            "kv_cache_dtype": options.kv_cache_dtype,
            "load_format": "dummy",
            "enable_expert_parallel": options.ep,
            "enable_attention_dp": options.attention_dp,
            "speculation": {
                "method": options.speculate,
                "max_draft_tokens": options.drafts or SpeculationConfig().max_draft_tokens,
                "policy": "always" if options.drafts else "auto",
            },
        },
        RunConfig,
    )
    workload = Workload(
        num_requests=options.running,
        input_len=parse_range("--input-len", options.input_len),
        output_len=output_len,
        shared_prefix=parse_shared_prefix(options.shared_prefix) if options.shared_prefix else (),
    )
    core = start_engine(run, workload, options.tp)
    while not options.prompts and (
        core.scheduler.stats.num_waiting or core.scheduler.stats.generated_tokens < options.generated * options.running
    ):
        core.step()
    for _ in range(_RECORDINGS):
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(options.steps):
                core.step()
            torch.cuda.synchronize()
    if options.trace:
        recorded.export_chrome_trace(options.trace)
    events = [
        (event.time_range.start, event.time_range.end, event.name)
        for event in recorded.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]
    print(f"{options.shape}, {options.running} running, {options.tp} × {torch.cuda.get_device_name()}")
    report(events, options.steps)
    report_kernels(events, options.steps, options.kernels)


if __name__ == "__main__":
    main()
