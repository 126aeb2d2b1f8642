"""Dory (https://huggingface.co/nvidia/NVIDIA-Nemotron-Labs-Dory1.0-4B-BF16): layers of nGPT
(https://arxiv.org/abs/2410.01131), some of which run several times, each time with keys and values of their own.

transformers keeps vectors at length 1, and this house at a mean square of 1: what multiplies a normed vector is divided
by the square root of its size instead. Layers that run again keep weights of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from nvcli.models.checkpoint_layout import CheckpointLayout, RowFactors
from nvcli.models.families.family import Family
from nvcli.models.families.model_file import FULL, SLIDING, ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.attention import OutputGate
from nvcli.models.mixers.mixer import NormConfig

_PARTS = (
    ("self_attn.", 0, "mixer."),
    ("mlp.", 1, "mixer."),
    ("lambda_1", 0, "attn_alpha"),
    ("lambda_2", 1, "mlp_alpha"),
)
"""The parts of a layer, which files may number as two, and their names there."""
_NORMS = LayerNorms(
    after_attention="after_attention", before_mlp="before_mlp", after_mlp="after_mlp", stream_factors=(1.0, 1.0)
)
"""The places of norms, which have no weights."""
_THETAS = {SLIDING: 10_000.0, FULL: 1e7}
_EPS = 1e-6
"""The epsilon of vectors' lengths."""
_MOST_LOOPS = 64


def read(config: ModelFile) -> DecoderConfig:
    """Read Dory. Raises LoadError for biases, which would grow with what they are added to, for a tied LM head, whose
    rows have factors, and for loops that share their keys and values."""
    config.only(attention_bias=False, mlp_bias=False, tie_word_embeddings=False, recurrent_kv_cache_mode="per_loop")
    listed, unit = config.values.get("layer_types"), 1
    if isinstance(listed, list) and "mlp" in listed:
        unit = 2
        config = config.replacing(layer_types=listed[::2], num_hidden_layers=config.num_layers() // 2)
    count = config.num_layers()
    num_inputs, num_outputs = (config.get(f"n_{part}_layers", int, 8) // unit for part in ("input", "output"))
    num_looped = config.get("n_recurrent_layers", int, unit * (count - num_inputs - num_outputs)) // unit
    if min(num_inputs, num_outputs) < 0 or num_looped < 1 or num_inputs + num_looped + num_outputs != count:
        found = f"{num_inputs} + {num_looped} + {num_outputs}"
        raise config.error("n_recurrent_layers", f"{found} layers before, in and after the loops are not {count}")
    kinds = config.layer_kinds(lambda number: (number + 1) % 4 == 0)
    layers = {kind: _layer(config, kind) for kind in (FULL, SLIDING)}
    stored = list(range(num_inputs))
    decoder = [layers[kinds[number]] for number in stored]
    for loop in range(config.positive("n_recurrent_loops", 2, most=_MOST_LOOPS)):
        numbers = range(num_inputs, num_inputs + num_looped)
        stored += numbers
        begins: Literal["first", "again"] = "again" if loop else "first"
        first, *others = (layers[kinds[number]] for number in numbers)
        decoder += [replace(first, loop=begins), *others]
    outputs = range(num_inputs + num_looped, count)
    init = config.positive_number("initializer_range", 0.0177)
    return config.decoder(
        [*decoder, *(layers[kinds[number]] for number in outputs)],
        norm=NormConfig(eps=_EPS / config.positive("hidden_size"), has_weight=False),
        rate_factor=config.positive_number("ngpt_alpha_init", 0.05) / init,
        layout=_layout(config, [*stored, *outputs], init),
    )


def _layer(config: ModelFile, kind: str) -> LayerConfig:
    attention = config.attention(
        rope=config.rope(_THETAS[kind], layer_type=kind),
        window=config.window_of(kind, 1024),
        qk_norm="head",
        weighs_norms=False,
        channel_factor=1 / config.positive_number("initializer_range", 0.0177),
        gate=OutputGate(),
        norms_row=True,
    )
    return LayerConfig(mixer=attention, mlp=config.mlp(norms_hidden=True), norms=_NORMS)


def _layout(config: ModelFile, stored: list[int], init: float) -> CheckpointLayout:
    """`stored`: the number in the files of each of the decoder's layers, of which two may make up one."""
    of_head = math.pow(config.positive("hidden_size"), -0.5) / init
    factors = [RowFactors("lm_head.weight", "lm_head.logit_scale", of_head)]
    beginnings: list[tuple[str, str]] = []
    for number, own in enumerate(stored):
        beginnings += _beginnings(number, own)
        layer = f"model.layers.{number}"
        factors += [
            RowFactors(f"{layer}.self_attn.g_proj.weight", f"{layer}.self_attn.s_gate", 1 / init, is_squared=True),
            RowFactors(f"{layer}.mlp.gate_proj.weight", f"{layer}.mlp.suv_gate"),
            RowFactors(f"{layer}.mlp.up_proj.weight", f"{layer}.mlp.suv_up"),
        ]
    return CheckpointLayout(
        starts=(("backbone.embeddings.", "model.embed_tokens."), ("backbone.", "model.")),
        renamed=((".self_attn.gate_proj.", ".self_attn.g_proj."),),
        shared=tuple(beginnings),
        row_factors=tuple(factors),
    )


def _beginnings(number: int, own: int) -> Iterator[tuple[str, str]]:
    for part, place, name in _PARTS:
        yield f"model.layers.{number}.{part}", f"model.layers.{own}.{part}"
        yield f"model.layers.{number}.{part}", f"model.layers.{2 * own + place}.{name}"


DORY = Family(
    name="Dory",
    architectures=("DoryForCausalLM",),
    features="normed streams that go towards results (nGPT), gates, windows; layers that run several times",
    examples=("nvidia/NVIDIA-Nemotron-Labs-Dory1.0-4B-BF16",),
    read=read,
)
