"""EAGLE-3 heads in plain torch: the arithmetic as it is published, for training and as the reference of tests.

A head reads hidden states of several layers of its target (`combine`), and guesses from the state of position p and the
token at p + 1 what follows at p + 2; its own state takes the place of the target's when it goes on. Sources: the paper
(Li et al., EAGLE-3, arXiv 2503.01840), and the checkpoints of SafeAILab, SpecForge and speculators, whose names the
modules have. Shapes: B rows, T tokens, H hidden, D head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """The sizes and the form of a head."""

    hidden_size: int
    target_hidden_size: int
    num_states: int
    """Layers of the target whose hidden states it reads."""
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rope_theta: float = 10_000.0
    eps: float = 1e-6
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False

    def layer_config(self) -> dict[str, Any]:
        """Return the keys of config.json that describe the layer."""
        return {
            "model_type": "qwen3" if self.qk_norm else "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.eps,
            "rope_theta": self.rope_theta,
            "vocab_size": self.vocab_size,
        }


class Keys(NamedTuple):
    """The keys and values of one pass, rotated: [B, heads, T, D] each."""

    keys: Tensor
    values: Tensor


class HeadAttention(nn.Module):
    """Attention over the embedding of a token and a state, side by side."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.q_proj = nn.Linear(2 * shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        if shape.qk_norm:
            self.q_norm = nn.RMSNorm(shape.head_dim, eps=shape.eps)
            self.k_norm = nn.RMSNorm(shape.head_dim, eps=shape.eps)

    def forward(
        self, x: Tensor, positions: Tensor, earlier: list[Keys], places: Tensor | None = None
    ) -> tuple[Tensor, Keys]:
        """Attend to `earlier`: to all keys up to the own place in its first pass, and to those at the own place in
        later ones. x: [B, T, 2H] → [B, T, H]. With `places` [B, A], the places in the first pass, results and later
        keys are for these alone: [B, A, H]."""
        shape = self.shape
        is_first = not earlier
        keys, values = self._heads(self.k_proj, x), self._heads(self.v_proj, x)
        if shape.qk_norm:
            keys = self.k_norm(keys)
        repeats = shape.num_heads // shape.num_kv_heads
        own = Keys(*(one.repeat_interleave(repeats, 1) for one in (rotated(keys, positions, shape), values)))
        query_positions = positions
        if places is not None and is_first:
            x = x.take_along_dim(places[..., None], 1)
            query_positions = positions.take_along_dim(places, 1)
        q = self._heads(self.q_proj, x)
        q = rotated(self.q_norm(q) if shape.qk_norm else q, query_positions, shape)
        first, *later = [*earlier, own]
        if places is None:
            places = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        hidden = torch.arange(first.keys.shape[2], device=x.device) > places[:, None, :, None]
        scale = shape.head_dim**-0.5
        scores = [(q @ first.keys.transpose(2, 3) * scale).masked_fill(hidden, -torch.inf)]
        scores += [(q * one.keys).sum(-1, keepdim=True) * scale for one in later]
        weights = torch.cat([one.float() for one in scores], -1).softmax(-1).to(q.dtype)
        length = first.keys.shape[2]
        out = weights[..., :length] @ first.values
        for number, one in enumerate(later):
            out = out + weights[..., length + number, None] * one.values
        return self.o_proj(out.transpose(1, 2).flatten(2)), own

    def _heads(self, projection: nn.Linear, x: Tensor) -> Tensor:
        """[B, T, 2H] → [B, heads, T, D]."""
        return projection(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)


def rotated(x: Tensor, positions: Tensor, shape: HeadShape) -> Tensor:
    """Rotate the halves of heads by their positions. x: [B, heads, T, D], positions: [B, T]."""
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32, device=x.device) / shape.head_dim
    angles = positions[:, None, :, None].float() * shape.rope_theta**-exponents
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    one, other = x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class HeadMLP(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class HeadLayer(nn.Module):
    """The one layer of a head."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.norm_before_residual = shape.norm_before_residual
        self.self_attn = HeadAttention(shape)
        self.mlp = HeadMLP(shape)
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden_size, eps=shape.eps)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.eps)

    def forward(
        self, embeds: Tensor, state: Tensor, positions: Tensor, earlier: list[Keys], places: Tensor | None = None
    ) -> tuple[Tensor, Keys]:
        normed = self.hidden_norm(state)
        residual = normed if self.norm_before_residual else state
        x, keys = self.self_attn(torch.cat([self.input_layernorm(embeds), normed], -1), positions, earlier, places)
        if places is not None and not earlier:
            residual = residual.take_along_dim(places[..., None], 1)
        residual = residual + x
        return residual + self.mlp(self.post_attention_layernorm(residual)), keys


class Eagle3Head(nn.Module):
    """A whole head, with an embedding and an LM head of its own."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.num_states * shape.target_hidden_size
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.fc = nn.Linear(width, shape.hidden_size, bias=False)
        if shape.norm_before_fc:
            self.input_norm = nn.RMSNorm(width, eps=shape.eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList(
                nn.RMSNorm(shape.target_hidden_size, eps=shape.eps) for _ in range(shape.num_states)
            )
        self.midlayer = HeadLayer(shape)
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.eps)
        self.lm_head = nn.Linear(shape.hidden_size, shape.draft_vocab_size, bias=False)

    def combine(self, states: Tensor) -> Tensor:
        """Make the head's state of the target's hidden states: [B, T, states × target H] → [B, T, H]."""
        if self.shape.norm_before_fc:
            states = self.input_norm(states)
        if self.shape.fc_norm:
            parts = states.chunk(self.shape.num_states, -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(states)

    def forward(
        self,
        ids: Tensor,
        state: Tensor,
        positions: Tensor,
        earlier: list[Keys],
        places: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Keys]:
        """Run one pass over tokens and positions [B, T] and states [B, T, H]: → logits [B, T, draft vocabulary], the
        states of the next pass, and the keys of this one. `places`: see `HeadAttention.forward`."""
        state, keys = self.midlayer(self.embed_tokens(ids), state, positions, earlier, places)
        normed = self.norm(state)
        return self.lm_head(normed), normed if self.shape.norm_output else state, keys
