"""Answer the same rows in different batches, with `batch_invariant` and without, and count the rows that differ.

usage: batch_invariance.py [--shape qwen3-0.6b | --model PATH] [--rows 200] [--tokens 512] [--alone 20] [--device cuda]
                           [--dtype bfloat16] [--seed 0] [--max-num-seqs 256] [--tp 1] [--dp 1] [--kill]
                           [--modes ordinary batch_invariant] [--circumstances order cached alone chunks preempted]

A shape gets made-up weights: their logits are so close to each other that the last bit of a sum decides about tokens.
Half of the rows are greedy, the others are sampled, and a quarter of the prompts begin alike. The rows are answered all
at once, and then in other circumstances: in another order; once more, when their prompts are in the prefix cache; some
of them (`--alone`) one at a time; eagerly in chunks of a few hundred tokens; and with so small a KV cache that requests
are preempted. With `--dp 2` they are answered by two copies, too. All tokens are compared with those of the first time.
With `--kill` (and `--model`, as it takes a tokenizer) the rows are also answered by `nvcli generate`, which is killed
halfway and run again. Exits with 1 if a row differs although `batch_invariant` is on.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from fault_kills import KilledJob
from nvcli.core.config import RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import pack, unpack
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.client import EngineClient
from nvcli.engine.request import Request
from nvcli.job.run.engine_settings import load_checkpoint, resolve_engines
from nvcli.tools.bench.shapes import model_folder

PROMPT_TOKENS = (20, 600)
COMMON_TOKENS = 200
CIRCUMSTANCES = ("order", "cached", "alone", "chunks", "preempted")
MODES = ("ordinary", "batch_invariant")
Tokens = dict[int, bytes]
"""The tokens of each request, by its number."""


def make_requests(num_rows: int, num_tokens: int, vocab_size: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    common = [rng.randrange(vocab_size) for _ in range(COMMON_TOKENS)]
    requests = []
    for number in range(num_rows):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.randint(*PROMPT_TOKENS))]
        requests.append(
            Request(
                request_id=number,
                prompt_ids=pack(common + prompt if number % 4 == 0 else prompt),
                max_tokens=num_tokens,
                sampling=SamplingParams(temperature=0.0 if number % 2 else 0.8, max_tokens=num_tokens),
                stop_ids=[],
                seed=seed,
                row=number,
                sample=0,
            )
        )
    return requests


class Engines:
    """Replicas that share the rows."""

    def __init__(self, config: EngineConfig, replicas: int = 1) -> None:
        self._clients = [
            EngineClient.start(msgspec.structs.replace(config, replica=replica)) for replica in range(replicas)
        ]
        for client in self._clients:
            client.wait_ready()

    def answer(self, requests: Sequence[Request], *, one_by_one: bool = False, keep_prefixes: bool = False) -> Tokens:
        for client in self._clients:
            if not keep_prefixes:
                client.forget_prefixes()
        done: Tokens = {}
        for batch in [[request] for request in requests] if one_by_one else [requests]:
            shares = [list(batch[replica :: len(self._clients)]) for replica in range(len(self._clients))]
            for client, share in zip(self._clients, shares, strict=True):
                if share:
                    client.add(share)
            for client, share in zip(self._clients, shares, strict=True):
                missing = {request.request_id for request in share}
                while missing:
                    for output in client.poll(1.0):
                        assert output.finish_reason == "length", output.error or output.finish_reason
                        done[output.request_id] = output.token_ids
                        missing.discard(output.request_id)
        return done

    def num_preemptions(self) -> int:
        for client in self._clients:
            client.poll(0.5)
        return sum(client.stats.num_preemptions for client in self._clients)

    def close(self) -> None:
        for client in self._clients:
            client.close()


class Comparison:
    """Compares answers with those of the first circumstance, and prints a line for each other one."""

    def __init__(self, label: str, expected: Tokens) -> None:
        self._label, self._expected = label, expected
        self.num_different = 0

    def add(self, circumstance: str, found: Tokens) -> None:
        different = [number for number, tokens in found.items() if tokens != self._expected[number]]
        self.num_different += len(different)
        line = f"{self._label}, {circumstance}: {len(different)} of {len(found)} rows differ"
        if different:
            firsts = [_first_difference(found[number], self._expected[number]) for number in different]
            line += f", the first at token {min(firsts)}, half of them by token {sorted(firsts)[len(firsts) // 2]}"
        print(line, flush=True)


def _first_difference(found: bytes, expected: bytes) -> int:
    pairs = zip(unpack(found).tolist(), unpack(expected).tolist(), strict=False)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), -1)


def compare(
    config: EngineConfig, requests: Sequence[Request], circumstances: Sequence[str], *, num_alone: int, dp: int
) -> tuple[int, float]:
    """Answer the requests in the circumstances: → how many answers differ from the first ones, and the tokens per
    second of the first time."""
    shuffled = random.Random(1).sample(list(requests), len(requests))
    engines = Engines(config)
    try:
        engines.answer(requests[:8])  # compiles what is not compiled yet
        began = time.perf_counter()
        comparison = Comparison(MODES[config.batch_invariant], engines.answer(requests))
        rate = sum(request.max_tokens for request in requests) / (time.perf_counter() - began)
        if "order" in circumstances:
            comparison.add("in another order", engines.answer(shuffled))
        if "cached" in circumstances:
            comparison.add("with cached prompts", engines.answer(requests, keep_prefixes=True))
        if "alone" in circumstances:
            comparison.add("one at a time", engines.answer(requests[:num_alone], one_by_one=True))
    finally:
        engines.close()
    longest = max(len(unpack(request.prompt_ids)) + request.max_tokens for request in requests)
    little = _kv_bytes_per_token(config) * longest * max(2, len(requests) // 8)
    others: dict[str, tuple[str, dict[str, Any], int]] = {
        "chunks": (
            "eagerly in chunks", {"enforce_eager": True, "max_num_batched_tokens": config.max_num_seqs + 77}, 1
        ),
        "preempted": ("preempted", {"kv_cache_memory": little, "plan_admission": False}, 1),
        "copies": (f"by {dp} copies", {}, dp),
    }  # fmt: skip
    for name in (*circumstances, *(("copies",) if dp > 1 else ())):
        if name not in others:
            continue
        circumstance, changes, replicas = others[name]
        engines = Engines(msgspec.structs.replace(config, **changes), replicas)
        try:
            found = engines.answer(requests)
            if name == "preempted":
                circumstance += f" {engines.num_preemptions()} times"
        finally:
            engines.close()
        comparison.add(circumstance, found)
    return comparison.num_different, rate


def _kv_bytes_per_token(config: EngineConfig) -> int:
    from nvcli.models.config import load_model_config
    from nvcli.models.kv_groups import block_bytes

    model = load_model_config(config.model_path)
    return block_bytes(model, config.dtype, block_size=config.block_size) // config.block_size


def count_after_kill(model: Path, requests: Sequence[Request], config: EngineConfig) -> int:
    """Answer the rows by the command, undisturbed and killed halfway, and count the rows that differ."""
    with tempfile.TemporaryDirectory(prefix="nvcli-invariance-") as name:
        folder = Path(name)
        rows = folder / "rows.jsonl"
        rows.write_text(
            "".join(
                json.dumps(
                    {
                        "prompt_token_ids": unpack(request.prompt_ids).tolist(),
                        "sampling": {
                            "max_tokens": request.max_tokens // (1 + number % 4),
                            "temperature": request.sampling.temperature,
                            "ignore_eos": True,
                            "return_token_ids": True,
                        },
                    }
                )
                + "\n"
                for number, request in enumerate(requests)
            )
        )
        settings = {
            "device": config.device,
            "dtype": config.dtype,
            "max_model_len": config.max_model_len,
            "max_num_seqs": config.max_num_seqs,
            "tensor_parallel_size": 1,
            "data_parallel_size": 1,
            "batch_invariant": str(config.batch_invariant).lower(),
            "job.sync_seconds": 0.05,
        }
        command = [sys.executable, "-m", "nvcli", "generate", str(rows), "--model", str(model), "--progress", "none"]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        whole, killed = folder / "whole.jsonl", folder / "killed.jsonl"
        subprocess.run([*command, "-o", str(whole)], check=True, capture_output=True)
        job = KilledJob([*command, "-o", str(killed)], killed, rng=random.Random(0), run_seconds=0.5)
        job.run(kills=1, victims=("parent",))
        if not job.kills:
            raise SystemExit("the job was done before it could be killed: take more --rows or --tokens")
        expected, found = _token_ids(whole), _token_ids(killed)
        assert expected.keys() == found.keys()
        different = sum(found[index] != tokens for index, tokens in expected.items())
    label = f"{MODES[config.batch_invariant]}, killed and continued"
    print(f"{label}: {different} of {len(expected)} rows differ")
    return different


def _token_ids(path: Path) -> dict[int, list[int]]:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["index"]: row["choices"][0]["token_ids"] for row in rows}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--alone", type=int, default=20)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp", type=int, default=1)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--circumstances", nargs="*", choices=CIRCUMSTANCES, default=CIRCUMSTANCES)
    options = parser.parse_args(arguments)
    if options.kill and options.shape is not None:
        parser.error("--kill takes a tokenizer, which a shape does not have: name a model with --model")
    num_different = 0
    rates = {}
    with model_folder(options.model, options.shape) as path:
        for mode in options.modes:
            run = RunConfig(
                model=str(path),
                device=options.device,
                dtype=options.dtype,
                batch_invariant=mode == "batch_invariant",
                max_num_seqs=options.max_num_seqs,
                max_model_len=PROMPT_TOKENS[1] + COMMON_TOKENS + options.tokens,
                tensor_parallel_size=options.tp,
            )
            model, config, *_ = resolve_engines(run, path, load_checkpoint(run, path))
            if options.shape is not None:
                config = msgspec.structs.replace(config, load_format="dummy")
            requests = make_requests(options.rows, options.tokens, model.vocab_size, options.seed)
            different, rates[mode] = compare(
                config, requests, options.circumstances, num_alone=options.alone, dp=options.dp
            )
            if options.kill:
                different += count_after_kill(path, requests, config)
            num_different += different if run.batch_invariant else 0
            print(f"{mode}: {rates[mode]:,.0f} output tokens/s", flush=True)
    if len(rates) == 2:
        print(f"batch_invariant changes the speed by {rates['batch_invariant'] / rates['ordinary'] - 1:+.1%}")
    return int(num_different > 0)


if __name__ == "__main__":
    sys.exit(main())
