"""The mixture of experts of DeepSeek-V3 (https://arxiv.org/abs/2412.19437), which several families have taken over:
experts are chosen by sigmoid scores with a correction, from the best groups of them, beside experts that all tokens
share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.models.checkpoint_layout import CheckpointLayout
from nvcli.models.families.model_file import ModelFile
from nvcli.models.layer_config import DecoderConfig, LayerConfig
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.mixers.mixer import Mixer
from nvcli.models.mixers.mlp import MLPConfig
from nvcli.models.mtp_config import MTPConfig, names_of_layer

SHARED_EXPERT = (".shared_experts.", ".shared_expert.")
"""The names of shared experts in files and in the decoder."""
CORRECTION_BESIDE_GATE = (".mlp.e_score_correction_bias", ".mlp.gate.e_score_correction_bias")
"""The name of corrections in files that have them beside the router, and in the decoder."""
_MOST_LEFT = 8
"""The most layers for multi-token prediction that are left on disk."""


def read_experts(
    config: ModelFile, *, renormalises: bool = True, shared_key: str = "n_shared_experts"
) -> ExpertsConfig:
    """Read the experts. `renormalises` is the default of `norm_topk_prob`; the number of shared experts is under
    `shared_key`."""
    keys = ("n_routed_experts", "num_local_experts", "num_experts")
    routing = config.sigmoid_routing(keys=keys, renormalise=config.get("norm_topk_prob", bool, renormalises))
    return config.experts(
        config.routing_with_groups(routing),
        has_correction=True,
        has_wide_router=True,
        shared=shared_experts(config, shared_key),
    )


def shared_experts(config: ModelFile, count_key: str) -> MLPConfig | None:
    """Read the number of shared experts from `count_key`; they form one MLP. None: there are none."""
    count = config.get(count_key, int, 0)
    if count == 0:
        return None
    size = config.positive("moe_intermediate_size") * config.positive(count_key)
    return MLPConfig(intermediate_size=size, activation=config.activation())


def read_limits(config: ModelFile, key: str) -> list[float | None]:
    """Read a list of what layers are clamped to, which has an entry for each, and may have others behind them; 0, null
    and an absent list clamp nothing."""
    found = config.of_layers(key, may_be_longer=True) or [None] * config.num_layers()
    limits = {str(number): limit or None for number, limit in enumerate(found)}
    if any(limits.values()):
        _check_silu(config, key)
    return [config.with_values(limits, f"{config.section}{key}.").optional_number(number, None) for number in limits]


def read_limit(config: ModelFile) -> float | None:
    """Read `swiglu_limit`, to which gates and up projections are clamped; 0 or less clamps nothing."""
    limit = config.get("swiglu_limit", float, 10.0)
    if limit <= 0:
        return None
    _check_silu(config, "swiglu_limit")
    return limit


def _check_silu(config: ModelFile, key: str) -> None:
    if config.activation().kind != "silu":
        raise config.error("hidden_act", f"only silu is supported together with `{key}`")


def with_limits(
    mlp: MLPConfig | ExpertsConfig,
    limit: float | None,
    of_shared: float | None,
    *,
    kind: Literal["clamped_silu", "clamped_swiglu"] = "clamped_silu",
) -> MLPConfig | ExpertsConfig:
    """Return experts that are clamped to a `limit`, and a shared one or a dense MLP to its own; None: they are not.
    `kind`: whether gates are clamped after their activation, or before it."""

    def clamped(activation: ExpertActivation, limit: float | None) -> ExpertActivation:
        return activation if limit is None else ExpertActivation(kind=kind, limit=limit)

    if isinstance(mlp, MLPConfig):
        return replace(mlp, activation=clamped(mlp.activation, of_shared))
    shared = mlp.shared
    if isinstance(shared, MLPConfig):
        shared = replace(shared, activation=clamped(shared.activation, of_shared))
    return replace(mlp, activation=clamped(mlp.activation, limit), shared=shared)


def layout_without_predictions(config: ModelFile) -> CheckpointLayout:
    """Return the layout of files whose last layers, for multi-token prediction, stay on disk unless a run drafts tokens
    by them (`read_with_predictions`)."""
    layers = config.num_layers()
    count = min(config.get("num_nextn_predict_layers", int, 0), _MOST_LEFT)
    left = tuple(f"model.layers.{layers + number}." for number in range(count))
    return CheckpointLayout(renamed=(SHARED_EXPERT,), left=left)


def read_with_predictions(
    config: ModelFile,
    attention: Mixer,
    is_sparse: Iterable[bool] | None = None,
    mixers: Sequence[Mixer] | None = None,
) -> DecoderConfig:
    """Read a decoder, and the head that the first of its layers for multi-token prediction makes. `is_sparse`: which
    layers have experts; None: those after the first dense ones. `mixers`: those of the layers; None: all have
    `attention`, as the head does."""
    experts = read_experts(config)
    if is_sparse is None:
        mlps = first_layers_dense(config, experts)
    else:
        dense = config.mlp()
        mlps = [experts if sparse else dense for sparse in is_sparse]
    mixers = mixers or [attention] * len(mlps)
    layers = [LayerConfig(mixer=mixer, mlp=mlp) for mixer, mlp in zip(mixers, mlps, strict=True)]
    norm, head = config.rms_norm(), None
    if config.get("num_nextn_predict_layers", int, 0) > 0:
        layer = LayerConfig(mixer=attention, mlp=experts)
        names = names_of_layer(layer, f"model.layers.{config.num_layers()}.")
        head = MTPConfig(layer=layer, norm=norm, stored_names=names)
    return config.decoder(layers, norm=norm, layout=layout_without_predictions(config), mtp=head)


def first_layers_dense(
    config: ModelFile, experts: ExpertsConfig, count_key: str = "first_k_dense_replace", default: int = 0
) -> list[MLPConfig | ExpertsConfig]:
    """Return the MLP of each layer: the first ones are dense, and `count_key` is their number."""
    first, count = config.get(count_key, int, default), config.num_layers()
    dense = [config.mlp()] * min(first, count)
    return [*dense, *[experts] * (count - len(dense))]
