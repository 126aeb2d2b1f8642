"""The probe gives the backends' own reasons."""

from __future__ import annotations

from typing import Any

import pytest

from nvcli.attention.selection import BACKENDS
from nvcli.attention.spec import AttentionSpec
from nvcli.tools.doctor.attention_probe import AttentionTask, probe
from nvcli.tools.doctor.findings import Finding, Level

HEADS = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "scale": 128**-0.5}


def check(device: Any, **changes: Any) -> dict[str, Finding]:
    fields = {
        "device": device,
        "dtype": "float32" if device == "cpu" else "bfloat16",
        "specs": (AttentionSpec(**HEADS),),
        "block_size": 64,
        "max_num_seqs": 256,
        "choice": "auto",
        **changes,
    }
    return {finding.name: finding for finding in probe(AttentionTask(**fields))}


def test_on_a_cpu() -> None:
    findings = check("cpu")
    assert findings.keys() == {*BACKENDS, "choice"}
    assert "needs an NVIDIA GPU" in findings["triton"].found
    assert (findings["torch"].level, findings["choice"].level) == (Level.OK, Level.OK)


def test_the_model_s_windows_are_asked_for() -> None:
    specs = (AttentionSpec(**HEADS), AttentionSpec(**HEADS, window=64, has_sinks=True))
    assert check("cpu", specs=specs)["choice"].level == Level.OK


def test_the_type_of_the_cache_is_asked_for() -> None:
    finding = check("cpu", kv_dtype="fp8")["choice"]
    assert (finding.level, finding.found.rpartition(", ")[2]) == (Level.OK, "keys and values in fp8")


def test_a_choice_that_cannot_serve() -> None:
    finding = check("cpu", choice="triton")["choice"]
    assert finding.level == Level.PROBLEM
    assert "triton cannot serve" in finding.found


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    findings = check("cuda")
    assert findings["triton"] == Finding(name="triton", level=Level.OK, found="works")
    assert "auto is triton" in findings["choice"].found
    assert "sinks" in check("cuda", specs=(AttentionSpec(**HEADS, has_sinks=True),))["flash-attn"].found
    assert "head size 80" in check("cuda", specs=(AttentionSpec(**{**HEADS, "head_dim": 80}),))["triton"].found
