"""Probe: finds out which attention backends work for a run, and why the others do not.

It runs as `nvcli.tools.doctor.attention_probe:main` in its own process, because a package built for another torch may
crash it.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Literal

import msgspec

from nvcli.attention.kv_layout import KVDtype
from nvcli.attention.spec import AttentionSpec
from nvcli.tools.doctor.findings import Finding, note, ok, problem


class AttentionTask(msgspec.Struct, frozen=True, kw_only=True):
    """An `AttentionCase` without torch, and the backend that the configuration chooses."""

    device: Literal["cpu", "cuda"]
    dtype: str
    specs: tuple[AttentionSpec, ...]
    """The kinds of attention in the model's layers, without repeats."""
    block_size: int
    max_num_seqs: int
    choice: str
    kv_dtype: KVDtype | None = None
    """The type of keys and values in the cache, as `EngineConfig.kv_dtype`; None: the model's."""


def main(task: AttentionTask, control: Connection) -> None:
    control.send(probe(task))


def probe(task: AttentionTask) -> list[Finding]:
    """Try every backend. Imports torch and the backends' packages."""
    import torch

    from nvcli.attention.backend import AttentionCase
    from nvcli.attention.kv_cache import torch_kv_dtype
    from nvcli.attention.selection import BACKENDS, NOT_ASKED, select_backend, why_not
    from nvcli.errors import ConfigError

    case = AttentionCase(
        device=torch.device(task.device, 0) if task.device == "cuda" else torch.device("cpu"),
        dtype=getattr(torch, task.dtype),
        specs=task.specs,
        block_size=task.block_size,
        kv_dtype=None if task.kv_dtype is None else torch_kv_dtype(task.kv_dtype),
        max_num_seqs=task.max_num_seqs,
    )
    findings = []
    for name in BACKENDS:
        passed_over = NOT_ASKED[task.device].get(name)
        if reasons := why_not(name, case):
            findings.append(note(name, "; ".join(reasons)))
        else:
            findings.append(ok(name, f"works; auto leaves it out: {passed_over}" if passed_over else "works"))
    shapes = [f"{spec.num_heads} heads, {spec.num_kv_heads} KV heads of {spec.head_dim}" for spec in task.specs]
    shape = f"{' and '.join(dict.fromkeys(shapes)) or 'no attention'}, {task.dtype}"
    if task.kv_dtype not in (None, task.dtype):
        shape += f", keys and values in {task.kv_dtype}"
    try:
        backend, _ = select_backend(task.choice, case)
    except ConfigError as error:
        return [*findings, problem("choice", str(error), "set attention_backend: auto")]
    notes = [note("kernels", line) for line in backend.notes]
    return [*findings, ok("choice", f"{task.choice} is {backend.name}, for {shape}"), *notes]
