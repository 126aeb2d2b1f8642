"""Reads layers of Mamba-2 (https://arxiv.org/abs/2405.21060) from config.json, for all families that have them."""

from __future__ import annotations

import math

from nvcli.core.validation import show
from nvcli.models.families.model_file import FULL, LINEAR, ModelFile
from nvcli.models.mixers.mamba import MambaConfig

ATTENTION, MAMBA = (FULL, "attention"), (LINEAR, "mamba")
"""Names of the kinds of layers in files, the newer one first."""
MAX_STATE = 256
"""The largest state size and head size that kernels compute."""
_NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""Limits of step sizes that limit nothing, as older and newer files spell them."""


def read_mamba(config: ModelFile, inner_size: int | None = None) -> MambaConfig:
    """Read the Mamba layers. `inner_size` is the size of all heads; None: `mamba_expand` times the hidden size.

    Raises LoadError for sizes that do not fit together, and for what the layers do not compute: another activation, and
    step sizes with limits.
    """
    num_heads, num_groups = config.positive("mamba_n_heads"), config.positive("mamba_n_groups")
    if num_heads % num_groups:
        raise config.error(
            "mamba_n_groups", f"{num_groups} does not divide {num_heads} heads (`{config.name('mamba_n_heads')}`)"
        )
    if inner_size is None:
        inner_size = config.positive("mamba_expand") * config.positive("hidden_size")
    if config.values.get("mamba_d_head") in (None, "auto"):
        head_dim = inner_size // num_heads
    else:
        head_dim = config.positive("mamba_d_head", most=MAX_STATE)
    if head_dim * num_heads != inner_size or head_dim > MAX_STATE:
        raise config.error(
            "mamba_d_head",
            f"{num_heads} heads (`{config.name('mamba_n_heads')}`) of {head_dim} do not make {inner_size:,} features",
        )
    if (activation := config.get("hidden_act", str, "silu")) not in ("silu", "swish"):
        raise config.error("hidden_act", f"{show(activation)} is not supported here; supported: silu")
    limit = config.values.get("time_step_limit")
    if limit is not None and limit not in _NO_LIMITS:
        raise config.error("time_step_limit", f"{show(limit)} is not supported; supported: no limits (0 and infinity)")
    return MambaConfig(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=config.positive("mamba_d_state", most=MAX_STATE),
        conv_taps=config.conv_taps("mamba_d_conv"),
        norm_eps=config.positive_number("rms_norm_eps"),
        conv_bias=config.get("mamba_conv_bias", bool, True),
        bias=config.get("mamba_proj_bias", bool, False),
    )
