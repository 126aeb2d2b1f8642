"""The all-reduce check tells right sums from wrong ones, and which rank is stuck or dead."""

from __future__ import annotations

import pytest

from nvcli.tools.doctor.all_reduce import check_all_reduce
from nvcli.tools.doctor.findings import Finding, Level

pytestmark = pytest.mark.usefixtures("warm_engines")


def check(
    device: str, target: str, *, timeout: float = 60.0, num_replicas: int = 1, gpus: tuple[int, ...] = ()
) -> list[Finding]:
    return check_all_reduce(
        device,  # type: ignore[arg-type]
        size=2,
        num_replicas=num_replicas,
        timeout=timeout,
        gpus=gpus,
        target=f"fake_probes:{target}",
    )


def test_one_rank_needs_none() -> None:
    (finding,) = check_all_reduce("cpu", size=1, num_replicas=1, timeout=1.0)
    assert finding.level == Level.NOTE


def test_gloo_adds_up() -> None:
    (finding,) = check_all_reduce("cpu", size=2, num_replicas=1, timeout=120.0)
    assert finding.level == Level.OK, finding
    assert "gloo over 2 ranks: sums are right" in finding.found


def test_wrong_sums() -> None:
    (finding,) = check("cpu", "sum_wrongly")
    assert finding.level == Level.PROBLEM
    assert "5 of 9 sums are wrong" in finding.found


def test_a_hang_names_the_ranks_and_what_they_do() -> None:
    (finding,) = check("cpu", "hang", timeout=2.0)
    assert finding.level == Level.PROBLEM
    assert "no answer within 2 s" in finding.found
    assert "rank 0 at a long wait, rank 1 at a long wait" in finding.found


def test_a_dead_rank_is_named_with_its_error() -> None:
    (finding,) = check("cpu", "crash")
    assert "exited with code 1 at starting: OSError: libsomething" in finding.found


def test_every_copy_is_tried() -> None:
    assert [finding.name for finding in check("cpu", "sum_wrongly", num_replicas=2)] == ["all-reduce 0", "all-reduce 1"]


@pytest.mark.parametrize(("gpus", "first"), [((), [0, 2]), ((1, 3, 4, 6), [1, 4])])
def test_the_gpus_of_the_run_are_tried(gpus: tuple[int, ...], first: list[int]) -> None:
    found = [finding.found for finding in check("cuda", "tell_the_gpu", num_replicas=2, gpus=gpus)]
    assert found == [f"NCCL over 2 ranks: GPU {gpu}" for gpu in first]


def test_peer_access_that_is_to_blame_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NCCL_P2P_DISABLE", raising=False)
    (finding,) = check("cuda", "work_without_peers")
    assert finding.level == Level.PROBLEM
    assert "unhandled cuda error" in finding.found
    assert "it works with NCCL_P2P_DISABLE=1" in finding.advice
    (finding,) = check("cuda", "crash")
    assert "NCCL_DEBUG" in finding.advice
