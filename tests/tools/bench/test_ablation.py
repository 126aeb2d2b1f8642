"""Each ablation changes one thing of the engine; names that mean nothing are refused."""

from __future__ import annotations

import msgspec
import pytest

from fake_runners import engine_config
from nvcli.errors import ConfigError
from nvcli.tools.bench.ablation import AblationResult, parse_ablations
from nvcli.tools.bench.report import format_ablations


def test_each_changes_one_field() -> None:
    config = engine_config(device="cuda")
    ablations = parse_ablations("overlap, graphs,prefix-cache,backend=flash-attn", config)
    changed = {
        ablation.name: {
            key: value
            for key, value in msgspec.structs.asdict(ablation.config).items()
            if value != getattr(config, key)
        }
        for ablation in ablations
    }
    assert changed == {
        "overlap": {"overlap_steps": False},
        "graphs": {"enforce_eager": True},
        "prefix-cache": {"enable_prefix_caching": False},
        "backend=flash-attn": {"attention_backend": "flash-attn"},
    }


@pytest.mark.parametrize(
    ("text", "values", "named"),
    [
        ("", {}, "prefix-cache"),
        ("speed", {}, "--ablate speed: allowed: one or more"),
        ("backend=auto", {}, "backend=triton"),
        ("overlap,overlap", {}, "twice"),
        ("graphs", {}, "on a CPU"),
        ("prefix-cache", {"enable_prefix_caching": False}, "is already configured like this"),
        ("backend=torch", {"attention_backend": "torch"}, "is already configured like this"),
    ],
)
def test_wrong_ones_are_refused(text: str, values: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        parse_ablations(text, engine_config(**values))
    assert "--ablate" in str(caught.value)


def test_the_table_shows_differences_and_what_could_not_run() -> None:
    lines = format_ablations(
        1000.0,
        [
            AblationResult(name="overlap", output_rates=[750.0], output_rate=750.0, difference=-0.25),
            AblationResult(
                name="backend=triton", output_rates=[], output_rate=None, difference=None, left_out="no GPU"
            ),
        ],
    )
    assert [line.split() for line in lines[1:3]] == [
        ["as", "configured", "1,000"],
        ["without", "overlap", "750", "-25.0", "%"],
    ]
    assert lines[3].endswith("left out: no GPU")
