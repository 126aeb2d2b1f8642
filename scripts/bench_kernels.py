"""Times the Triton kernels against torch operations and memory bandwidth: `python scripts/bench_kernels.py`.

`--only layers`, `sampler` or `prepare_inputs` takes these alone. Each call is one of many in a CUDA graph, so that
launches cost what they cost in a decode step; inputs are in L2 where they fit, as in a step, where the kernel before
has just written them. `floor` is bytes / bandwidth. `parts` are what one of two ranks does of a sampler's work.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import torch
import torch.nn.functional as F

from benchmark import Case, Figures, gpu_microseconds, run_benchmark
from nvcli.kernels import activation, candidates, norm, rotary, sampling
from nvcli.kernels.prepare_inputs import prepare_inputs
from nvcli.kernels.sampling_columns import SamplingColumns
from nvcli.kernels.step_tensors import SlotState, StepInputs, StepRows

VOCAB_SIZE = 151_936
MODELS = {"0.6B": (1024, 16, 8, 3072), "8B": (4096, 32, 8, 12288)}
ROWS = (1, 64, 256, 1024)
SAMPLER_ROWS = (1, 16, 64, 256, 1024)
LIMITS = {  # temperature, top_k, top_p, min_p
    "greedy": (0.0, 0, 1.0, 0.0),
    "temperature": (0.6, 0, 1.0, 0.0),
    "top_k 20, top_p 0.95": (0.6, 20, 0.95, 0.0),
    "top_k 20": (0.6, 20, 1.0, 0.0),
    "top_k 64, top_p 0.95": (0.6, 64, 0.95, 0.0),
    "top_k 1000": (0.6, 1000, 1.0, 0.0),
    "top_p 0.95": (0.6, 0, 0.95, 0.0),
    "min_p 0.05": (0.6, 0, 1.0, 0.05),
}


def bandwidth() -> float:
    """Return the bytes that the GPU's memory moves in a microsecond, about."""
    return 4.3e6 if "H200" in torch.cuda.get_device_name() else 3.0e6


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def figures(kernel: Callable[[], object], by_torch: Callable[[], object] | None, num_bytes: float) -> Figures:
    times = {"µs": gpu_microseconds(kernel)}
    if by_torch is not None:
        times["torch, µs"] = gpu_microseconds(by_torch)
    return {**times, "floor, µs": num_bytes / bandwidth()}


def add_rms_norm(model: str, n: int, number: int) -> Figures:
    hidden = MODELS[model][0]
    delta, residual, weight = bf16(n, hidden), bf16(n, hidden), bf16(hidden)

    def by_torch() -> None:
        residual.add_(delta)
        F.rms_norm(residual, (hidden,), weight, 1e-6)

    return figures(lambda: norm.add_rms_norm(delta, residual, weight, 1e-6), by_torch, n * hidden * 2 * 4)


def silu_and_mul(model: str, n: int, number: int) -> Figures:
    size = MODELS[model][3]
    gate_up = bf16(n, 2 * size)
    return figures(
        lambda: activation.silu_and_mul(gate_up),
        lambda: F.silu(gate_up[:, :size]) * gate_up[:, size:],
        n * size * 2 * 3,
    )


def qk_norm_rope_store(model: str, n: int, number: int) -> Figures:
    _, heads, kv_heads, _ = MODELS[model]
    width = (heads + 2 * kv_heads) * 128
    qkv, cos_sin, weight = bf16(n, width), torch.randn(n, 128, device="cuda"), bf16(128)
    keys, values = torch.zeros(2, 512, 16, kv_heads, 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(8192)[:n].cuda()
    q, k, v = qkv.unflatten(1, (-1, 128)).split((heads, kv_heads, kv_heads), dim=1)

    def by_torch() -> None:
        for x in (q, k):
            rotary.apply_rope(F.rms_norm(x, (128,), weight, 1e-6), cos_sin)
        keys.flatten(0, 1).index_copy_(0, slots, k)
        values.flatten(0, 1).index_copy_(0, slots, v)

    def kernel() -> None:
        rotary.qk_norm_rope_store(
            *(qkv, cos_sin, keys, values, slots),
            num_heads=heads,
            num_kv_heads=kv_heads,
            q_weight=weight,
            k_weight=weight,
            eps=1e-6,
            keep_keys=False,
        )

    return figures(kernel, by_torch, n * (2 * width + kv_heads * 128 + 256) * 2)


def sampler_inputs(n: int, kind: str) -> tuple[torch.Tensor, SamplingColumns, torch.Tensor, torch.Tensor]:
    """Logits [n, VOCAB_SIZE] bf16 of the spread of a trained model's, columns, slots and positions."""
    temperature, top_k, top_p, min_p = LIMITS[kind]
    logits = torch.randn(n, VOCAB_SIZE, device="cuda").mul_(3.0).to(torch.bfloat16)
    ints = torch.arange(n, device="cuda")
    columns = SamplingColumns(
        temperature=torch.full((n,), temperature, device="cuda"),
        top_k=torch.full((n,), top_k, device="cuda", dtype=torch.int32),
        top_p=torch.full((n,), top_p, device="cuda"),
        min_p=torch.full((n,), min_p, device="cuda"),
        seed=ints,
        row=ints,
        sample=ints,
    )
    return logits, columns, ints, ints.int()


def sampler(kind: str, n: int, number: int) -> Figures:
    """Measure all that a step does from logits to ids, for rows of one kind."""
    inputs = sampler_inputs(n, kind)
    calls = 20 if n < 256 else 4
    microseconds = gpu_microseconds(lambda: sampling.sample(*inputs), calls)
    return {"µs": microseconds, "floor, µs": n * VOCAB_SIZE * 2 / bandwidth()}


def sampler_parts(kind: str, n: int, number: int) -> Figures:
    """Measure what one of two ranks does."""
    logits, columns, slots, positions = sampler_inputs(n, kind)
    inputs = logits[:, : VOCAB_SIZE // 2], columns, slots, positions
    packed, lists = candidates.shard_candidates(*inputs, start=0)
    both = torch.stack((lists, lists))
    calls = 20 if n < 256 else 4
    return {
        "packed_argmax, µs": gpu_microseconds(lambda: sampling.packed_argmax(*inputs), calls),
        "shard_candidates, µs": gpu_microseconds(lambda: candidates.shard_candidates(*inputs, start=0), calls),
        "choose_candidates, µs": gpu_microseconds(
            lambda: candidates.choose_candidates(packed, both, columns, slots, positions)
        ),
    }


def step_inputs(n: int, num_tokens: int, number: int) -> Figures:
    """Measure a step of n rows with so many tokens each."""

    def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    def int32s(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    total = n * num_tokens
    tables = ints(1, n + 1, 256)
    state = SlotState(lengths=ints(n + 1), token_ids=ints(n + 1, 16384), block_tables=tables, block_size=64)
    rows = StepRows(
        slots=int32s([*range(n + 1)]),
        num_tokens=int32s([num_tokens] * n + [0]),
        num_logits=int32s([1] * n + [0]),
        query_start_loc=int32s([*range(0, total + 1, num_tokens), total]),
        logits_start_loc=int32s([*range(n + 1), n]),
    )
    inputs = StepInputs(
        input_ids=ints(total),
        positions=ints(total),
        slot_mapping=ints(1, total, dtype=torch.int64),
        slots=ints(n + 1, dtype=torch.int64),
        seq_lens=ints(n + 1),
        logits_rows=ints(n, dtype=torch.int64),
        sample_slots=ints(n, dtype=torch.int64),
        sample_positions=ints(n),
    )

    def prepare() -> None:
        state.lengths.zero_()
        prepare_inputs(rows, state, inputs)

    return figures(prepare, None, total * 24)


def cases(options: argparse.Namespace, stack: ExitStack) -> Iterator[Case]:
    print(torch.cuda.get_device_name(), torch.__version__)
    for kernel in (add_rms_norm, silu_and_mul, qk_norm_rope_store):
        for model in MODELS:
            for n in ROWS:
                yield Case(f"layers: {kernel.__name__} {model}, {n} rows", partial(kernel, model, n))
    for kind in LIMITS:
        for n in SAMPLER_ROWS:
            yield Case(f"sampler: {kind}, {n} rows", partial(sampler, kind, n))
    for kind in ("greedy", "temperature", "top_k 20, top_p 0.95"):
        for n in SAMPLER_ROWS:
            yield Case(f"sampler parts: {kind}, {n} rows", partial(sampler_parts, kind, n))
    for n, num_tokens in [*((n, 1) for n in ROWS), (1, 8192)]:
        yield Case(f"prepare_inputs: {n} rows of {num_tokens} tokens", partial(step_inputs, n, num_tokens))


if __name__ == "__main__":
    run_benchmark(__doc__, cases)
