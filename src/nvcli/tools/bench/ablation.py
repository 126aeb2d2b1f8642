"""`--ablate` switches parts of the engine off, one at a time, to show what each is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import msgspec

from nvcli.core.config_types import AttentionName
from nvcli.core.engine_config import EngineConfig
from nvcli.errors import ConfigError

_SWITCHES: dict[str, dict[str, bool]] = {
    "overlap": {"overlap_steps": False},
    "graphs": {"enforce_eager": True},
    "prefix-cache": {"enable_prefix_caching": False},
    "admission": {"plan_admission": False},
}
_BACKEND = "backend="


@dataclass(frozen=True, slots=True, kw_only=True)
class Ablation:
    """A configuration that differs from the benchmark's own in one setting."""

    name: str
    config: EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationResult:
    """The outcome of one ablation."""

    name: str
    output_rates: Sequence[float] = ()
    """Output tokens per second of each pass; empty if the ablation could not run."""
    output_rate: float | None = None
    """Output tokens per second of the median pass (of two, the slower)."""
    difference: float | None = None
    """Relative difference from the benchmark's own rate; -0.1: a tenth slower."""
    left_out: str | None = None
    """The reason why the ablation could not run."""


def parse_ablations(text: str, config: EngineConfig) -> list[Ablation]:
    """Parse a list such as `overlap,graphs,backend=torch`. Raises ConfigError, even for an entry that changes
    nothing."""
    ablations: list[Ablation] = []
    for name in text.split(","):
        name = name.strip()
        if name in (ablation.name for ablation in ablations):
            raise ConfigError(f"--ablate {name}: named twice; name it once")
        changed = msgspec.structs.replace(config, **_changes(name))
        if name == "graphs" and config.device == "cpu":
            raise ConfigError("--ablate graphs: there are no CUDA graphs on a CPU; leave it out")
        if changed == config:
            raise ConfigError(
                f"--ablate {name}: the run is already configured like this; leave it out, or change the configuration"
            )
        ablations.append(Ablation(name=name, config=changed))
    return ablations


def _changes(name: str) -> dict[str, bool] | dict[str, str]:
    if name in _SWITCHES:
        return _SWITCHES[name]
    backend = name.removeprefix(_BACKEND)
    backends = [known for known in get_args(AttentionName) if known != "auto"]
    if name.startswith(_BACKEND) and backend in backends:
        return {"attention_backend": backend}
    known = [*_SWITCHES, *(_BACKEND + backend for backend in backends)]
    raise ConfigError(f"--ablate {name}: allowed: one or more, separated by commas, of {', '.join(known)}")
