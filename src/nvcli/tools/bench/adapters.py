"""LoRA adapters of a benchmark: those made up for it, how requests are spread over them, and `--lora-mode`: whether
they are merged in turn or batched, with requests in the order of a job's.

Made-up adapters are folders in PEFT's format that engines read like any others. They change every linear layer that may
differ by row: those of attention, MLPs and shared experts. All of them share one file of random matrices, which takes
as much disk as a single adapter; a device and host memory hold each of them separately.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from nvcli.core.config import RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.lora_config import LoraConfig, LoraMode, adapter_choice
from nvcli.engine.request import Request
from nvcli.errors import ConfigError
from nvcli.job.planning.adapter_costs import AdapterWork
from nvcli.job.run.adapter_modes import choose_by_cost, find_modes
from nvcli.models.adapters.adapter import Adapter
from nvcli.models.adapters.row_adapters import linear_tensors
from nvcli.models.config import ModelConfig
from nvcli.models.other_checkpoints import ADAPTER_CONFIG, ADAPTER_WEIGHTS

_UP_SIZE = 0.01
"""Standard deviation of B's values, so that the products stay small beside those of the base model."""


def write_adapters(model: ModelConfig, folder: Path, *, rank: int, num_adapters: int, seed: int) -> LoraConfig:
    """Write `num_adapters` adapters of a rank into a folder, and return the key `lora` that names them.

    `model` is the checkpoint's own configuration (`load_model_config`). Raises ConfigError if the model has no linear
    layer that may differ by row.
    """
    layout = model.decoder.layout
    shapes = {
        layout.stored_modules(tensor.name.removesuffix(".weight"))[0]: tensor.shape for tensor in linear_tensors(model)
    }
    if not shapes:
        raise ConfigError("--lora-rank: the model has no linear layers that adapters of single rows can change")
    weights = folder / ADAPTER_WEIGHTS
    save_file(dict(_matrices(shapes, rank, seed)), weights)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": "all-linear"}
    adapters = {}
    for number in range(1, num_adapters + 1):
        adapter = folder / f"adapter-{number}"
        adapter.mkdir()
        (adapter / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
        os.link(weights, adapter / ADAPTER_WEIGHTS)
        adapters[str(number)] = str(adapter)
    return LoraConfig(adapters=adapters)


def spread_over_adapters(requests: Sequence[Request], num_adapters: int, *, seed: int) -> list[Request]:
    """Give every row one of `num_adapters` adapters, each to equally many rows (one more at most), in random order."""
    rows = list(dict.fromkeys(request.row for request in requests))
    numbers = np.random.default_rng(seed).permutation(np.arange(len(rows)) % num_adapters) + 1
    adapters = dict(zip(rows, numbers.tolist(), strict=True))
    return [msgspec.structs.replace(request, adapter=adapters[request.row]) for request in requests]


def _matrices(shapes: Mapping[str, tuple[int, ...]], rank: int, seed: int) -> Iterator[tuple[str, NDArray[np.float16]]]:
    """Yield the name and the values of A [rank, in] and B [out, rank] of each module. `shapes`: [out, in]."""
    rng = np.random.default_rng(seed)
    for module, (out_features, in_features) in shapes.items():
        down = in_features**-0.5 * rng.standard_normal((rank, in_features), dtype=np.float32)
        up = _UP_SIZE * rng.standard_normal((out_features, rank), dtype=np.float32)
        yield f"base_model.model.{module}.lora_A.weight", down.astype(np.float16)
        yield f"base_model.model.{module}.lora_B.weight", up.astype(np.float16)


def in_mode(run: RunConfig, mode: LoraMode | None) -> RunConfig:
    """Return the run with its named adapters served in a mode; None: as `lora.mode` says. Raises ConfigError for an
    adapter without a name."""
    if mode is None or run.lora is None:
        return run
    choice = adapter_choice(run.lora)
    if choice.merged is not None:
        raise ConfigError(
            f"--lora-mode {mode} is for adapters with names, but {choice.merged} is for all requests and always "
            "merged: give it a name (--lora NAME=PATH), or leave --lora-mode out"
        )
    lora = LoraConfig(adapters=dict(choice.named), max_loaded=choice.max_loaded, mode=mode)
    return msgspec.structs.replace(run, lora=lora)


def merge_by_cost(
    config: EngineConfig,
    requests: Sequence[Request],
    run: RunConfig,
    adapters: Mapping[str, Adapter],
    model: ModelConfig,
) -> EngineConfig:
    """Return the settings with the adapters merged that are worth it for these requests."""
    answers: dict[int, list[int]] = defaultdict(list)
    for request in requests:
        answers[request.adapter] += [request.max_tokens] * request.n
    work = {
        number: AdapterWork(num_requests=len(lengths), answer_tokens=sum(lengths) / len(lengths))
        for number, lengths in answers.items()
    }
    known = list(adapters.values())
    modes = find_modes(adapter_choice(run.lora), known, model)
    return msgspec.structs.replace(config, merged_adapters=choose_by_cost(work, config, known, model, modes))


def in_turns(requests: Sequence[Request], merged: Collection[int]) -> list[Request]:
    """Return the requests adapter by adapter, as a job's are given out, those of merged adapters last."""
    return sorted(requests, key=lambda request: (request.adapter in merged, request.adapter))
