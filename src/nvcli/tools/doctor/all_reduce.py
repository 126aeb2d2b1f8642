"""Checks all-reduce over a run's process group: NCCL between GPUs, gloo between CPU processes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Literal

from nvcli.tools.doctor.all_reduce_rank import LARGE_BYTES, SMALL_BYTES, AllReduceResult, AllReduceTask, Phase
from nvcli.tools.doctor.findings import Finding, note, ok, problem
from nvcli.tools.doctor.probe import Probe
from nvcli.worker.distributed.rendezvous import create_store
from nvcli.worker.executor.children import ChildDied, NoAnswer, collect_answers

_TARGET = "nvcli.tools.doctor.all_reduce_rank:main"
_WITHOUT_PEERS = {"NCCL_P2P_DISABLE": "1"}


class _Failed(Exception):
    pass


def check_all_reduce(
    device: Literal["cpu", "cuda"],
    *,
    size: int,
    num_replicas: int,
    timeout: float,
    gpus: Sequence[int] = (),
    target: str = _TARGET,
) -> list[Finding]:
    """Check each of `num_replicas` groups of `size` ranks.

    `gpus` is `Layout.gpus`, `timeout` is in seconds, and `target` is the function that each rank runs.
    """
    backend = "NCCL" if device == "cuda" else "gloo"
    if size == 1:
        return [note("all-reduce", "not checked: a model on one rank needs none; --tp N checks N of them")]
    findings = []
    for replica in range(num_replicas):
        name = f"all-reduce {replica}" if num_replicas > 1 else "all-reduce"
        first = replica * size
        replica_gpus = gpus[first : first + size] or range(first, first + size)
        try:
            result = _all_reduce(device, gpus=replica_gpus, timeout=timeout, target=target)
        except _Failed as failed:
            found = f"{backend} over {size} ranks: {failed}"
            advice = "run it again with NCCL_DEBUG=INFO" if device == "cuda" else "check the limits above"
            if device == "cuda" and "NCCL_P2P_DISABLE" not in os.environ:
                advice = _try_without_peers(replica_gpus, timeout, target)
            findings.append(problem(name, found, advice))
            continue
        if result.wrong:
            advice = "do not trust runs with --tp here; check `dmesg` for Xid errors, and try NCCL_P2P_DISABLE=1"
            findings.append(problem(name, f"{backend} over {size} ranks: {result.wrong}", advice))
        else:
            findings.append(ok(name, f"{backend} over {size} ranks: {_describe(device, size, result)}"))
    return findings


def _describe(device: str, size: int, result: AllReduceResult) -> str:
    """Describe the times. Bus bandwidth is as defined by nccl-tests: the bytes that each rank's link carries."""
    large = LARGE_BYTES[device]
    bandwidth = large / result.large_seconds * 2 * (size - 1) / size
    return (
        f"sums are right; {SMALL_BYTES >> 10} KiB in {result.small_seconds * 1e6:,.0f} µs, {large >> 20} MiB in "
        f"{result.large_seconds * 1e3:,.2f} ms (bus bandwidth {bandwidth / 1e9:,.1f} GB/s)"
    )


def _try_without_peers(gpus: Sequence[int], timeout: float, target: str) -> str:
    """Find out whether peer access is to blame, and return advice."""
    try:
        _all_reduce("cuda", gpus=gpus, timeout=timeout, target=target, env=_WITHOUT_PEERS)
    except _Failed:
        return "run it again with NCCL_DEBUG=INFO; check /dev/shm above, the fabric manager, and `dmesg`"
    return (
        "it works with NCCL_P2P_DISABLE=1: set that for now (slower), and check the IOMMU and ACS settings, which can "
        "break peer access"
    )


def _all_reduce(
    device: Literal["cpu", "cuda"],
    *,
    gpus: Sequence[int],
    timeout: float,
    target: str,
    env: Mapping[str, str] | None = None,
) -> AllReduceResult:
    """Return the slowest rank's times, and the first wrong sum that any rank reported.

    `gpus` holds the GPU of each rank. Raises _Failed.
    """
    with ExitStack() as stack:
        ranks = []
        store_fd = create_store()
        stack.callback(os.close, store_fd)
        for rank, gpu in enumerate(gpus):
            task = AllReduceTask(
                rank=rank, size=len(gpus), device=device, gpu_index=gpu, store_fd=store_fd, timeout_seconds=timeout
            )
            probe = Probe(target, task, name=f"rank {rank}", timeout=timeout, pass_fds=(store_fd,), env=env)
            ranks.append(stack.enter_context(probe))
        results = _collect(ranks, timeout)
    return AllReduceResult(
        wrong=next((result.wrong for result in results if result.wrong), ""),
        small_seconds=max(result.small_seconds for result in results),
        large_seconds=max(result.large_seconds for result in results),
    )


def _collect(ranks: list[Probe], timeout: float) -> list[AllReduceResult]:
    """Return every rank's result.

    Raises _Failed if a rank ends early or not all answer within `timeout` seconds.
    """
    phases = ["starting"] * len(ranks)

    def is_answer(rank: int, message: Phase | AllReduceResult) -> bool:
        if isinstance(message, Phase):
            phases[rank] = message.name
        return not isinstance(message, Phase)

    try:
        return collect_answers([probe.child for probe in ranks], timeout=timeout, is_answer=is_answer)
    except NoAnswer as error:
        states = ", ".join(f"rank {rank} at {phases[rank]}" for rank in error.missing)
        raise _Failed(f"no answer within {timeout:g} s: {states}") from None
    except ChildDied as error:
        probe = ranks[error.number]
        how = probe.child.describe_exit()
        raise _Failed(f"rank {error.number} {how} at {phases[error.number]}{probe.last_words()}") from None
