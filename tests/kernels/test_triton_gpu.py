"""The Triton kernels at the sizes and in the types of real models, and inside CUDA graphs. Needs a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from kernel_device import DTYPES, TOLERANCE
from nvcli.kernels import activation, norm, rotary, sampling
from nvcli.kernels.philox import token_uniforms

pytestmark = pytest.mark.gpu

VOCAB_SIZE = 151_936
LIMITS = [
    (0, 1.0, 0.0),
    (50, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 1.0, 0.05),
    (20, 0.8, 0.01),
    (1000, 0.95, 0.0),
    (1, 1.0, 0.0),
]


@pytest.fixture(autouse=True)
def deterministic_inputs() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()


def parameters(num_rows: int) -> dict[str, torch.Tensor]:
    """Of the slot table: one row in four greedy, limits of all kinds in turn."""
    limits = [LIMITS[i % len(LIMITS)] for i in range(num_rows)]
    return {
        "temperature": torch.tensor([0.0, 0.6, 1.0, 1.7], device="cuda").repeat(-(-num_rows // 4))[:num_rows],
        "seeds": torch.randint(-(1 << 63), (1 << 63) - 1, (num_rows,), device="cuda"),
        "positions": torch.randint(0, 40_000, (num_rows,), device="cuda", dtype=torch.int32),
        "rows": torch.randint(0, 1 << 32, (num_rows,), device="cuda"),
        "samples": torch.randint(0, 8, (num_rows,), device="cuda"),
        "top_k": torch.tensor([k for k, _, _ in limits], device="cuda", dtype=torch.int32),
        "top_p": torch.tensor([p for _, p, _ in limits], device="cuda"),
        "min_p": torch.tensor([m for _, _, m in limits], device="cuda"),
    }


def limit(logits: torch.Tensor, table: dict[str, torch.Tensor]) -> torch.Tensor:
    return sampling.likely_threshold(logits, table["temperature"], table["top_k"], table["top_p"], table["min_p"])


def draw(logits: torch.Tensor, table: dict[str, torch.Tensor], threshold: torch.Tensor | None = None) -> torch.Tensor:
    return sampling.sample(
        logits,
        table["temperature"],
        table["seeds"],
        table["positions"],
        table["rows"],
        table["samples"],
        threshold=threshold,
    )


def captured(function: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def test_uniforms_are_the_cpu_s() -> None:
    """The pure-torch generator on the GPU, which the tests below use, and the kernel's, against the CPU."""
    from nvcli.kernels.triton import philox

    table = parameters(4)
    counter = [table[name] for name in ("seeds", "positions", "rows", "samples")]
    expected = token_uniforms(*(x.cpu().long() for x in counter), VOCAB_SIZE)
    assert torch.equal(philox.token_uniforms(*counter, VOCAB_SIZE).cpu(), expected)
    assert torch.equal(token_uniforms(*(x.long() for x in counter), VOCAB_SIZE).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.7, 4.0])  # as of random weights, and of a trained model
def test_sampler(dtype: torch.dtype, scale: float) -> None:
    """Each of 1024 rows gets the token of the best score in float64, but for a few scores that are nearly equal."""
    num_rows = 1024
    table = parameters(num_rows)
    logits = torch.randn(num_rows, VOCAB_SIZE + 64, device="cuda").mul_(scale).to(dtype)[:, :VOCAB_SIZE]
    ids = draw(logits, table).long()
    num_different = 0
    for start in range(0, num_rows, 128):
        rows = slice(start, start + 128)
        counter = (table[name][rows].long() for name in ("seeds", "positions", "rows", "samples"))
        noise = token_uniforms(*counter, VOCAB_SIZE).double().log_().neg_().log_().neg_()
        temperature = table["temperature"][rows, None]
        scores = logits[rows].double()
        scores = torch.where(temperature > 0, scores / temperature.double() + noise, scores)
        best = scores.max(dim=-1)
        chosen = scores.gather(1, ids[rows, None])[:, 0]
        assert (best.values - chosen).max() < 2e-5
        # Equal logits are common in half types: the first of them is to be taken.
        first = (scores == best.values[:, None]).int().argmax(dim=-1)
        num_different += int((ids[rows] != first).sum())
    assert num_different <= 2


def test_sampler_follows_softmax() -> None:
    """200,000 draws: chi-square inside what chance allows."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.5], device="cuda")
    n = 200_000
    zeros = torch.zeros(n, dtype=torch.int64, device="cuda")
    temperature = torch.full((n,), 0.8, device="cuda")
    ids = sampling.sample(logits.expand(n, -1), temperature, zeros, torch.arange(n, device="cuda"), zeros, zeros)
    expected = (logits / 0.8).softmax(-1) * n
    chi_square = ((torch.bincount(ids, minlength=7) - expected) ** 2 / expected).sum().item()
    assert chi_square < 22.5  # 6 degrees of freedom: one in a thousand


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.7, 4.0])
def test_thresholds(dtype: torch.dtype, scale: float) -> None:
    num_rows = 512
    table = parameters(num_rows)
    logits = torch.randn(num_rows, VOCAB_SIZE, device="cuda").mul_(scale).to(dtype)
    actual = limit(logits, table)
    limited = (table["temperature"] > 0) & (torch.arange(num_rows, device="cuda") % len(LIMITS) > 0)
    assert torch.equal(actual > -torch.inf, limited)
    at = limited.nonzero()[:, 0]
    scaled = logits[at].float() / table["temperature"][at, None]
    expected = sampling.keep_likely(scaled, table["top_k"][at], table["top_p"][at], table["min_p"][at]) > -torch.inf
    kept = scaled >= actual[at, None]
    for row in (kept != expected).any(dim=-1).nonzero()[:, 0].tolist():
        # Only top-p may differ, and only where the likelier tokens reach it up to rounding.
        top_k, top_p = int(table["top_k"][at[row]]), table["top_p"][at[row]]
        assert top_p < 1
        values = scaled[row].double()
        if top_k:
            values = values.where(values >= values.topk(top_k).values[-1], -torch.inf)
        probabilities = values.softmax(dim=-1)
        for token in (kept[row] != expected[row]).nonzero()[:, 0].tolist():
            assert abs(probabilities[values > values[token]].sum() - top_p) < 5e-6
    ids = draw(logits, table, threshold=actual)[at].long()
    assert kept.gather(1, ids[:, None]).all()


def test_sampling_in_a_graph_follows_its_inputs() -> None:
    """Captured once, replayed with other logits, temperatures, limits and positions: what an eager call gives."""
    table = parameters(64)
    logits = torch.randn(64, VOCAB_SIZE, device="cuda").to(torch.bfloat16)
    out = torch.zeros(64, dtype=torch.int32, device="cuda")
    graph = captured(lambda: out.copy_(draw(logits, table, threshold=limit(logits, table))))
    seen = []
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, draw(logits, table, threshold=limit(logits, table)))
        seen.append(out.tolist())
        table["positions"].add_(1)
        for name in ("temperature", "top_k", "top_p", "min_p"):
            table[name].copy_(table[name].roll(1))
        logits.copy_(torch.randn_like(logits))
    assert seen[0] != seen[1] != seen[2]


def test_no_batch_size_compiles_anew() -> None:
    from nvcli.kernels.triton import norm as norm_kernels
    from nvcli.kernels.triton import sampling as sampling_kernels
    from nvcli.kernels.triton import threshold as threshold_kernels

    kernels = [
        norm_kernels._rms_norm_kernel,
        sampling_kernels._best_of_chunk_kernel,
        sampling_kernels._best_of_row_kernel,
        threshold_kernels._likely_threshold_kernel,
    ]

    def step(num_rows: int) -> None:
        logits = torch.randn(num_rows, VOCAB_SIZE, device="cuda", dtype=torch.bfloat16)
        table = parameters(num_rows)
        draw(logits, table, threshold=limit(logits, table))
        hidden = torch.randn(num_rows, 1024, device="cuda", dtype=torch.bfloat16)
        norm.add_rms_norm(hidden, hidden.clone(), hidden[0].clone(), 1e-6)

    def num_compiled() -> int:
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    step(16)
    before = num_compiled()
    for num_rows in (1, 2, 3, 17, 100, 128):
        step(num_rows)
    assert num_compiled() == before


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("hidden", "heads", "kv_heads", "intermediate"), [(1024, 16, 8, 3072), (4096, 32, 8, 12288), (5120, 64, 8, 25600)]
)
def test_layer_kernels(hidden: int, heads: int, kv_heads: int, intermediate: int, dtype: torch.dtype) -> None:
    """Through the public functions, on both devices; on the GPU by replaying a graph."""
    num_tokens, head_dim = 257, 128
    delta, residual = torch.randn(2, num_tokens, hidden).to(dtype)
    gate_up = torch.randn(num_tokens, 2 * intermediate).to(dtype)
    qkv = torch.randn(num_tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    weight, head_weights = torch.rand(hidden).to(dtype) + 0.5, (torch.rand(2, head_dim) + 0.5).to(dtype)
    angles = torch.rand(num_tokens, head_dim // 2) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    cache = torch.zeros(2, 40, 16, kv_heads, head_dim, dtype=dtype)
    slots = torch.randperm(640)[:num_tokens]

    def layer(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        delta, residual, gate_up, qkv, weight, head_weights, cos_sin, cache, slots = tensors
        stored = rotary.qk_norm_rope_store(
            qkv,
            cos_sin,
            cache[0],
            cache[1],
            slots,
            num_heads=heads,
            num_kv_heads=kv_heads,
            q_weight=head_weights[0],
            k_weight=head_weights[1],
            eps=1e-6,
        )
        normed = norm.add_rms_norm(delta, residual, weight, 1e-6)
        alone = norm.rms_norm(delta, weight, 1e-6)
        return [normed, alone, residual, activation.silu_and_mul(gate_up), *stored, cache]

    inputs = [delta, residual, gate_up, qkv, weight, head_weights, cos_sin, cache, slots]
    on_gpu = [x.cuda() for x in inputs]
    outputs: list[torch.Tensor] = []
    graph = captured(lambda: outputs.__setitem__(slice(None), layer(on_gpu)))
    for there, here in zip(on_gpu, inputs, strict=True):
        there.copy_(here)  # what the warm-up run changed
    graph.replay()
    for actual, expected in zip(outputs, layer(inputs), strict=True):
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(actual.cpu(), expected, atol=2 * tolerance, rtol=tolerance)
