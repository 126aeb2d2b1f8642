"""Zamba 2 (https://arxiv.org/abs/2411.15242): layers of Mamba-2. Before some of them stands a block of attention and an
MLP, which reads the stream beside the embeddings; these layers share a few such blocks, and each adds products of low
rank to their weights.

Layers keep weights of their own, with the product added to each: they take the memory of as many blocks as there are
such layers, and no time for the products."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.family import Family
from nvcli.models.families.mamba import MAMBA, read_mamba
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import NORM_OF_BESIDE, TO_BESIDE, DecoderConfig, LayerConfig, LayerNorms
from nvcli.models.mixers.attention import AttentionConfig

_HYBRID = "hybrid"
_NAMES = (
    (".shared_transformer.feed_forward.", ".mlp."),
    (".shared_transformer.", "."),
    (".mamba_decoder.input_layernorm.", f".{NORM_OF_BESIDE}."),
    (".mamba_decoder.", "."),
    (".linear.", f".{TO_BESIDE}."),
    ("model.final_layernorm.", "model.norm."),
)
_SHARED = ("self_attn.", "mlp.", "input_layernorm.", "pre_ff_layernorm.")
"""The parts of a layer that are shared."""
_MAMBA_EPS = 1e-5
"""The epsilon of the norm of Mamba's results, whatever that of the other norms is."""


def read(config: ModelFile) -> DecoderConfig:
    """Read Zamba 2. transformers keeps step sizes from falling below `time_step_min`, which few do; nvcli does not."""
    kinds = config.of_layers("layers_block_type", (_HYBRID, *MAMBA))
    if kinds is None:
        raise config.error("layers_block_type", "missing")
    bias = config.get("add_bias_linear", bool, False)
    hidden = config.positive("hidden_size")
    of_mamba = {"hidden_act": "silu", "rms_norm_eps": _MAMBA_EPS, "mamba_proj_bias": bias, "time_step_limit": None}
    mamba = read_mamba(config.replacing(**of_mamba))
    alone = LayerConfig(mixer=mamba, mlp=None, norms=LayerNorms(before_mlp=None))
    hybrid = LayerConfig(
        mixer=_attention(config.replacing(head_dim=None, hidden_size=2 * hidden)),
        beside=mamba,
        mlp=config.with_defaults({"intermediate_size": 4 * hidden}).mlp(default="gelu", bias=bias),
        norms=LayerNorms(before_mlp="pre_ff_layernorm"),
        reads_embeddings=True,
    )
    with_attention = [number for number, kind in enumerate(kinds) if kind == _HYBRID]
    return config.decoder(
        [hybrid if kind == _HYBRID else alone for kind in kinds], layout=_layout(config, with_attention)
    )


def _attention(config: ModelFile) -> AttentionConfig:
    """Read attention, out of settings whose hidden size is that of its input."""
    rope = config.rope() if config.get("use_mem_rope", bool, False) else None
    scale = (config.head_dim() / 2) ** -0.5
    return config.attention(rope=rope, scale=scale, input_size=config.positive("hidden_size"))


def _layout(config: ModelFile, layers: Sequence[int]) -> CheckpointLayout:
    """Return the layout of files that hold the blocks of the first of `layers`, which the others take in turn."""
    num_blocks = config.positive("num_mem_blocks", 1)
    owners = [layers[place % num_blocks] for place in range(len(layers))]
    projections = ["mlp.gate_up_proj"]
    if config.get("use_shared_attention_adapter", bool, False):
        projections += [f"self_attn.{name}_proj" for name in "qkv"]
    return CheckpointLayout(
        renamed=_NAMES,
        shared=tuple(_beginnings(layers, owners)),
        products=tuple(
            (f"model.layers.{layer}.{name}", f"model.layers.{owner}.{_adapters(name)}.{place}")
            for place, (layer, owner) in enumerate(zip(layers, owners, strict=True))
            for name in projections
        ),
    )


def _beginnings(layers: Iterable[int], owners: Iterable[int]) -> Iterable[tuple[str, str]]:
    for layer, owner in zip(layers, owners, strict=True):
        yield from ((f"model.layers.{layer}.{part}", f"model.layers.{owner}.{part}") for part in _SHARED)


def _adapters(projection: str) -> str:
    """Return the name of the list of matrices whose products are added to a projection, one for each layer."""
    block, _, name = projection.partition(".")
    return f"{block}.{name}_adapter_list" if block == "mlp" else f"{block}.linear_{name[0]}_adapter_list"


ZAMBA2 = Family(
    name="Zamba 2",
    architectures=("Zamba2ForCausalLM",),
    features="Mamba-2 layers; a few blocks of attention that layers share, with products of low rank of their own",
    examples=("Zyphra/Zamba2-7B-Instruct", "Zyphra/Zamba2-1.2B-instruct"),
    read=read,
    ties_embeddings=True,
    keys={"n_mamba_heads": "mamba_n_heads", "mamba_ngroups": "mamba_n_groups"},
    defaults={"mamba_expand": 2, "mamba_d_conv": 4, "mamba_d_state": 64, "mamba_n_groups": 1},
)
