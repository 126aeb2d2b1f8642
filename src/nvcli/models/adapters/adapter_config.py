"""AdapterConfig: what PEFT's adapter_config.json says. Torch-free.

Keys that change what an adapter computes are read or refused by name; those that concern only training (dropout, weight
initialisation) are ignored. Names of modules are those of the model in transformers, as PEFT writes them. Source of all
rules: peft 0.21, `tuners/tuners_utils.py` and `tuners/lora`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvcli.core.config_types import MAX_INT32
from nvcli.core.validation import is_integer, show
from nvcli.models.json_file import JsonFile
from nvcli.models.other_checkpoints import ADAPTER_CONFIG
from nvcli.models.patterns import BadPattern, compile_pattern

MAX_RANK = 1 << 16
_ALL_LINEAR = "all-linear"
_EMBEDDINGS = ("embed_tokens", "lm_head")
"""Modules that `all-linear` leaves out."""
_CHANGES_NO_BASE = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that leave the base model unchanged."""
_REFUSED = {
    "alora_invocation_tokens": "it is active from some token on, and is not served",
    "layer_replication": "models with repeated layers are not served",
    "kasa_config": "it replaces the base model's weights, and is not served",
}
"""Keys whose effect is not supported, unless they are null or empty."""
_KNOWN_SWITCHES = ("use_rslora", "use_dora")
_KNOWN_SETTINGS = ("loftq_config", "eva_config", "corda_config", "lora_ga_config", "runtime_config", "megatron_config")
"""Settings of the initialisation (`init_lora_weights`) or of training."""
ADAPTER_FOLDER = "a LoRA adapter is a folder that peft wrote, with adapter_config.json and adapter_model.safetensors"
MERGE_IT = "merge it into its base model with peft's merge_and_unload, and give the result as --model"
_LAYER = re.compile(r".*?\.[^.]*\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """The settings of a LoRA adapter."""

    file: JsonFile
    base: str | None
    """The name of its base model; None if the file does not say."""
    rank: int
    alpha: float
    scales_by_root: bool
    """Whether products are scaled by alpha / √rank (rsLoRA) rather than alpha / rank."""
    rank_pattern: tuple[tuple[re.Pattern[str], float], ...]
    alpha_pattern: tuple[tuple[re.Pattern[str], float], ...]
    uses_dora: bool
    saves_biases: bool
    """Whether the adapter brings biases that replace those of the base model."""
    adds_biases: bool
    """Whether its products have a bias (`lora_bias`)."""
    targets: TargetModules
    target_parameters: tuple[str, ...]
    """Name suffixes of parameters that belong to no linear layer, such as stacks of experts."""
    modules_to_save: tuple[str, ...]
    """Name suffixes of modules whose weights it replaces."""
    token_ids: Mapping[str, tuple[int, ...]]
    """Suffix of an embedding's name → the tokens whose rows it replaces."""
    ties_weights: bool
    """Whether changes to the embedding also apply to an LM head that is tied to it."""

    def scaling(self, module: str) -> tuple[int, float]:
        """Return the rank of a module's matrices, and the number by which their product is multiplied."""
        rank = int(_of_pattern(self.rank_pattern, module, self.rank))
        alpha = _of_pattern(self.alpha_pattern, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.scales_by_root else rank)

    def chooses_parameter(self, name: str) -> bool:
        """Whether `target_parameters` names a parameter."""
        return any(name == end or name.endswith(f".{end}") for end in self.target_parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetModules:
    """The rules that choose the modules that an adapter changes."""

    names: frozenset[str]
    """Names, or whole words at the end of names."""
    pattern: re.Pattern[str] | None
    """A pattern for whole names, in place of `names`."""
    takes_all: bool
    """Whether all linear layers but the LM head are chosen."""
    excluded_names: frozenset[str]
    excluded_pattern: re.Pattern[str] | None
    layers: frozenset[int]
    """The layers in which `names` apply; empty: all."""
    layer_patterns: tuple[re.Pattern[str], ...]
    """Patterns that find the number of a module's layer; none: it is the first number in the name."""

    def problem(self, module: str) -> str | None:
        """Return the key that leaves a module out; None: the module is chosen."""
        ends = _ends(module)
        if not self.excluded_names.isdisjoint(ends) or _matches(self.excluded_pattern, module):
            return "exclude_modules"
        if self.takes_all:
            return None if ends[-1] not in _EMBEDDINGS else "target_modules"
        if self.pattern is not None:
            return None if self.pattern.fullmatch(module) else "target_modules"
        if self.names and self.names.isdisjoint(ends):
            return "target_modules"
        if module in self.names:  # PEFT looks at layers only where a name is matched by its end
            return None
        if self.layers and self._layer(module) not in self.layers:
            return "layers_to_transform"
        return None

    def _layer(self, module: str) -> int | None:
        patterns = self.layer_patterns or (_LAYER,)
        found = next((match for pattern in patterns if (match := pattern.match(module))), None)
        return None if found is None else int(found[1])


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json in a folder. Raises LoadError naming the file and the key."""
    file = JsonFile.read(folder / ADAPTER_CONFIG, what=ADAPTER_FOLDER)
    kind = file.values.get("peft_type")
    if kind not in ("LORA", None):
        raise file.error("peft_type", f"{show(kind)} is not supported; supported: LORA; {MERGE_IT}")
    _refuse_variants(file)
    rank = file.positive("r", most=MAX_RANK)
    bias = file.get("bias", str, "none")
    if bias not in ("none", "all", "lora_only"):
        raise file.error("bias", f"{show(bias)} is not supported; supported: none, all, lora_only")
    return AdapterConfig(
        file=file,
        base=file.get("base_model_name_or_path", str, "") or None,
        rank=rank,
        alpha=_alpha(file, file.values.get("lora_alpha"), "lora_alpha", default=8.0),
        scales_by_root=file.get("use_rslora", bool, False),
        rank_pattern=tuple(_numbers(file, "rank_pattern", _rank)),
        alpha_pattern=tuple(_numbers(file, "alpha_pattern", _alpha)),
        uses_dora=file.get("use_dora", bool, False),
        saves_biases=bias != "none",
        adds_biases=file.get("lora_bias", bool, False),
        targets=_targets(file),
        target_parameters=_names(file, "target_parameters"),
        modules_to_save=_names(file, "modules_to_save"),
        token_ids=_token_ids(file),
        ties_weights=file.get("ensure_weight_tying", bool, False),
    )


def _refuse_variants(file: JsonFile) -> None:
    """Raise LoadError for a key that makes the adapter something other than W + B A, in this version of PEFT or
    another."""
    for key, why in _REFUSED.items():
        if file.values.get(key):
            raise file.error(key, f"{why}; {MERGE_IT}")
    begin = file.values.get("init_lora_weights", True)
    begin = begin.lower() if isinstance(begin, str) else begin
    if begin is not None and not any(begin is known or begin == known for known in _CHANGES_NO_BASE):
        raise file.error(
            "init_lora_weights",
            f"{show(begin)} changes the base model's weights too; save the adapter again with "
            "path_initial_model_for_weight_conversion, or merge it",
        )
    for key, value in file.values.items():
        is_variant = key.startswith("use_") and key not in _KNOWN_SWITCHES
        is_variant |= key.endswith("_config") and key not in _KNOWN_SETTINGS
        if is_variant and value:
            raise file.error(key, f"{show(value)} is not supported; {MERGE_IT}")


def _targets(file: JsonFile) -> TargetModules:
    targets, excluded = file.values.get("target_modules"), file.values.get("exclude_modules")
    takes_all = isinstance(targets, str) and targets.lower() == _ALL_LINEAR
    pattern = targets if isinstance(targets, str) and not takes_all else None
    layers = file.values.get("layers_to_transform")
    layers = [layers] if isinstance(layers, int) else layers or []
    if not isinstance(layers, list) or not all(is_integer(one, 0, MAX_INT32) for one in layers):
        raise file.error("layers_to_transform", f"{show(layers)} is not a layer's number or a list of them")
    found = file.values.get("layers_pattern") or []
    layer_patterns = [found] if isinstance(found, str) else _names(file, "layers_pattern")
    return TargetModules(
        names=frozenset(() if isinstance(targets, str) else _names(file, "target_modules")),
        pattern=None if pattern is None else _compile(file, "target_modules", pattern),
        takes_all=takes_all,
        excluded_names=frozenset(() if isinstance(excluded, str) else _names(file, "exclude_modules")),
        excluded_pattern=_compile(file, "exclude_modules", excluded) if isinstance(excluded, str) else None,
        layers=frozenset(layers),
        layer_patterns=tuple(
            _compile(file, "layers_pattern", one, rf"(?:^|.*?\.)(?:{one})\.(\d+)\.") for one in layer_patterns if one
        ),
    )


def _names(file: JsonFile, key: str) -> tuple[str, ...]:
    """Read a list of names; absent or null: none."""
    found = file.values.get(key) or []
    if not isinstance(found, list) or not all(isinstance(name, str) and name for name in found):
        raise file.error(key, f"{show(found)} is not a list of names")
    return tuple(found)


def _numbers(
    file: JsonFile, key: str, read: Callable[[JsonFile, Any, str], float]
) -> Iterator[tuple[re.Pattern[str], float]]:
    """Read a mapping of patterns to numbers. A pattern matches a whole name, or whole words at its end."""
    found = file.values.get(key) or {}
    if not isinstance(found, dict):
        raise file.error(key, f"{show(found)} is not a mapping of names to numbers")
    for pattern, value in found.items():
        yield _compile(file, key, pattern, rf"(?:.*\.)?(?:{pattern})$"), read(file, value, f"{key}.{show(pattern)}")


def _rank(file: JsonFile, value: Any, key: str) -> float:
    if not is_integer(value, 1, MAX_RANK):
        raise file.error(key, f"{show(value)} is not a rank; allowed: from 1 to {MAX_RANK:,}")
    return value


def _alpha(file: JsonFile, value: Any, key: str, default: float | None = None) -> float:
    value = default if value is None else value
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) <= MAX_INT32:  # NaN is not
        raise file.error(key, f"{show(value)} is not a number that products can be scaled by")
    return float(value)


def _token_ids(file: JsonFile) -> dict[str, tuple[int, ...]]:
    """Read the tokens whose rows are replaced: a list for the model's embedding, or one for each embedding."""
    key = "trainable_token_indices"
    found = file.values.get(key) or {}
    lists = {_EMBEDDINGS[0]: found} if isinstance(found, list) else found
    if not isinstance(lists, dict):
        raise file.error(key, f"{show(found)} is not a list of token ids")
    for ids in lists.values():
        if not isinstance(ids, list) or not all(is_integer(one, 0, MAX_INT32) for one in ids):
            raise file.error(key, f"{show(ids)} is not a list of token ids")
        if len(set(ids)) < len(ids):
            raise file.error(key, f"{show(ids)} has a token twice")
    return {name: tuple(ids) for name, ids in lists.items()}


def _compile(file: JsonFile, key: str, pattern: str, expression: str | None = None) -> re.Pattern[str]:
    try:
        return compile_pattern(pattern, expression)
    except BadPattern as error:
        raise file.error(key, f"the pattern {show(pattern)} {error}; write the modules' names there") from None


def _of_pattern(patterns: tuple[tuple[re.Pattern[str], float], ...], module: str, default: float) -> float:
    return next((value for pattern, value in patterns if pattern.match(module)), default)


def _matches(pattern: re.Pattern[str] | None, module: str) -> bool:
    return pattern is not None and pattern.fullmatch(module) is not None


def _ends(module: str) -> list[str]:
    """Return a name and all its endings that consist of whole words, the longest first."""
    words = module.split(".")
    return [".".join(words[first:]) for first in range(len(words))]
