"""Reads layers of Mamba-2 (https://arxiv.org/abs/2405.21060) from config.json, for all families that have them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nvcli.core.validation import show
from nvcli.models.families.model_file import FULL, LINEAR, ModelFile
from nvcli.models.mixers.mamba import MambaConfig

ATTENTION, MAMBA = (FULL, "attention"), (LINEAR, "mamba")
"""Names of the kinds of layers in files, the newer one first."""
MAX_STATE = 256
"""The largest state size and head size that kernels compute."""
_NO_LIMITS = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
"""Limits of step sizes that limit nothing, as older and newer files spell them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaKeys:
    """Names of the keys that describe Mamba layers."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    groups: str = "mamba_n_groups"
    state: str = "mamba_d_state"
    taps: str = "mamba_d_conv"
    conv_bias: str = "mamba_conv_bias"
    bias: str = "mamba_proj_bias"
    activation: str = "hidden_act"
    eps: str = "rms_norm_eps"


COMMON_KEYS = MambaKeys()


def read_mamba(config: ModelFile, keys: MambaKeys = COMMON_KEYS, *, inner_size: int | None = None) -> MambaConfig:
    """Read the Mamba layers. `inner_size` is the size of all heads; None: `mamba_expand` times the hidden size.

    Raises LoadError for sizes that do not fit together, and for what the layers do not compute: another activation, and
    step sizes with limits.
    """
    num_heads, num_groups = config.positive(keys.heads), config.positive(keys.groups)
    if num_heads % num_groups:
        raise config.error(keys.groups, f"{num_groups} does not divide {num_heads} heads (`{keys.heads}`)")
    if inner_size is None:
        inner_size = config.positive("mamba_expand") * config.positive("hidden_size")
    if config.values.get(keys.head_dim) in (None, "auto"):
        head_dim = inner_size // num_heads
    else:
        head_dim = config.positive(keys.head_dim, most=MAX_STATE)
    if head_dim * num_heads != inner_size or head_dim > MAX_STATE:
        raise config.error(
            keys.head_dim, f"{num_heads} heads (`{keys.heads}`) of {head_dim} do not make {inner_size:,} features"
        )
    if (activation := config.get(keys.activation, str, "silu")) not in ("silu", "swish"):
        raise config.error(keys.activation, f"{show(activation)} is not supported here; supported: silu")
    limit = config.values.get("time_step_limit")
    if limit is not None and limit not in _NO_LIMITS:
        raise config.error("time_step_limit", f"{show(limit)} is not supported; supported: no limits (0 and infinity)")
    return MambaConfig(
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_size=config.positive(keys.state, most=MAX_STATE),
        conv_taps=config.conv_taps(keys.taps),
        norm_eps=config.positive_number(keys.eps),
        conv_bias=config.get(keys.conv_bias, bool, True),
        bias=config.get(keys.bias, bool, False),
    )
