"""What the families with a mixture of experts read alike from config.json. Errors name the file and the key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from nvcli.kernels.expert_settings import GatedActivation, Routing
from nvcli.models.families.reading import read_activation
from nvcli.models.json_file import JsonFile
from nvcli.models.layer_config import DecoderConfig, index_kinds
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.mixers.mlp import MLPConfig

MAX_EXPERTS = 1024
"""The most experts of a layer; more than any has."""
NUM_EXPERTS = ("num_experts", "num_local_experts")
"""How most families spell the number of experts of a layer."""


def read_routing(
    config: JsonFile, *, keys: tuple[str, ...] = NUM_EXPERTS, chosen_key: str = "num_experts_per_tok", **settings: Any
) -> Routing:
    """Read how many experts there are, under one of `keys`, and how many of them a token has, under `chosen_key`.
    `settings` are the other fields of `Routing`."""
    key = next((key for key in keys if config.values.get(key) is not None), keys[0])
    num_experts = config.positive(key, most=MAX_EXPERTS)
    experts_per_token = config.positive(chosen_key)
    if experts_per_token > num_experts:
        raise config.error(chosen_key, f"{experts_per_token} is more than `{key}`, {num_experts}")
    return Routing(num_experts=num_experts, experts_per_token=experts_per_token, **settings)


def read_experts(
    config: JsonFile, routing: Routing, *, size_key: str = "moe_intermediate_size", **settings: Any
) -> ExpertsConfig:
    """Read the experts' size, under `size_key`, and their activation. `settings` are fields of `ExpertsConfig`."""
    settings.setdefault("activation", GatedActivation(kind=read_activation(config)))
    return ExpertsConfig(routing=routing, intermediate_size=config.positive(size_key), **settings)


def with_mlps(decoder: DecoderConfig, mlps: Iterable[MLPConfig | ExpertsConfig]) -> DecoderConfig:
    """Return the decoder with these MLPs in its layers, one for each."""
    layers = (replace(layer, mlp=mlp) for layer, mlp in zip(decoder.layers, mlps, strict=True))
    kinds, kind_of_layer = index_kinds(layers)
    return replace(decoder, layer_kinds=kinds, kind_of_layer=kind_of_layer)


def read_groups(config: JsonFile, routing: Routing) -> Routing:
    """Read the groups that experts are chosen from, under `n_group` and `topk_group`."""
    if config.values.get("n_group") is None:
        return routing
    num_groups, chosen = config.positive("n_group"), config.positive("topk_group")
    size, remainder = divmod(routing.num_experts, num_groups)
    if remainder:
        raise config.error("n_group", f"{num_groups} groups do not divide {routing.num_experts} experts")
    if chosen < num_groups and size < 2:
        raise config.error("n_group", f"{num_groups} groups have one expert each, and their two best ones count")
    if chosen > num_groups or chosen * size < routing.experts_per_token:
        raise config.error("topk_group", f"{chosen} groups of {num_groups} have too few experts for a token")
    return replace(routing, num_groups=num_groups, groups_per_token=chosen)
