"""Nobody outside the machine can reach a running job: what its processes listen on is the loopback interface alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fake_runners import engine_config
from nvcli.core.engine_config import EngineConfig
from nvcli.demo import demo_path
from nvcli.engine.client import EngineClient
from requests_factory import make_request
from warm_process import engines_are_copies

_LISTENING = "0A"
_LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::1 as /proc/net/tcp and tcp6 spell them."""


def descendants(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    return children + [pid for child in children for pid in descendants(child)]


def sockets_of(pid: int) -> Iterator[str]:
    """The inode of each socket that a process holds."""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        target = os.readlink(f"/proc/{pid}/fd/{fd}")
        if target.startswith("socket:["):
            yield target.removeprefix("socket:[").removesuffix("]")


def listening_addresses() -> dict[str, str]:
    """The local address of each listening TCP socket of the machine, by inode."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == _LISTENING:
                found[inode] = local.partition(":")[0]
    return found


def check_listening_sockets(config: EngineConfig, *, needs_sockets: bool) -> None:
    """Run a request and look at what the engine and its ranks listen on."""
    with engines_are_copies():
        client = EngineClient.start(config)
    try:
        assert client.wait_ready() is not None
        client.add([make_request(0, [5, 6, 7], 3)])
        while not any(output.finish_reason for output in client.poll(1.0)):
            pass
        processes = [client.pid, *descendants(client.pid)]
        assert len(processes) >= 3, "an engine and two ranks"
        addresses = listening_addresses()
        heard = [addresses[inode] for pid in processes for inode in sockets_of(pid) if inode in addresses]
        assert heard or not needs_sockets, "gloo listens, so that this test sees what it is to see"
        assert set(heard) <= _LOOPBACK
    finally:
        client.close()


def test_ranks_listen_on_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the user's environment says for jobs that span machines."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth0")
    config = engine_config(model_path=demo_path(), block_size=16, tensor_parallel_size=2, pipeline_parallel_size=2)
    check_listening_sockets(config, needs_sockets=True)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_on_gpus_listen_on_loopback_alone(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    config = engine_config(
        model_path=demo_path(),
        device="cuda",
        dtype="bfloat16",
        block_size=16,
        kv_cache_memory=1 << 30,
        **{layout: 2},
    )
    check_listening_sockets(config, needs_sockets=False)
