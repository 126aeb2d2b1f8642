"""`nvcli bench --lora-mode`: adapters that are merged in turn or batched, and requests in the order of a job's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

import msgspec

from nvcli.core.config import RunConfig
from nvcli.core.engine_config import EngineConfig
from nvcli.core.lora_config import LoraConfig, LoraMode, adapter_choice
from nvcli.engine.request import Request
from nvcli.errors import ConfigError
from nvcli.job.planning.adapter_costs import AdapterWork
from nvcli.job.run.adapter_modes import choose_by_cost, find_modes
from nvcli.models.adapters.adapter import Adapter
from nvcli.models.config import ModelConfig


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
