"""Embedding settings of a checkpoint: which hidden states become a vector, what it goes through, and whether its length
is 1; and the prompts for texts.

The files are those of sentence-transformers: `modules.json` lists what follows the model, and each module's folder has
a `config.json` of its own. A checkpoint without them is assumed to normalise and to pool the last token, as embedding
models built on decoders do (Qwen3-Embedding, E5-Mistral), or all where they attend both ways. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, get_args

import msgspec

from nvcli.core.task_config import DenseActivation, DenseModule, PoolingName
from nvcli.core.validation import show
from nvcli.errors import LoadError
from nvcli.models.config_overrides import NO_OVERRIDES, with_overrides
from nvcli.models.json_file import JsonFile, read_json

MODULES_FILE, PROMPTS_FILE = "modules.json", "config_sentence_transformers.json"
_POOLINGS: dict[str, PoolingName] = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
"""sentence-transformers' names of the supported poolings."""
POOLING = "pooling"
CONFIG_POOLINGS: dict[str, PoolingName] = {"avg": "mean", "cls": "cls", "last": "last"}
"""The key of config.json by which NVIDIA's encoders say it, and its values."""
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Keys that select a pooling in older files; newer files have `pooling_mode`."""


class TextPrompts(NamedTuple):
    """The prompts that a checkpoint names for the texts to embed."""

    by_name: Mapping[str, str]
    default: str | None
    """The name of the one for texts of which nothing is said; None: there is none."""


def read_text_prompts(path: Path) -> TextPrompts:
    """Read the prompts of a checkpoint folder. Raises LoadError."""
    config = JsonFile.read_if_present(path / PROMPTS_FILE)
    prompts = config.object("prompts")
    by_name = {name: prompts.get(name, str, "") for name in prompts.values}
    key = "default_prompt_name"
    default = config.get(key, str, "") or None
    if default is not None and default not in by_name:
        raise config.error(key, f"{show(default)} is not among `prompts`: {', '.join(by_name) or 'none'}")
    return TextPrompts(by_name, default)


class EmbeddingFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Embedding settings from a checkpoint's files; None if the files say nothing."""

    pooling: PoolingName | None = None
    pools_prompts: bool = True
    """Whether a mean is also over the tokens of the prompt before a text."""
    dense: tuple[DenseModule, ...] = ()
    """The linear layers after the pooling, in order."""
    normalizes: bool | None = None


def read_embedding_files(path: Path, overrides: Mapping[str, Any] = NO_OVERRIDES) -> EmbeddingFiles:
    """Read what a checkpoint folder says about embeddings. `overrides` replace values of its config.json.

    Raises LoadError naming the file and the key, for a module or pooling that is not supported.
    """
    file = path / MODULES_FILE
    if not os.path.lexists(file):
        config = with_overrides(JsonFile.read(path / "config.json"), overrides)
        return EmbeddingFiles(pooling=config.choice(POOLING, CONFIG_POOLINGS, "last") if config.has(POOLING) else None)
    modules = read_json(file)
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise LoadError(f"{file}: holds no list of modules; download the file again")
    pooling: PoolingName | None = None
    pools_prompts, normalizes = True, False
    dense: list[DenseModule] = []
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind == "Pooling":
            config = _module_config(path, file, module)
            pooling, pools_prompts = _pooling(config), config.get("include_prompt", bool, True)
        elif kind == "Dense" and not normalizes:
            dense.append(_dense(_module_config(path, file, module), dense))
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            raise LoadError(
                f"{file}: `type` is {show(module.get('type'))}, which is not supported{' there' * (kind == 'Dense')}; "
                "supported: Transformer, Pooling, Dense, Normalize, in this order"
            )
    return EmbeddingFiles(pooling=pooling, pools_prompts=pools_prompts, dense=tuple(dense), normalizes=normalizes)


def _module_config(path: Path, file: Path, module: dict[str, Any]) -> JsonFile:
    """Read the settings of a module of `file`."""
    folder = module.get("path")
    if not isinstance(folder, str) or PurePosixPath(folder).is_absolute() or ".." in PurePosixPath(folder).parts:
        raise LoadError(f"{file}: `path` is {show(folder)}, which names no folder of the checkpoint")
    return JsonFile.read(path / folder / "config.json")


def _dense(config: JsonFile, before: Sequence[DenseModule]) -> DenseModule:
    """Read a linear layer that follows others."""
    config.only(module_input_name="sentence_embedding", module_output_name="sentence_embedding")
    in_size = config.positive("in_features")
    if before and before[-1].out_size != in_size:
        raise config.error("in_features", f"{in_size} is not the size of what is before it, {before[-1].out_size}")
    key = "activation_function"
    activation = config.get(key, str, "Tanh").rpartition(".")[2].lower()
    if activation not in get_args(DenseActivation):
        supported = "Identity, Tanh, ReLU, GELU"
        raise config.error(key, f"{show(config.values[key])} is not supported; supported: {supported}")
    return DenseModule(
        folder=config.path.parent,
        in_size=in_size,
        out_size=config.positive("out_features"),
        has_bias=config.get("bias", bool, True),
        activation=activation,  # type: ignore[arg-type]
    )


def _pooling(config: JsonFile) -> PoolingName:
    key = "pooling_mode"
    named = config.values.get(key)
    if named is None:
        given = [(flag, name) for flag, name in _FLAGS.items() if config.values.get(flag)]
        if len(given) != 1:
            what = "no pooling" if not given else " and ".join(flag for flag, _ in given)
            raise config.error(key, f"{what} selected; supported: exactly one of {', '.join(_POOLINGS)}")
        key, named = given[0]
    if named not in _POOLINGS:
        raise config.error(key, f"{show(named)} is not supported; supported: {', '.join(_POOLINGS)}")
    return _POOLINGS[named]
