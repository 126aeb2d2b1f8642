"""How a run gets its attention backend, and what a user is told who asks for one that cannot serve it."""

from __future__ import annotations

import pytest
import torch

from nvcli.attention import selection
from nvcli.attention.backend import AttentionCase
from nvcli.attention.selection import select_backend
from nvcli.attention.torch_backend import TorchBackend
from nvcli.errors import ConfigError

CASE = AttentionCase(
    device=torch.device("cpu"), dtype=torch.float32, num_heads=4, num_kv_heads=2, head_dim=16, block_size=16
)


class Picky(TorchBackend):
    name = "picky"

    @classmethod
    def unsupported(cls, case: AttentionCase) -> list[str]:
        return [f"head size {case.head_dim} is not 64", "no GPU"]


@pytest.fixture
def _picky_first(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {"picky": f"{Picky.__module__}:Picky", "torch": selection.BACKENDS["torch"]}
    monkeypatch.setattr(selection, "BACKENDS", backends)


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_a_cpu_gets_torch(name: str) -> None:
    backend, _ = select_backend(name, CASE)
    assert backend.name == "torch"


@pytest.mark.usefixtures("_picky_first")
def test_auto_says_why_it_passed_one_over() -> None:
    backend, notes = select_backend("auto", CASE)
    assert backend.name == "torch"
    assert any("picky" in note and "head size 16 is not 64" in note and "no GPU" in note for note in notes)


@pytest.mark.usefixtures("_picky_first")
def test_an_explicit_choice_that_cannot_work_is_an_error_with_the_reasons() -> None:
    with pytest.raises(ConfigError, match=r"picky.*head size 16 is not 64; no GPU"):
        select_backend("picky", CASE)


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'flsh'.*auto, torch"):
        select_backend("flsh", CASE)
