"""nvcli beside transformers on a CPU: one workload, the same threads, a fresh process each, one after the other.

    python scripts/bench_cpu.py [--rows 256] [--threads 2] [--engines nvcli generate generate_batch] [--repeat 1]

A random Qwen3 of about 30 M parameters answers rows of mixed lengths, greedily, each with a fixed number of tokens:

- `nvcli`: the whole engine (processes, channel, scheduler), at its default batch settings;
- `generate`: transformers' generate in batches of 32, sorted by prompt length; a batch runs until its longest answer;
- `generate_batch`: transformers' continuous batching (paged SDPA attention), each row with its own length.

Timed is the generation alone: models are loaded and one short row is answered before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ENGINES = ("nvcli", "generate", "generate_batch")
SHAPE = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
Rows = list[tuple[list[int], int]]
"""(prompt, tokens to generate) of each row."""


def make_rows(count: int, input_len: tuple[int, int], output_len: tuple[int, int]) -> Rows:
    rng = random.Random(0)
    prompts = [[rng.randrange(2, SHAPE["vocab_size"]) for _ in range(rng.randint(*input_len))] for _ in range(count)]
    return [(prompt, rng.randint(*output_len)) for prompt in prompts]


def run_nvcli(path: Path, rows: Rows, threads: int) -> float:
    from nvcli.config import RunConfig
    from nvcli.engine.client import EngineClient
    from nvcli.engine.request import Request
    from nvcli.messages import pack, unpack
    from nvcli.models.config import load_model_config
    from nvcli.pipeline.resolve import resolve_engine_config
    from nvcli.sampling_params import SamplingParams

    config = resolve_engine_config(RunConfig(model=str(path), device="cpu"), path, load_model_config(path))
    client = EngineClient.start(config)
    client.wait_ready()

    def answer(first_id: int, some: Rows) -> None:
        client.add(
            [
                Request(
                    request_id=first_id + i,
                    prompt_ids=pack(prompt),
                    max_tokens=length,
                    sampling=SamplingParams(temperature=0),
                    stop_ids=[],
                    seed=0,
                    row=i,
                    sample=0,
                )
                for i, (prompt, length) in enumerate(some)
            ]
        )
        left = {first_id + i: length for i, (_, length) in enumerate(some)}
        while left:
            for output in client.poll(1.0):
                assert len(unpack(output.token_ids)) == left.pop(output.request_id)

    try:
        answer(0, [(rows[0][0][:8], 2)])
        start = time.perf_counter()
        answer(1, rows)
        return time.perf_counter() - start
    finally:
        client.close()


def load_transformers(path: Path, threads: int) -> Any:
    import torch
    from transformers import Qwen3ForCausalLM

    torch.set_num_threads(threads)
    return Qwen3ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa").eval()


def run_generate(path: Path, rows: Rows, threads: int, batch_size: int = 32) -> float:
    import torch

    model = load_transformers(path, threads)

    def answer(some: Rows) -> None:
        longest = max(len(prompt) for prompt, _ in some)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt, _ in some])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt, _ in some])
        num_tokens = max(length for _, length in some)
        out = model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        assert out.shape[1] == longest + num_tokens

    answer([(rows[0][0][:8], 2)])
    ordered = sorted(rows, key=lambda row: len(row[0]))
    start = time.perf_counter()
    for i in range(0, len(ordered), batch_size):
        answer(ordered[i : i + batch_size])
    return time.perf_counter() - start


def run_generate_batch(path: Path, rows: Rows, threads: int) -> float:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = load_transformers(path, threads)
    generation = GenerationConfig(max_new_tokens=2048, do_sample=False, eos_token_id=-1, pad_token_id=0)
    num_tokens = sum(len(prompt) + length for prompt, length in rows)
    batching = ContinuousBatchingConfig(num_blocks=num_tokens // 256 + 2 * len(rows), max_batch_tokens=8192)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching
    ) as manager:

        def answer(some: Rows) -> None:
            left = {}
            for prompt, length in some:
                left[manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)] = length
            while left:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    assert result.error is None, result.error
                    assert len(result.generated_tokens) == left.pop(result.request_id)
                assert manager.is_running()

        answer([(rows[0][0][:8], 2)])
        start = time.perf_counter()
        answer(rows)
        return time.perf_counter() - start


def write_model(path: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
    print(f"model: {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters", flush=True)
    model.save_pretrained(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--input-len", default="16:256")
    parser.add_argument("--output-len", default="16:256")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--one", nargs=2, metavar=("ENGINE", "FOLDER"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    low_high = [tuple(map(int, text.split(":"))) for text in (args.input_len, args.output_len)]
    rows = make_rows(args.rows, *low_high)
    if args.one:
        engine, folder = args.one
        seconds = globals()[f"run_{engine}"](Path(folder), rows, args.threads)
        print(json.dumps({"seconds": seconds}))
        return
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        num_tokens = sum(length for _, length in rows)
        print(f"{len(rows)} rows, {sum(len(p) for p, _ in rows)} prompt and {num_tokens} generated tokens", flush=True)
        seconds: dict[str, list[float]] = {engine: [] for engine in args.engines}
        for _ in range(args.repeat):
            for engine in args.engines:
                command = [sys.executable, *sys.argv, "--one", engine, folder]
                env = {**os.environ, "OMP_NUM_THREADS": str(args.threads)}
                out = subprocess.run(command, env=env, check=True, stdout=subprocess.PIPE, text=True).stdout
                seconds[engine].append(json.loads(out.splitlines()[-1])["seconds"])
        baseline = statistics.median(seconds[args.engines[0]])
        for engine, values in seconds.items():
            median = statistics.median(values)
            print(
                f"{engine:>15}: {median:6.1f} s, {num_tokens / median:6.0f} tokens/s, {median / baseline:.2f}x the time"
            )


if __name__ == "__main__":
    main()
