"""The Triton kernels of recurrent layers against their plain-torch references."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from state_steps import make_rows
from torch import Tensor

from combinations import full
from kernel_device import DEVICE, DTYPES, HAS_GPU, MARKS, TOLERANCE
from nvcli.kernels import advance_states as advance_reference
from nvcli.kernels import causal_conv as conv_reference
from nvcli.kernels import channel_scan as channel_reference
from nvcli.kernels import delta_net as reference
from nvcli.kernels import ngrams as ngrams_reference
from nvcli.kernels import norm as norm_reference
from nvcli.kernels import selective_scan as scan_reference
from nvcli.kernels.kept_inputs import KeptInputs, PendingTokens
from nvcli.kernels.recurrence import RecurrentInputs
from nvcli.kernels.recurrent_types import ChannelGates, DeltaGates, RecurrentHeads, ScanGates, unit_length
from nvcli.kernels.state_rows import StateRows
from nvcli.kernels.triton.elementwise import norm
from nvcli.kernels.triton.recurrent import (
    advance_states,
    causal_conv,
    channel_walk,
    chunk_walk,
    delta_chunks,
    ngrams,
    rules,
)
from nvcli.models.lightning import FixedGates

pytestmark = [*MARKS, pytest.mark.parametrize("dtype", DTYPES)]

STEPS = {
    "single rows": ([(3, 1), (0, 1), (4, 1), (8, 1), (0, 1)], [[1], [2], [3, 4], [5, 6, 7], []], 4, 5, 0),
    "chunks": ([(9, 1), (0, 70), (3, 90), (64, 2), (0, 0)], [[1], [2, 3], [4, 5], [6, 7], []], 64, 1, 5),
    "many chunks": ([(3 * n, n % 5) for n in range(20)], [[1 + n] for n in range(20)], 64, 0, 9),
    "small blocks": ([(2, 11), (0, 3), (4, 4), (3, 2)], [[1, 2, 3, 4], [5], [6, 7], [8, 9]], 4, 0, 3),
    "columns without a block": ([(2, 11), (8, 13), (0, 9)], [[1, 0, 0, 2], [0, 3, 0, 4, 0, 5], [0, 0, 6]], 4, 0, 2),
    "blocks that go along": ([(8, 1), (4, 1), (4, 30)], [[0, 1, 1], [2, 2], [3, 4, 0, 0, 0, 0, 0, 0, 3]], 4, 2, 0),
    "blocks that are not powers of two": ([(40, 100)], [[1, 2, 3]], 48, 0, 0),
    "blocks that chunks do not divide": (
        [(30, 38), (98, 3), (64, 136), (0, 0), (163, 40), (63, 39)],
        [[1], [2, 3], [4, 5], [], [0, 6, 7], [8, 9]],
        *(100, 0, 1),
    ),
}
"""(tokens before, tokens) of each row, block tables, block size, single rows, tokens of nobody."""
NUM_BLOCKS = 21
CPU = torch.device("cpu")
HEADS = [
    RecurrentHeads(2, 16, 4, 32),
    RecurrentHeads(1, 24, 3, 20, beta_scale=2.0),
    RecurrentHeads(2, 24, 4, 20, rule="scan"),
    RecurrentHeads(3, 24, 3, 20, decays_by_channel=True),
    RecurrentHeads(2, 24, 2, 20, decays_by_channel=True, lowest_decay=-5.0),
    RecurrentHeads(1, 12, 1, 40, rule="channel scan"),
]
if HAS_GPU:
    HEADS += [RecurrentHeads(1, 128, 2, 128), RecurrentHeads(1, 128, 2, 64, rule="scan")]
    HEADS += [RecurrentHeads(2, 128, 2, 128, decays_by_channel=True)]
    HEADS += [RecurrentHeads(1, 16, 1, 1024, rule="channel scan")]
RULES = {
    "delta": (rules.delta_rule, reference.delta_rule),
    "scan": (rules.selective_scan, scan_reference.selective_scan),
    "channel scan": (rules.channel_scan, channel_reference.channel_scan),
}
"""The kernel and the reference of each rule."""


def with_heads(steps: Iterable[str]) -> list[Any]:
    """Each step with each heads, but of those of a delta rule without a GPU one after the other."""
    return [
        (step, heads) if HAS_GPU or "scan" in heads.rule or (i + j) % 2 else full((step, heads), in_parts=True)
        for i, step in enumerate(steps)
        for j, heads in enumerate(HEADS)
    ]


def rand(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def num_steps(heads: RecurrentHeads) -> int:
    """The numbers of a token that decays are computed from."""
    return heads.num_value_heads * {"head": 1, "key": heads.key_dim, "value": heads.value_dim}[heads.decays]


def inputs_of(
    heads: RecurrentHeads, qkv: Tensor, both: Tensor, of_heads: Tensor, device: torch.device
) -> tuple[Tensor, DeltaGates | ScanGates | ChannelGates]:
    """Queries, keys and values (by channels: values alone), and the gates of tokens, whose numbers are `both` [T, Hv +
    steps], and those of heads, in `of_heads` [3, steps]."""
    qkv, both, of_heads = (tensor.to(device, copy=True) for tensor in (qkv, both, of_heads))
    num_heads = heads.num_value_heads
    first, second, (rates, biases, skip) = both[:, :num_heads], both[:, num_heads:], of_heads
    if heads.rule == "delta":
        return qkv, DeltaGates(first, second, rates[:num_heads], biases)
    if heads.rule == "scan":
        return qkv, ScanGates(second, rates, biases, skip)
    q, k, x = qkv.split((heads.key_dim, heads.key_dim, heads.value_dim), dim=1)
    rates = rates.unsqueeze(1) + torch.linspace(-2, 2, heads.key_dim, device=device).to(rates.dtype)
    return x, ChannelGates(k, q, second, rates, biases, skip)


def on_device(rows: StateRows) -> StateRows:
    names = ("block_tables", "slots", "seq_lens", "query_start_loc", "slot_mapping")
    assert rows.pending is not None
    pending = PendingTokens(*(tensor.to(DEVICE, copy=True) for tensor in rows.pending))
    return dataclasses.replace(rows, pending=pending, **{name: getattr(rows, name).to(DEVICE) for name in names})


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = 4 * TOLERANCE[dtype]
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("taps", "dilation"), [(2, 1), (4, 1), (3, 3)])
@pytest.mark.parametrize("step", STEPS)
def test_causal_conv(step: str, taps: int, dilation: int, dtype: torch.dtype) -> None:
    work, tables, block_size, num_single, padding = STEPS[step]
    rows = make_rows(work, tables, block_size=block_size, num_single=num_single, padding=padding)
    wide, weight = rand(len(rows.slot_mapping), 200, dtype=dtype), rand(150, taps, dtype=dtype, seed=1)
    history = dilation * (taps - 1)
    x, whole_pool = wide[:, 20:170], rand(NUM_BLOCKS, history, 170, dtype=dtype, seed=2)
    pool = whole_pool[:, :, :150] if taps == 2 else whole_pool[:, :, 16:166]  # of a state that has others, too
    whole_found, moved = whole_pool.to(DEVICE, copy=True), wide.to(DEVICE)[:, 20:170]
    found_pool = whole_found[:, :, :150] if taps == 2 else whole_found[:, :, 16:166]
    bias = rand(150, dtype=dtype, seed=3) if taps == 2 else None
    moved_bias = None if bias is None else bias.to(DEVICE)
    ways: dict[str, Any] = {"activates": taps > 2, "adds_input": taps < 4, "dilation": dilation}
    factor = torch.tensor([0.6]) if taps < 4 else None
    moved_factor = None if factor is None else factor.to(DEVICE)
    found = causal_conv.causal_conv(
        moved, weight.to(DEVICE), found_pool, on_device(rows), bias=moved_bias, factor=moved_factor, **ways
    )
    expected = conv_reference.causal_conv(x, weight, pool, rows, bias=bias, factor=factor, **ways)
    assert_close(found, expected, dtype)
    assert torch.equal(whole_found.cpu()[1:], whole_pool[1:])


@pytest.mark.parametrize(("step", "heads"), with_heads(STEPS))
def test_rules(step: str, heads: RecurrentHeads, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    work, tables, block_size, num_single, padding = STEPS[step]
    monkeypatch.setattr(channel_walk, "_PART", 32)
    monkeypatch.setattr(channel_walk, "_ENOUGH", 1000 if block_size > 50 else 0)  # parts of rows, or whole rows
    rows = make_rows(work, tables, block_size=block_size, num_single=num_single, padding=padding)
    if heads.key_dim == 128 and dtype == torch.float32:
        pytest.skip("the compiler takes a minute")
    count, num_heads = len(rows.slot_mapping), heads.num_value_heads
    num_gates = num_heads + num_steps(heads)
    qkv, both = rand(count, heads.num_channels, dtype=dtype), rand(count, num_gates, dtype=dtype, seed=1)
    qkv[:, : heads.num_key_heads * heads.key_dim] *= heads.key_dim**-0.5  # as results of about 1 need it in a scan
    of_heads = rand(3, num_steps(heads), dtype=dtype, seed=3)
    pool = rand(NUM_BLOCKS, num_heads, heads.key_dim, heads.value_dim, dtype=torch.float32, seed=5)
    found_pool = pool.to(DEVICE, copy=True)
    kernel, rule = RULES[heads.rule]
    found = kernel(*inputs_of(heads, qkv, both, of_heads, DEVICE), found_pool, on_device(rows), heads)
    expected = rule(*inputs_of(heads, qkv, both, of_heads, CPU), pool, rows, heads)
    assert_close(found, expected, dtype)
    assert_close(found_pool[1:], pool[1:], dtype)


DRAFTS = {
    "few tokens": ([(5, 3), (0, 2), (64, 3), (0, 3)], [[1], [2], [3, 4], []], 64, 4, [3, 1, 2, 0], 0),
    "beside chunks": ([(7, 4), (9, 4), (3, 7), (0, 0)], [[1] * 4, [0, 0, 2, 2], [3, 4, 5], []], 4, 2, [0, 4], 5),
    "many tokens": ([(2, 9), (3, 1), (130, 9)], [[1], [2], [3, 3]], 128, 3, [9, 1, 7], 0),
}
"""(tokens before, tokens) of each row, block tables, block size, rows with drafts, their tokens that count, tokens of
nobody."""


@pytest.mark.parametrize(("step", "heads"), with_heads(DRAFTS))
def test_rows_with_drafts(step: str, heads: RecurrentHeads, dtype: torch.dtype) -> None:
    work, tables, block_size, num_drafts, accepted, padding = DRAFTS[step]
    rows = make_rows(work, tables, block_size=block_size, num_drafts=num_drafts, padding=padding)
    if heads.key_dim == 128 and dtype == torch.float32 and num_drafts < len(work):
        pytest.skip("the compiler takes a minute")
    assert rows.pending is not None
    rows.pending.earlier[: num_drafts - 1] = torch.arange(num_drafts - 2, -1, -1)
    num_tokens, num_heads, channels = len(rows.slot_mapping), heads.num_value_heads, heads.num_channels
    state, by_number = (num_heads, heads.key_dim, heads.value_dim), heads.decays == "value"
    x, weight = rand(num_tokens, channels, dtype=dtype), rand(channels, 4, dtype=dtype, seed=1)
    both = rand(num_tokens, num_heads + num_steps(heads), dtype=dtype, seed=2)
    of_heads, bias = rand(3, num_steps(heads), dtype=dtype, seed=3), rand(channels, dtype=dtype, seed=4)
    dilation = 2 if step == "beside chunks" else 1
    conv_pools = rand(2, 6, 3 * dilation, channels, dtype=dtype, seed=5)
    pools = rand(2, 6, *state, dtype=torch.float32, seed=6)
    counts = torch.tensor([*accepted, *[0] * (len(work) - num_drafts)], dtype=torch.int32)

    chosen = torch.tensor([num_drafts - 1, 0], dtype=torch.int32)

    def run(device: torch.device, conv: Any, rule: Any, end: Any, advance: Any) -> list[Tensor]:
        moved = on_device(rows) if device == DEVICE else rows
        conv_pool, pool = (tensor.to(device, copy=True) for tensor in (conv_pools, pools))
        sizes = num_tokens + 2, state, channels, heads.num_key_heads * heads.key_dim
        num_decays = num_steps(heads) // num_heads
        kept = KeptInputs.empty(2, *sizes, dtype, device, num_decays=num_decays, has_rates=by_number)
        outs = []
        for _ in range(3):  # the second step goes on from what the first one keeps of its rows in another order
            for layer in range(2):
                own = kept.layer(layer)
                taps, biases = weight.to(device), bias.to(device)
                ways = {"dilation": dilation, "adds_input": dilation > 1}
                outs += [conv(x.to(device), taps, conv_pool[layer], moved, own, biases, **ways)]
                inputs = inputs_of(heads, x, both, (1 + layer) * of_heads, device)
                outs += [rule(*inputs, pool[layer], moved, heads, own)]
            end(kept, conv_pool, moved, counts.to(device))
            moved.pending.turn.bitwise_xor_(1)
        advance(kept, pool, moved.pending, chosen.to(device), has_unit_keys=heads.rule == "delta")
        return [*outs, *kept, conv_pool[:, 1:], pool[:, 1:]]

    kernel, wanted_rule = RULES[heads.rule]
    found = run(DEVICE, causal_conv.causal_conv, kernel, advance_states.end_drafts, advance_states.advance_states)
    wanted_end, wanted_advance = advance_reference.end_drafts, advance_reference.advance_states
    expected = run(CPU, conv_reference.causal_conv, wanted_rule, wanted_end, wanted_advance)
    for one, wanted in zip(found, expected, strict=True):
        assert_close(one, wanted, dtype)


def test_a_prompt_of_one_token_over_and_over(dtype: torch.dtype) -> None:
    """Equal keys, no decay: powers of the system's matrix would be too large for a float32."""
    heads = RecurrentHeads(1, 16, 1, 16)
    qkv = torch.cat((torch.ones(128, 32), rand(128, 16, dtype=torch.float32)), dim=1).to(dtype)
    gates = DeltaGates(*(torch.full((128, 1), x, dtype=dtype) for x in (20.0, -20.0)), *torch.zeros(2, 1, dtype=dtype))
    rows = make_rows([(0, 128)], [[1]], block_size=128, num_single=0)
    pool = torch.zeros(2, 1, 16, 16)
    found_pool = pool.to(DEVICE, copy=True)
    moved = DeltaGates(*(gate.to(DEVICE) for gate in gates))
    found = rules.delta_rule(qkv.to(DEVICE), moved, found_pool, on_device(rows), heads)
    assert_close(found, reference.delta_rule(qkv, gates, pool, rows, heads), dtype)


def test_decays_of_any_strength(dtype: torch.dtype) -> None:
    """A state's rows keep what they have, or lose it at once, by factors down to e^-1000 in a token: chunks give what
    single tokens do."""
    heads = RecurrentHeads(2, 16, 2, 16, decays_by_channel=True)
    qkv = rand(70, heads.num_channels, dtype=dtype)
    steps, biases = 20 * rand(70, 32, dtype=dtype, seed=1), 20 * rand(32, dtype=dtype, seed=2)
    gates = DeltaGates(rand(70, 2, dtype=dtype, seed=3), steps, torch.tensor([1.0, 3.0]), biases)
    assert gates.decay().min() < -1000
    expected, state = [], torch.zeros(1, 2, 16, 16)
    q, k, v = (x.view(70, 2, 16) for x in qkv.float().split(32, dim=1))
    q, k, beta = unit_length(q) / 4, unit_length(k), gates.beta.float().sigmoid()
    inputs = RecurrentInputs(q, k, v, gates.decay(), beta)
    for token in range(70):
        out, state, _ = reference.delta_step(inputs.part(slice(token, token + 1)), state)
        expected.append(out)
    found, last = reference.delta_chunks(inputs, torch.zeros(2, 16, 16))
    assert_close(found, torch.cat(expected), torch.float32)
    assert_close(last, state[0], torch.float32)
    rows, pool = make_rows([(0, 70)], [[1, 2]], block_size=64), torch.zeros(3, 2, 16, 16, device=DEVICE)
    moved = DeltaGates(*(gate.to(DEVICE) for gate in gates))
    found = rules.delta_rule(qkv.to(DEVICE, copy=True), moved, pool, on_device(rows), heads)
    assert_close(found.float(), torch.cat(expected), dtype)
    tolerance = max(1e-3, 4 * TOLERANCE[dtype])  # sums of logarithms are thousands here, of which float32 has 2^-11
    torch.testing.assert_close(pool[2].cpu(), state[0], atol=tolerance, rtol=tolerance)


def test_fixed_decays(dtype: torch.dtype) -> None:
    """Lightning attention: a token's result is that of all pairs with tokens up to it, and drafts are entered though
    no convolution has a state."""
    num_tokens, num_heads, dim, rates = 70, 3, 16, (0.8, 0.1, 1e-5)
    heads = RecurrentHeads(num_heads, dim, num_heads, dim, rule="scan")
    qkv = rand(num_tokens, heads.num_channels, dtype=dtype) * 0.3
    q, k, v = (part.unflatten(1, (num_heads, dim)).transpose(0, 1).float() for part in qkv.chunk(3, dim=1))
    ages = torch.arange(num_tokens)[:, None] - torch.arange(num_tokens)
    decays = torch.exp(-torch.tensor(rates)[:, None, None] * ages).tril()
    expected = ((q @ k.transpose(1, 2)) * decays @ v).transpose(0, 1).to(dtype)
    gates = FixedGates(rates)
    gates.derive(DEVICE)
    pool = torch.zeros(3, num_heads, dim, dim, device=DEVICE)
    found = []
    for before, end, num_single in ((0, 66, 0), (66, 67, 1)):
        work = [(before, end - before), (0, 0)]
        rows = on_device(make_rows(work, [[1], []], block_size=128, num_single=num_single))
        found.append(rules.selective_scan(qkv[before:end].to(DEVICE), gates(end - before), pool, rows, heads))
    rows = on_device(make_rows([(67, 3), (0, 0)], [[1], []], block_size=128, num_drafts=1))
    kept = KeptInputs.empty(1, 4, (num_heads, dim, dim), 0, num_heads * dim, dtype, DEVICE)
    found.append(rules.selective_scan(qkv[67:].to(DEVICE), gates(3), pool, rows, heads, kept.layer(0)))
    assert_close(torch.cat(found), expected, dtype)
    assert rows.pending is not None
    counts = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    advance_states.end_drafts(kept, torch.empty(1, 3, 0, 0, dtype=dtype, device=DEVICE), rows, counts)
    assert [int(field[0]) for field in rows.pending[1:5]] == [0, 2, 1, 1]


@pytest.mark.parametrize(
    ("shape", "settings"),
    [((40,), {}), ((3, 40), {"gates_first": True}), ((40,), {"function": "sigmoid"})],
)
def test_gated_norm(shape: tuple[int, ...], settings: dict[str, Any], dtype: torch.dtype) -> None:
    x, wide, weight = rand(5, 3, 40, dtype=dtype), rand(5, 200, dtype=dtype, seed=1), rand(*shape, dtype=dtype, seed=2)
    gate, moved = wide[:, 8:128].unflatten(1, (3, 40)), wide.to(DEVICE)[:, 8:128].unflatten(1, (3, 40))
    found = norm.gated_rms_norm(x.to(DEVICE), moved, weight.to(DEVICE), 1e-6, **settings)
    expected = norm_reference.gated_rms_norm(x, gate, weight, 1e-6, **settings)
    assert_close(found, expected, dtype)


@pytest.mark.parametrize("step", ["single rows", "chunks", "small blocks", "columns without a block"])
def test_rows_of_ngrams(step: str, dtype: torch.dtype) -> None:
    """Ids from the step and from states, with separators among them, and requests that begin."""
    work, tables, block_size, num_single, padding = STEPS[step]
    rows = make_rows(work, tables, block_size=block_size, num_single=num_single, padding=padding)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 9, (len(rows.slot_mapping),), generator=generator, dtype=torch.int32)
    pool = torch.randint(0, 3, (NUM_BLOCKS, 6, 8), generator=generator).to(dtype)
    numbers = ([3, 2**40 + 1, 2**45 + 7, 5], [7, 11, 13, 17, 19, 23], [0, 7, 18, 31, 48, 67])
    hashes = ngrams_reference.NGramHashes(*map(torch.tensor, numbers))
    expected = ngrams_reference.ngram_rows(ids, pool[..., 2:5], rows, hashes, 4)
    moved = ngrams_reference.NGramHashes(*(one.to(DEVICE) for one in hashes))
    found = ngrams.ngram_rows(ids.to(DEVICE), pool.to(DEVICE)[..., 2:5], on_device(rows), moved, 4)
    assert torch.equal(found.cpu(), expected)
    assert len(expected.unique(dim=0)) > 1


def test_gates_of_lookups(dtype: torch.dtype) -> None:
    size, count, num_tokens = 20, 3, 7
    projected, streams = rand(num_tokens, 90, dtype=dtype)[:, :80], rand(num_tokens, 60, dtype=dtype, seed=1)
    projected[0, :size] = 0.0  # a product of 0 has a gate of 0
    norms = ngrams_reference.LookupNorms(*(rand(60, dtype=torch.float32, seed=seed) for seed in (2, 3, 4)))
    ids = torch.tensor([0, 254, 255, 65535, 65536, 248319, 2**24 - 2], dtype=torch.int32)
    expected = ngrams_reference.gate_lookup(projected, streams, ids, norms, 1e-6, 8)
    moved = ngrams_reference.LookupNorms(*(one.to(DEVICE) for one in norms))
    found = ngrams.gate_lookup(*(one.to(DEVICE) for one in (projected, streams, ids)), moved, 1e-6, 8)
    for one, wanted in zip(found, expected, strict=True):
        assert_close(one, wanted, dtype)
    digits = expected[1][:, count * size :].long()
    assert torch.equal((digits[:, :3] << torch.tensor([0, 8, 16])).sum(1) - 1, ids.long())
    assert not digits[:, 3:].any()


@pytest.mark.parametrize("has_weight", [True, False])
def test_norms_of_parts(has_weight: bool, dtype: torch.dtype) -> None:
    x, sizes = rand(5, 75, dtype=dtype), (50, 12, 13)
    weight = rand(75, dtype=dtype, seed=1) if has_weight else None
    found = norm.norm_parts(x.to(DEVICE), weight if weight is None else weight.to(DEVICE), 1e-6, sizes)
    assert_close(found, norm_reference.norm_parts(x, weight, 1e-6, sizes), dtype)


@pytest.mark.gpu
def test_no_number_of_rows_compiles_anew(dtype: torch.dtype) -> None:
    kernels = [
        causal_conv._chunk_kernel,
        causal_conv._keep_inputs_kernel,
        delta_chunks._solve_kernel,
        chunk_walk._walk_kernel,
        norm._gated_rms_norm_kernel,
    ]
    heads, states = RecurrentHeads(1, 25, 2, 50), torch.zeros(NUM_BLOCKS, 2, 25, 50, device=DEVICE)
    pool, weight = (rand(*shape, dtype=dtype).to(DEVICE) for shape in ((NUM_BLOCKS, 3, 150), (150, 4)))

    def step(num_rows: int) -> None:
        rows = make_rows([(0, 5)] * num_rows, [[1 + n] for n in range(num_rows)], block_size=64, num_single=0)
        x = rand(5 * num_rows, 150, dtype=dtype).to(DEVICE)
        out = causal_conv.causal_conv(x, weight, pool, on_device(rows))
        gates = DeltaGates(x[:, :2], x[:, 2:4], weight[:2, 0].contiguous(), weight[:2, 1].contiguous())
        rules.delta_rule(out, gates, states, on_device(rows), heads)
        out = out.unflatten(1, (3, 50))
        norm.gated_rms_norm(out, out, weight[:50, 0].contiguous(), 1e-6)

    def num_compiled() -> int:
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    step(16)
    before = num_compiled()
    for num_rows in (1, 2, 3, 9):
        step(num_rows)
    assert num_compiled() == before
