"""The recurrent layers' operations against transformers' own, and a request in pieces against the whole of it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from state_steps import make_rows
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextRMSNormGated,
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from nvcli.kernels.advance_states import advance_states, end_drafts
from nvcli.kernels.causal_conv import causal_conv
from nvcli.kernels.delta_net import delta_chunks, delta_rule, delta_step
from nvcli.kernels.kept_inputs import KeptInputs, PendingTokens
from nvcli.kernels.norm import gated_rms_norm
from nvcli.kernels.recurrence import RecurrentInputs
from nvcli.kernels.recurrent_types import DeltaGates, RecurrentHeads
from nvcli.kernels.state_rows import StateRows

HEADS = RecurrentHeads(num_key_heads=2, key_dim=8, num_value_heads=4, value_dim=16)
LENGTH = 150


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gates(length: int = LENGTH) -> DeltaGates:
    heads = HEADS.num_value_heads
    return DeltaGates(
        rand(length, heads, seed=1), rand(length, heads, seed=2), rand(heads, seed=3), rand(heads, seed=4)
    )


def reference(qkv: Tensor, one: DeltaGates) -> tuple[Tensor, Tensor]:
    """transformers' results and last state."""
    q, k, v = qkv.split([16, 16, 64], dim=1)
    q, k = (x.view(1, -1, 2, 8).repeat_interleave(2, dim=2) for x in (q, k))
    out, state = torch_recurrent_gated_delta_rule(
        q,
        k,
        v.view(1, -1, 4, 16),
        g=one.decay().unsqueeze(0),
        beta=one.beta.sigmoid().unsqueeze(0),
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    return out[0], state[0]


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("length", [1, 63, 64, 65, LENGTH])
def test_both_forms_are_those_of_transformers(length: int) -> None:
    q, k, v = (F.normalize(rand(length, 4, size, seed=size), dim=-1) for size in (8, 9, 16))
    k = k[..., :8]
    decay, beta, state = -rand(length, 4).abs(), rand(length, 4, seed=5).sigmoid(), rand(4, 8, 16, seed=6)
    arguments = [x.unsqueeze(0) for x in (q, k, v)]
    expected, expected_state = torch_chunk_gated_delta_rule(
        *arguments,
        g=decay.unsqueeze(0),
        beta=beta.unsqueeze(0),
        initial_state=state.unsqueeze(0),
        output_final_state=True,
    )
    scaled = q * 8**-0.5
    inputs = RecurrentInputs(scaled, k, v, decay, beta)
    found, found_state = delta_chunks(inputs, state)
    assert_close(found, expected[0])
    assert_close(found_state, expected_state[0])
    steps = []
    for i in range(length):
        one, states, _ = delta_step(inputs.part(slice(i, i + 1)), state.unsqueeze(0))
        state = states[0]
        steps.append(one)
    assert_close(torch.cat(steps), expected[0])
    assert_close(state, expected_state[0])


def test_equal_keys_are_exact() -> None:
    """A prompt of one token over and over: every key reads what the token before it wrote."""
    q = k = torch.full((128, 1, 4), 0.5)
    v, state = rand(128, 1, 4), torch.zeros(1, 4, 4)
    found, last = delta_chunks(RecurrentInputs(q, k, v, torch.zeros(128, 1), torch.ones(128, 1)), state)
    torch.testing.assert_close(found, v, atol=1e-5, rtol=1e-5)  # each token writes over the one before
    assert last.abs().max() < 10


COUNTS = (1, 1, 70, 1, 1, 1, 1, 1, 50, 20, 1, 1, 1)
"""The tokens of a request in pieces."""


@pytest.mark.parametrize("block_size", [4, 64])
def test_a_request_in_pieces(block_size: int) -> None:
    """Chunks, single tokens, and another request that goes on from a block of this one."""
    qkv, one = rand(LENGTH, HEADS.num_channels), gates()
    weight = rand(HEADS.num_channels, 4, seed=7)
    expected_conv = F.silu(F.conv1d(qkv.T.unsqueeze(0), weight.unsqueeze(1), padding=3, groups=96)[0, :, :LENGTH].T)
    expected, expected_state = reference(expected_conv, one)
    num_blocks = 2 * (LENGTH // block_size + 2)
    pool = torch.full((num_blocks, 4, 8, 16), 1e3)
    conv_pool = torch.full((num_blocks, 3, HEADS.num_channels), 1e3)
    table = list(range(num_blocks - 1, num_blocks // 2, -1))
    middle = LENGTH // block_size // 2 * block_size
    branch = [*table[: middle // block_size], *range(1, num_blocks // 2)]
    start = 0

    def run(start: int, count: int, blocks: list[int]) -> Tensor:
        rows = make_rows([(start, count)], [blocks], block_size=block_size, num_single=int(count == 1))
        part = slice(start, start + count)
        convolved = causal_conv(qkv[part], weight, conv_pool, rows)
        assert_close(convolved, expected_conv[part])
        cut = DeltaGates(one.beta[part], one.step[part], one.log_rate, one.step_bias)
        return delta_rule(convolved, cut, pool, rows, HEADS)

    for count in COUNTS:
        assert_close(run(start, count, table), expected[start : start + count])
        start += count
    assert start == LENGTH
    assert_close(pool[table[(LENGTH - 1) // block_size]], expected_state)
    assert_close(run(middle, LENGTH - middle, branch), expected[middle:])


def test_a_request_whose_columns_keep_no_states() -> None:
    """Of each step's columns only the last has a block, which goes along where a column begins."""
    qkv, one = rand(LENGTH, HEADS.num_channels), gates()
    weight = rand(HEADS.num_channels, 4, seed=7)
    expected_conv = F.silu(F.conv1d(qkv.T.unsqueeze(0), weight.unsqueeze(1), padding=3, groups=96)[0, :, :LENGTH].T)
    expected, expected_state = reference(expected_conv, one)
    pool, conv_pool = torch.full((4, 4, 8, 16), 1e3), torch.full((4, 3, HEADS.num_channels), 1e3)
    table = [1, *[0] * (LENGTH // 4)]
    start = 0
    for count in COUNTS:
        end = start + count
        before, last = max(0, start - 1) // 4, (end - 1) // 4
        if last > before:
            table[last] = table[before] if start % 4 == 0 else table[before] % 3 + 1
        rows = make_rows([(start, count)], [table], block_size=4, num_single=int(count == 1))
        part = slice(start, end)
        convolved = causal_conv(qkv[part], weight, conv_pool, rows)
        assert_close(convolved, expected_conv[part])
        cut = DeltaGates(one.beta[part], one.step[part], one.log_rate, one.step_bias)
        assert_close(delta_rule(convolved, cut, pool, rows, HEADS), expected[part])
        start = end
    assert start == LENGTH
    assert_close(pool[table[-1]], expected_state)
    assert (pool[0] == 1e3).all(), "nothing is kept in the null block"


@pytest.mark.parametrize("block_size", [2, 64])
def test_a_request_with_drafts(block_size: int) -> None:
    """Whatever follows the tokens that count is forgotten, and the others give what single tokens do, whether the state
    is brought up to date between two steps or by the later one."""
    qkv, one = rand(LENGTH, HEADS.num_channels), gates()
    weight = rand(HEADS.num_channels, 4, seed=7)
    pools = [torch.full((3, 4, 8, 16), 1e3) for _ in range(2)]
    conv_pools = [torch.full((3, 3, HEADS.num_channels), 1e3) for _ in range(2)]
    kept = KeptInputs.empty(1, 16, (4, 8, 16), HEADS.num_channels, 16, torch.float32, torch.device("cpu"))
    table = [2] * (LENGTH // block_size + 4)
    pending = PendingTokens.empty(2, torch.zeros(1, dtype=torch.int32))

    def run(number: int, tokens: Tensor, rows: StateRows) -> Tensor:
        convolved = causal_conv(qkv[tokens], weight, conv_pools[number], rows, kept.layer(0))
        cut = DeltaGates(one.beta[tokens], one.step[tokens], one.log_rate, one.step_bias)
        return delta_rule(convolved, cut, pools[number], rows, HEADS, kept.layer(0))

    start = 0
    for step, (count, width) in enumerate([(1, 1), (1, 4), (5, 5), (0, 3), (2, 8), (8, 8), (3, 4), (1, 1), (2, 2)]):
        tokens = torch.cat((torch.arange(start, start + count), 50 + torch.arange(width - count)))
        work, tables = [(start, width), (0, width)], [table, [0] * 8]
        rows = make_rows(work, tables, block_size=block_size, num_drafts=2, pending=pending)
        found = run(0, tokens.repeat(2), rows)
        assert found.isfinite().all()
        end_drafts(kept, conv_pools[0][None], rows, torch.tensor([count, 1]))
        pending.turn.bitwise_xor_(1)
        up_to_date = pools[0] if step % 3 == 2 else pools[0].clone()
        advance_states(kept, up_to_date[None], pending, torch.tensor([0, 1]))
        pending.earlier[:] = -1 if step % 3 == 2 else torch.arange(2)
        for token in range(start, start + count):
            single = make_rows([(token, 1)], [table], block_size=block_size, num_single=1)
            assert_close(run(1, torch.tensor([token]), single)[0], found[token - start])
        start += count
        assert_close(up_to_date, pools[1])
        assert torch.equal(conv_pools[0], conv_pools[1])
    assert (pools[0][:2] == 1e3).all()


def test_padding_is_finite_and_leaves_the_states_alone() -> None:
    qkv, one = rand(9, HEADS.num_channels), gates(9)
    pool = torch.full((4, 4, 8, 16), 7.0)
    work, tables = [(4, 1), (0, 1), (0, 3), (0, 0)], [[1, 2], [], [3], []]
    rows = make_rows(work, tables, block_size=4, num_single=2, padding=4)
    found = delta_rule(qkv, one, pool, rows, HEADS)
    assert found.isfinite().all()
    assert (found[5:] == 0).all()
    assert (pool[1] == 7.0).all()
    assert (pool[2:] != 7.0).all()


def test_gated_norm_is_that_of_transformers() -> None:
    x, gate, weight = rand(5, 4, 16), rand(5, 4, 16, seed=1), rand(16, seed=2)
    module = Qwen3NextRMSNormGated(16, eps=1e-6)
    module.weight.data = weight
    with torch.no_grad():
        expected = module(x, gate)
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, 1e-6), expected)
