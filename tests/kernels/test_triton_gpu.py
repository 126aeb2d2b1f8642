"""The Triton kernels at the sizes and in the types of real models, and inside CUDA graphs. Needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from sampling_rows import token_uniforms as uniforms_of_kernels

from kernel_device import DTYPES, TOLERANCE, captured
from nvcli.core.messages import NOT_FINITE
from nvcli.kernels import activation, candidates, norm, rotary, sampling
from nvcli.kernels.philox import token_uniforms
from nvcli.kernels.prepare_inputs import keep_tokens
from nvcli.kernels.sampling_columns import MAX_CANDIDATES, SamplingColumns

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
    (20, 0.95, 0.0),
    (MAX_CANDIDATES, 0.9, 0.0),
]


@pytest.fixture(autouse=True)
def deterministic_inputs() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()


def parameters(num_rows: int) -> tuple[SamplingColumns, torch.Tensor, torch.Tensor]:
    """Columns, slots and positions: one row in four greedy, limits of all kinds in turn, a slot for each row."""
    limits = [LIMITS[i % len(LIMITS)] for i in range(num_rows)]
    columns = SamplingColumns(
        temperature=torch.tensor([0.0, 0.6, 1.0, 1.7], device="cuda").repeat(-(-num_rows // 4))[:num_rows],
        top_k=torch.tensor([k for k, _, _ in limits], device="cuda", dtype=torch.int32),
        top_p=torch.tensor([p for _, p, _ in limits], device="cuda"),
        min_p=torch.tensor([m for _, _, m in limits], device="cuda"),
        seed=torch.randint(-(1 << 63), (1 << 63) - 1, (num_rows,), device="cuda"),
        row=torch.randint(0, 1 << 32, (num_rows,), device="cuda"),
        sample=torch.randint(0, 8, (num_rows,), device="cuda"),
    )
    positions = torch.randint(0, 40_000, (num_rows,), device="cuda", dtype=torch.int32)
    return columns, torch.arange(num_rows, device="cuda"), positions


def random_logits(num_rows: int, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """[num_rows, VOCAB_SIZE], a part of a padded matrix."""
    return torch.randn(num_rows, VOCAB_SIZE + 64, device="cuda").mul_(scale).to(dtype)[:, :VOCAB_SIZE]


def kept_tokens(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    """[N, V] bool by the plain definition, for rows that are not greedy; a few rows at a time fit the memory."""
    parts = []
    for rows in torch.arange(len(logits), device="cuda").split(64):
        at = columns.at(rows)
        scaled = logits[rows].float() / at.temperature[:, None]
        parts.append(sampling.keep_likely(scaled, at.top_k, at.top_p, at.min_p) > -torch.inf)
    return torch.cat(parts)


def assert_best_of_kept(
    ids: torch.Tensor, kept: torch.Tensor, logits: torch.Tensor, columns: SamplingColumns, positions: torch.Tensor
) -> None:
    """Each row's token has the best score, in float64, of those that are kept, but for a few nearly equal scores."""
    num_different = 0
    for rows in torch.arange(len(logits), device="cuda").split(64):
        at = columns.at(rows)
        noise = token_uniforms(at.seed, positions[rows].long(), at.row, at.sample, VOCAB_SIZE)
        noise = noise.double().log_().neg_().log_().neg_()
        scores = logits[rows].double()
        random = scores / at.temperature[:, None].double() + noise
        scores = torch.where(at.temperature[:, None] > 0, random.masked_fill(~kept[rows], -torch.inf), scores)
        best = scores.max(dim=-1).values
        chosen = scores.gather(1, ids[rows, None].long())[:, 0]
        assert (best - chosen).max() < 2e-5
        # Equal logits are common in half types: the first of them is to be taken.
        num_different += int((ids[rows] != (scores == best[:, None]).int().argmax(dim=-1)).sum())
    assert num_different <= 2


def test_uniforms_are_the_cpu_s() -> None:
    """The pure-torch generator on the GPU, which the tests below use, and the kernel's, against the CPU."""
    columns, _, positions = parameters(4)
    counter = [columns.seed, positions, columns.row, columns.sample]
    expected = token_uniforms(*(x.cpu().long() for x in counter), VOCAB_SIZE)
    assert torch.equal(uniforms_of_kernels(*counter, VOCAB_SIZE).cpu(), expected)
    assert torch.equal(token_uniforms(*(x.long() for x in counter), VOCAB_SIZE).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.7, 4.0])  # as of random weights, and of a trained model
def test_sampler(dtype: torch.dtype, scale: float) -> None:
    """1,024 rows without limits: each gets the token of the best score."""
    columns, slots, positions = parameters(1024)
    columns.top_k.zero_()
    columns.top_p.fill_(1.0)
    columns.min_p.zero_()
    logits = random_logits(1024, dtype, scale)
    ids = sampling.sample(logits, columns, slots, positions)
    kept = torch.ones(1, 1, dtype=torch.bool, device="cuda").expand(1024, VOCAB_SIZE)
    assert_best_of_kept(ids, kept, logits, columns, positions)


def test_sampler_follows_softmax() -> None:
    """200,000 draws: chi-square inside what chance allows; a top-k that leaves nothing out changes no token."""
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.5], device="cuda")
    n = 200_000
    zeros = torch.zeros(n, dtype=torch.int64, device="cuda")
    columns = SamplingColumns(
        temperature=torch.full((1,), 0.8, device="cuda"),
        top_k=torch.zeros(1, dtype=torch.int32, device="cuda"),
        top_p=torch.ones(1, device="cuda"),
        min_p=torch.zeros(1, device="cuda"),
        seed=zeros[:1],
        row=zeros[:1],
        sample=zeros[:1],
    )
    positions = torch.arange(n, device="cuda")
    ids = sampling.sample(logits.expand(n, -1), columns, zeros, positions)
    expected = (logits / 0.8).softmax(-1) * n
    chi_square = ((torch.bincount(ids, minlength=7) - expected) ** 2 / expected).sum().item()
    assert chi_square < 22.5  # 6 degrees of freedom: one in a thousand
    columns.top_k.fill_(7)
    assert torch.equal(sampling.sample(logits.expand(n, -1), columns, zeros, positions), ids)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.7, 4.0])
def test_thresholds(dtype: torch.dtype, scale: float) -> None:
    """Thresholds by the search over the row, and for a small top-k by the lists, against a sort."""
    from nvcli.kernels.triton.sampling import top_k_top_p

    columns, slots, positions = parameters(512)
    logits = random_logits(512, dtype, scale)
    actual = top_k_top_p.min_kept_logit(logits, columns, slots)
    limited = columns.is_limited
    assert torch.equal(actual > -torch.inf, limited)
    at = limited.nonzero()[:, 0]
    chosen = columns.at(at)
    scaled = logits[at].float() / chosen.temperature[:, None]
    expected = kept_tokens(logits[at], chosen)
    kept = scaled >= actual[at, None]
    for row in (kept != expected).any(dim=-1).nonzero()[:, 0].tolist():
        # Only top-p may differ, and only where the likelier tokens reach it up to rounding.
        top_k, top_p = int(chosen.top_k[row]), chosen.top_p[row]
        assert top_p < 1
        values = scaled[row].double()
        if top_k:
            values = values.where(values >= values.topk(top_k).values[-1], -torch.inf)
        probabilities = values.softmax(dim=-1)
        for token in (kept[row] != expected[row]).nonzero()[:, 0].tolist():
            assert abs(probabilities[values > values[token]].sum() - top_p) < 5e-6
    _, lists = candidates.shard_candidates(logits, columns, slots, positions, start=0)
    small = columns.has_small_top_k.nonzero()[:, 0]
    kth = lists[small, MAX_CANDIDATES - 1].view(torch.float32)
    descending = logits[small].float().sort(dim=-1, descending=True).values
    assert torch.equal(kth, descending.gather(1, columns.top_k[small, None].long() - 1)[:, 0])
    assert torch.equal(lists[small, -1], (logits[small].float() == kth[:, None]).sum(dim=-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [0.7, 4.0])
@pytest.mark.parametrize("is_tied", [False, True])
def test_limited_rows(dtype: torch.dtype, scale: float, is_tied: bool) -> None:
    """Rows of all kinds in one batch get the best token that their limits keep, whole and from two and four shards.

    With `is_tied` thousands of tokens share the k-th largest logit of most rows.
    """
    num_rows = 576
    columns, slots, positions = parameters(num_rows)
    logits = random_logits(num_rows, dtype, scale)
    if is_tied:
        logits = logits.clamp(max=scale * 2)
        logits[5:] = logits[5:].round()
    ids = sampling.sample(logits, columns, slots, positions)
    kept = kept_tokens(logits, columns)
    # Where the mass of the likelier tokens equals top_p up to rounding, a token may be in or out.
    limited = columns.is_limited
    is_kept = kept.gather(1, ids[:, None].long())[:, 0] | ~limited
    assert (~is_kept).sum() <= 2
    sure = is_kept.nonzero()[:, 0]
    assert_best_of_kept(ids[sure], kept[sure] | ~limited[sure, None], logits[sure], columns.at(sure), positions[sure])

    small = (columns.has_small_top_k | ~limited).nonzero()[:, 0]
    for num_ranks in (2, 4):
        size = -(-VOCAB_SIZE // num_ranks)
        found = [
            candidates.shard_candidates(
                logits[small, start : start + size],
                columns.at(small),
                slots[: len(small)],
                positions[small],
                start=start,
            )
            for start in range(0, VOCAB_SIZE, size)
        ]
        packed = torch.stack([packed for packed, _ in found]).max(dim=0).values
        lists = torch.stack([lists for _, lists in found])
        chosen = candidates.choose_candidates(packed, lists, columns.at(small), slots[: len(small)], positions[small])
        assert (chosen != ids[small]).sum() <= 2


def test_sampling_in_a_graph_follows_its_inputs() -> None:
    """Captured once, replayed with other logits, temperatures, limits and positions: what an eager call gives."""
    columns, slots, positions = parameters(64)
    logits = torch.randn(64, VOCAB_SIZE, device="cuda").to(torch.bfloat16)
    graph, out = captured(lambda: sampling.sample(logits, columns, slots, positions))
    seen = []
    for _ in range(3):
        graph.replay()
        assert torch.equal(out, sampling.sample(logits, columns, slots, positions))
        seen.append(out.tolist())
        positions.add_(1)
        for column in (columns.temperature, columns.top_k, columns.top_p, columns.min_p):
            column.copy_(column.roll(1))
        logits.copy_(torch.randn_like(logits))
    assert seen[0] != seen[1] != seen[2]


@pytest.mark.parametrize("dtype", DTYPES)
def test_broken_rows_in_a_graph_get_no_token(dtype: torch.dtype) -> None:
    """Rows of all kinds, every fourth of them broken in one of five ways; the others get what they get beside sound
    rows, bit for bit, whole and from two and four shards."""
    num_rows = 576
    columns, slots, positions = parameters(num_rows)
    logits = random_logits(num_rows, dtype, 4.0)
    small = (columns.has_small_top_k | ~columns.is_limited).nonzero()[:, 0]

    def choose() -> list[torch.Tensor]:
        found = [sampling.sample(logits, columns, slots, positions)]
        for num_ranks in (2, 4):
            size = -(-VOCAB_SIZE // num_ranks)
            parts = [
                candidates.shard_candidates(logits[:, start : start + size], columns, slots, positions, start=start)
                for start in range(0, VOCAB_SIZE, size)
            ]
            packed = torch.stack([packed for packed, _ in parts]).amax(dim=0)
            lists = torch.stack([lists for _, lists in parts])
            found.append(candidates.choose_candidates(packed, lists, columns, slots, positions)[small])
        return found

    graph, outputs = captured(choose)
    graph.replay()
    sound = [ids.clone() for ids in outputs]
    assert all((ids >= 0).all() for ids in sound)

    broken = torch.arange(3, num_rows, 4, device="cuda")
    logits[broken[0::5]] = torch.nan
    logits[broken[1::5], VOCAB_SIZE - 1] = torch.nan
    logits[broken[2::5], 70_000] = torch.inf
    logits[broken[3::5]] = -torch.inf
    logits[broken[4::5], 5] = -torch.nan
    graph.replay()
    is_broken = torch.zeros(num_rows, dtype=torch.bool, device="cuda")
    is_broken[broken] = True
    for ids, before, rows in zip(outputs, sound, (slots, small, small), strict=True):
        assert torch.equal(ids, before.masked_fill(is_broken[rows], NOT_FINITE))


def test_no_batch_size_compiles_anew() -> None:
    from nvcli.kernels.triton.elementwise import norm as norm_kernels
    from nvcli.kernels.triton.elementwise import prepare_inputs as input_kernels
    from nvcli.kernels.triton.sampling import sampling as sampling_kernels
    from nvcli.kernels.triton.sampling import top_k_top_p as threshold_kernels

    kernels = [
        norm_kernels._rms_norm_kernel,
        sampling_kernels._sample_chunk_kernel,
        sampling_kernels._sample_row_kernel,
        threshold_kernels._min_kept_logit_kernel,
        input_kernels._keep_tokens_kernel,
    ]
    table = torch.zeros(300, 2000, dtype=torch.int32, device="cuda")

    def step(num_rows: int) -> None:
        logits = torch.randn(num_rows, VOCAB_SIZE, device="cuda", dtype=torch.bfloat16)
        columns, slots, positions = parameters(num_rows)
        ids = sampling.sample(logits, columns, slots, positions)
        keep_tokens(table, slots, positions % table.shape[1], ids)
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
            keep_keys=True,
        )
        assert stored[1] is not None
        normed = norm.add_rms_norm(delta, residual, weight, 1e-6)
        alone = norm.rms_norm(delta, weight, 1e-6)
        return [normed, alone, residual, activation.silu_and_mul(gate_up), *stored, cache]

    inputs = [delta, residual, gate_up, qkv, weight, head_weights, cos_sin, cache, slots]
    on_gpu = [x.cuda() for x in inputs]
    graph, outputs = captured(lambda: layer(on_gpu))
    for there, here in zip(on_gpu, inputs, strict=True):
        there.copy_(here)  # what the warm-up run changed
    graph.replay()
    for actual, expected in zip(outputs, layer(inputs), strict=True):
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(actual.cpu(), expected, atol=2 * tolerance, rtol=tolerance)
