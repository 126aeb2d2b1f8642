"""Times the Triton kernels against torch operations and memory bandwidth: `python scripts/bench_kernels.py`, or with
one of `layers`, `sampler` and `prepare_inputs` as its argument only those; `--tune` tries other launch parameters too.

Each call is one of 20 in a CUDA graph, so that launches cost what they cost in a decode step; inputs are in L2 where
they fit, as in a step, where the kernel before has just written them. `floor` is bytes / bandwidth.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

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
BYTES_PER_US = 4.3e6 if "H200" in torch.cuda.get_device_name() else 3.0e6


def microseconds(function: Callable[[], object], calls: int = 20) -> float:
    """The time of one call: the least of five replays of a graph of calls."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            function()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(6):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return min(times[1:])


def row(name: str, times: list[tuple[float, float, float]]) -> None:
    cells = " | ".join(f"{here:7.1f} {there:8.1f} {floor:6.1f}" for here, there, floor in times)
    print(f"{name:28s} | {cells}", flush=True)


def bench_layers(model: str) -> None:
    hidden, heads, kv_heads, intermediate = MODELS[model]
    times: dict[str, list[tuple[float, float, float]]] = {
        "add_rms_norm": [],
        "silu_and_mul": [],
        "qk_norm_rope_store": [],
    }
    for n in ROWS:

        def bf16(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

        delta, residual, weight = bf16(n, hidden), bf16(n, hidden), bf16(hidden)

        def torch_norm(delta=delta, residual=residual, weight=weight):  # type: ignore[no-untyped-def]
            residual.add_(delta)
            return F.rms_norm(residual, (weight.shape[0],), weight, 1e-6)

        times["add_rms_norm"].append(
            (
                microseconds(lambda: norm.add_rms_norm(delta, residual, weight, 1e-6)),  # noqa: B023
                microseconds(torch_norm),
                n * hidden * 2 * 4 / BYTES_PER_US,
            )
        )
        gate_up = bf16(n, 2 * intermediate)
        times["silu_and_mul"].append(
            (
                microseconds(lambda: activation.silu_and_mul(gate_up)),  # noqa: B023
                microseconds(lambda: F.silu(gate_up[:, :intermediate]) * gate_up[:, intermediate:]),  # noqa: B023
                n * intermediate * 2 * 3 / BYTES_PER_US,
            )
        )
        width = (heads + 2 * kv_heads) * 128
        qkv, cos_sin, head_weight = bf16(n, width), torch.randn(n, 128, device="cuda"), bf16(128)
        cache, slots = torch.zeros(2, 512, 16, kv_heads, 128, device="cuda", dtype=torch.bfloat16), torch.randperm(8192)
        slots = slots[:n].cuda()
        q, k, v = qkv.unflatten(1, (-1, 128)).split((heads, kv_heads, kv_heads), dim=1)

        def torch_rope():  # type: ignore[no-untyped-def]
            for x in (q, k):  # noqa: B023
                rotary.apply_rope(F.rms_norm(x, (128,), head_weight, 1e-6), cos_sin)  # noqa: B023
            cache[0].flatten(0, 1).index_copy_(0, slots, k)  # noqa: B023
            cache[1].flatten(0, 1).index_copy_(0, slots, v)  # noqa: B023

        times["qk_norm_rope_store"].append(
            (
                microseconds(
                    lambda: rotary.qk_norm_rope_store(
                        qkv,  # noqa: B023
                        cos_sin,  # noqa: B023
                        cache[0],  # noqa: B023
                        cache[1],  # noqa: B023
                        slots,  # noqa: B023
                        num_heads=heads,
                        num_kv_heads=kv_heads,
                        q_weight=head_weight,  # noqa: B023
                        k_weight=head_weight,  # noqa: B023
                        eps=1e-6,
                        keep_keys=False,
                    )
                ),
                microseconds(torch_rope),
                n * (2 * width + kv_heads * 128 + 256) * 2 / BYTES_PER_US,
            )
        )
    for name, cells in times.items():
        row(f"{name} {model}", cells)


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


def bench_sampler() -> None:
    """All that a step does from logits to ids, for batches of one kind of row each; then one rank's share of two."""

    def calls(n: int) -> int:
        return 20 if n < 256 else 4

    print(f"sampler, us for rows {' | '.join(map(str, SAMPLER_ROWS))}")
    print("floor (bytes)", [f"{n * VOCAB_SIZE * 2 / BYTES_PER_US:.1f}" for n in SAMPLER_ROWS])
    for kind in LIMITS:
        times = []
        for n in SAMPLER_ROWS:
            inputs = sampler_inputs(n, kind)
            times.append(microseconds(lambda: sampling.sample(*inputs), calls(n)))  # noqa: B023
        print(f"{kind:22s}", [f"{t:.1f}" for t in times], flush=True)
    for kind in ("greedy", "temperature", "top_k 20, top_p 0.95"):
        alone, exchanged, chosen = [], [], []
        for n in SAMPLER_ROWS:
            logits, columns, slots, positions = sampler_inputs(n, kind)
            shard = logits[:, : VOCAB_SIZE // 2]
            inputs = shard, columns, slots, positions
            alone.append(microseconds(lambda: sampling.packed_argmax(*inputs), calls(n)))  # noqa: B023
            packed, lists = candidates.shard_candidates(*inputs, start=0)
            both = torch.stack((lists, lists))
            exchanged.append(
                microseconds(lambda: candidates.shard_candidates(*inputs, start=0), calls(n))  # noqa: B023
            )
            chosen.append(
                microseconds(lambda: candidates.choose_candidates(packed, both, columns, slots, positions))  # noqa: B023
            )
        for name, cells in (("packed_argmax", alone), ("shard_candidates", exchanged), ("choose_candidates", chosen)):
            print(f"one of two ranks, {kind}: {name:18s}", [f"{t:.1f}" for t in cells], flush=True)


def bench_prepare_inputs() -> None:
    """Steps of n decode rows, and of one prompt of 8,192 tokens."""
    times = []
    for n, num_tokens in [*((n, 1) for n in ROWS), (1, 8192)]:

        def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device="cuda")

        total = n * num_tokens
        state = SlotState(
            lengths=ints(n + 1), token_ids=ints(n + 1, 16384), block_tables=ints(1, n + 1, 256), block_size=64
        )
        rows = StepRows(
            slots=torch.arange(n + 1, dtype=torch.int32, device="cuda"),
            num_tokens=torch.tensor([num_tokens] * n + [0], dtype=torch.int32, device="cuda"),
            num_logits=torch.tensor([1] * n + [0], dtype=torch.int32, device="cuda"),
            query_start_loc=torch.tensor([*range(0, total + 1, num_tokens), total], dtype=torch.int32, device="cuda"),
            logits_start_loc=torch.tensor([*range(n + 1), n], dtype=torch.int32, device="cuda"),
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

        def prepare(rows=rows, state=state, inputs=inputs) -> None:  # type: ignore[no-untyped-def]
            state.lengths.zero_()
            prepare_inputs(rows, state, inputs)

        times.append((microseconds(prepare), 0.0, total * 24 / BYTES_PER_US))
    row("prepare_inputs", times)


def tune(only: list[str]) -> None:
    """Other launch parameters, for rows 1 / 16 / 32 / 64 / 256 / 1024."""
    if not only or "layers" in only:
        tune_layers()
    if not only or "sampler" in only:
        tune_sampler()


def tune_layers() -> None:
    from nvcli.kernels.triton import activation as activation_kernels
    from nvcli.kernels.triton import norm as norm_kernels
    from nvcli.kernels.triton import rotary as rotary_kernels

    def bf16(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    for hidden in (1024, 4096):
        for elements in (8, 16, 32):
            norm_kernels._THREAD_ELEMENTS = elements
            cells = []
            for n in (1, 16, 32, 64, 256, 1024):
                delta, residual, weight = bf16(n, hidden), bf16(n, hidden), bf16(hidden)
                cells.append(microseconds(lambda: norm.add_rms_norm(delta, residual, weight, 1e-6)))  # noqa: B023
            print(f"tune norm H={hidden} elements={elements}", [f"{t:.2f}" for t in cells])
    for intermediate in (3072, 12288):
        for block in (512, 1024, 2048):
            activation_kernels._BLOCK = block
            cells = []
            for n in (1, 16, 32, 64, 256, 1024):
                gate_up = bf16(n, 2 * intermediate)
                cells.append(microseconds(lambda: activation.silu_and_mul(gate_up)))  # noqa: B023
            print(f"tune silu I={intermediate} block={block}", [f"{t:.2f}" for t in cells])
    for heads in (16, 32):
        for per_program in (1, 2, 8, 16):
            rotary_kernels._HEADS_PER_PROGRAM = per_program
            cells = []
            for n in (1, 16, 32, 64, 256, 1024):
                qkv, cos_sin, weight = bf16(n, (heads + 16) * 128), torch.randn(n, 128, device="cuda"), bf16(128)
                cache, slots = bf16(2, 512, 16, 8, 128), torch.randperm(8192, device="cuda")[:n]
                cells.append(
                    microseconds(
                        lambda: rotary.qk_norm_rope_store(
                            qkv,  # noqa: B023
                            cos_sin,  # noqa: B023
                            cache[0],  # noqa: B023
                            cache[1],  # noqa: B023
                            slots,  # noqa: B023
                            num_heads=heads,  # noqa: B023
                            num_kv_heads=8,
                            q_weight=weight,  # noqa: B023
                            k_weight=weight,  # noqa: B023
                            eps=1e-6,
                            keep_keys=False,
                        )
                    )
                )
            print(f"tune rope heads={heads} per program={per_program}", [f"{t:.2f}" for t in cells])


def tune_sampler() -> None:
    from nvcli.kernels.triton import sampling as sampling_kernels

    defaults = sampling_kernels._QUADS, sampling_kernels._MAX_REGISTERS, sampling_kernels._ROW_WARPS
    for quads, registers, row_warps in ((512, 64, 16), (512, 80, 16), (512, 64, 8), (256, 64, 16), (1024, 64, 16)):
        sampling_kernels._QUADS, sampling_kernels._MAX_REGISTERS = quads, registers
        sampling_kernels._ROW_WARPS = row_warps
        for kind in ("greedy", "temperature", "top_k 20, top_p 0.95"):
            cells = []
            for n in SAMPLER_ROWS:
                inputs = sampler_inputs(n, kind)
                cells.append(microseconds(lambda: sampling.sample(*inputs), 4))  # noqa: B023
            name = f"tune sampler quads={quads} registers={registers} row warps={row_warps} {kind}"
            print(name, [f"{t:.2f}" for t in cells], flush=True)
    sampling_kernels._QUADS, sampling_kernels._MAX_REGISTERS, sampling_kernels._ROW_WARPS = defaults


if __name__ == "__main__":
    print(torch.cuda.get_device_name(), torch.__version__)
    print(f"us: kernel, torch, floor for rows {' | '.join(map(str, ROWS))}")
    only = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    if not only or "layers" in only:
        for model in MODELS:
            bench_layers(model)
    if not only or "sampler" in only:
        bench_sampler()
    if not only or "prepare_inputs" in only:
        bench_prepare_inputs()
    if "--tune" in sys.argv:
        tune(only)
