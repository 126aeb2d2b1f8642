"""Real signals: whoever dies, hangs or fails, the run ends with an error that names it, and nothing stays behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from combinations import full
from fake_runners import engine_config
from nvcli.core.messages import unpack
from nvcli.engine.client import EngineClient
from nvcli.engine.protocol import EngineStart
from nvcli.engine.request import RequestOutput
from nvcli.errors import LoadError, WorkerError
from nvcli.worker.executor.child_process import ChildProcess
from nvcli.worker.executor.executor import Executor
from requests_factory import make_request
from shared_memory import left_in_shared_memory, shared_memory

DETECTION_SECONDS = 10.0


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task")
    return [int(c) for task in tasks.iterdir() for c in (task / "children").read_text().split()]


def ranks_of(client: EngineClient) -> list[int]:
    """Pids by rank: an engine's only children, spawned in order."""
    return sorted(children_of(client.pid))


def wait_gone(pids: list[int], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while alive := [pid for pid in pids if _is_running(pid)]:
        assert time.monotonic() < deadline, f"still running: {alive}"
        time.sleep(0.01)


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def clients() -> Iterator[list[EngineClient]]:
    started: list[EngineClient] = []
    shm = shared_memory()
    others = children_of(os.getpid())  # multiprocessing keeps a helper once a test has used it
    yield started
    for client in started:
        client.close()
    assert children_of(os.getpid()) == others
    assert not left_in_shared_memory(shm)


@pytest.fixture
def nobody_reaps() -> Iterator[None]:
    """Orphans come to this process, which does not wait for them, as PID 1 of many containers does not.

    The fixture `clients` then sees them among the children of this process.
    """
    prctl, set_child_subreaper = ctypes.CDLL(None).prctl, 36
    prctl(set_child_subreaper, 1)
    yield
    prctl(set_child_subreaper, 0)


def start(clients: list[EngineClient], runner: str, **config: object) -> EngineClient:
    client = EngineClient.start(engine_config(**config), runner=f"fake_runners:{runner}")
    clients.append(client)
    return client


def run_until_error(client: EngineClient) -> tuple[WorkerError, float]:
    begin = time.monotonic()
    try:
        while time.monotonic() < begin + 30:
            client.poll(1.0)
    except WorkerError as error:
        return error, time.monotonic() - begin
    pytest.fail("no error within 30 s")


def collect(client: EngineClient, count: int) -> dict[int, RequestOutput]:
    done: dict[int, RequestOutput] = {}
    while len(done) < count:
        done.update({o.request_id: o for o in client.poll(1.0)})
    return done


def poll_for(client: EngineClient, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        assert client.poll(left) == []


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 2), *(full(case, in_parts=True) for case in ((3, 1), (1, 8)))])
def test_requests_are_answered_through_real_processes(clients: list[EngineClient], tp: int, pp: int) -> None:
    client = start(clients, "CountingRunner", tensor_parallel_size=tp, pipeline_parallel_size=pp)
    client.wait_ready()
    client.add([make_request(i, range(1, 2 + i), 20) for i in range(50)])
    done = collect(client, 50)
    assert all(unpack(o.token_ids).tolist() == list(range(100, 120)) for o in done.values())
    pids = [client.pid, *ranks_of(client)]
    client.close()
    wait_gone(pids)


def test_rank_that_falls_behind_is_waited_for(clients: list[EngineClient]) -> None:
    client = start(clients, "LaggingRunner", tensor_parallel_size=2)
    client.wait_ready()
    client.add([make_request(0, [1], 40)])
    assert unpack(collect(client, 1)[0].token_ids).tolist() == list(range(100, 140))


def test_rank_of_the_last_stage_that_falls_behind_is_waited_for(clients: list[EngineClient]) -> None:
    client = start(clients, "LaggingRunner", pipeline_parallel_size=2)
    client.wait_ready()
    client.add([make_request(i, [1], 20) for i in range(8)])
    assert all(unpack(o.token_ids).tolist() == list(range(100, 120)) for o in collect(client, 8).values())


def test_signals_of_a_terminal_are_the_parents_alone(clients: list[EngineClient]) -> None:
    client = start(clients, "CountingRunner")
    client.wait_ready()
    for pid in (client.pid, *ranks_of(client)):
        for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
            os.kill(pid, number)
    client.add([make_request(0, [1], 20)])
    assert unpack(collect(client, 1)[0].token_ids).tolist() == list(range(100, 120))


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_is_named(clients: list[EngineClient], rank: int) -> None:
    client = start(clients, "SlowRunner", tensor_parallel_size=2)
    client.wait_ready()
    client.add([make_request(0, [1], 200)])
    client.poll(0.1)
    ranks = ranks_of(client)
    os.kill(ranks[rank], signal.SIGKILL)
    error, seconds = run_until_error(client)
    assert f"rank {rank} (pid {ranks[rank]}) was killed by SIGKILL" in str(error)
    assert seconds < DETECTION_SECONDS
    wait_gone(ranks)


def test_killed_rank_is_noticed_while_the_engine_is_idle(clients: list[EngineClient]) -> None:
    client = start(clients, "CountingRunner")
    client.wait_ready()
    (rank,) = ranks_of(client)
    os.kill(rank, signal.SIGKILL)
    error, seconds = run_until_error(client)
    assert "rank 0" in str(error)
    assert seconds < DETECTION_SECONDS


def test_killed_engine_takes_its_ranks_along(clients: list[EngineClient]) -> None:
    client = start(clients, "SlowRunner", tensor_parallel_size=2)
    client.wait_ready()
    client.add([make_request(0, [1], 200)])
    ranks = ranks_of(client)
    os.kill(client.pid, signal.SIGKILL)
    error, seconds = run_until_error(client)
    assert str(error) == f"the engine (pid {client.pid}) was killed by SIGKILL; it was at: running"
    assert seconds < DETECTION_SECONDS
    wait_gone(ranks)


def test_stopped_engine_is_named(clients: list[EngineClient]) -> None:
    client = start(clients, "SlowRunner", tensor_parallel_size=2, step_timeout=1.0)
    client.wait_ready()
    client.add([make_request(0, [1], 200)])
    client.poll(0.1)
    pids = [client.pid, *ranks_of(client)]
    os.kill(client.pid, signal.SIGSTOP)
    error, seconds = run_until_error(client)
    assert str(error) == (
        f"no answer within step_timeout (1 s); the engine (pid {pids[0]}) at running (stopped by a signal)"
    )
    assert 0.4 < seconds < 1.0 + DETECTION_SECONDS
    client.close()
    wait_gone(pids)


def test_engine_that_was_stopped_for_a_moment_goes_on(clients: list[EngineClient]) -> None:
    client = start(clients, "SlowRunner", step_timeout=1.6)
    client.wait_ready()
    client.add([make_request(0, [1], 60)])
    for _ in range(2):
        os.kill(client.pid, signal.SIGSTOP)
        poll_for(client, 1.0)
        os.kill(client.pid, signal.SIGCONT)
        poll_for(client, 0.3)
    assert unpack(collect(client, 1)[0].token_ids).tolist() == list(range(100, 160))


@pytest.mark.usefixtures("nobody_reaps")
def test_engine_that_is_stopped_while_it_starts_is_named(clients: list[EngineClient]) -> None:
    client = start(clients, "SlowStartRunner", step_timeout=0.5)
    assert client.wait_ready(0.5) is None
    pids = [client.pid, *ranks_of(client)]
    os.kill(client.pid, signal.SIGSTOP)
    with pytest.raises(WorkerError, match=r"the engine \(pid \d+\) at start-up \(stopped by a signal\)"):
        client.wait_ready(10)
    client.close()
    wait_gone(pids)


def test_sending_to_a_stopped_engine_does_not_take_for_ever(clients: list[EngineClient]) -> None:
    client = start(clients, "SlowRunner", step_timeout=0.5)
    client.wait_ready()
    os.kill(client.pid, signal.SIGSTOP)
    requests = [make_request(number, range(200), 10) for number in range(1000)]
    with pytest.raises(WorkerError, match="stopped by a signal"):
        client.add(requests)


def test_killed_parent_leaves_nothing_behind() -> None:
    script = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from fake_runners import engine_config\n"
        "from nvcli.engine.client import EngineClient\n"
        "client = EngineClient.start(engine_config(tensor_parallel_size=2), runner='fake_runners:SlowRunner')\n"
        "client.wait_ready()\n"
        "print('ready', flush=True)\n"
        "while True: client.poll(1)\n"
    )
    command = [sys.executable, "-c", script, *sys.path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "ready\n"
        (engine,) = children_of(parent.pid)
        pids = [engine, *children_of(engine)]
        assert len(pids) == 3
        parent.kill()
    wait_gone(pids)


def test_stopped_rank_runs_into_the_step_timeout(clients: list[EngineClient]) -> None:
    client = start(clients, "SlowRunner", tensor_parallel_size=2, step_timeout=0.5)
    client.wait_ready()
    client.add([make_request(0, [1], 200)])
    ranks = ranks_of(client)
    client.poll(0.1)
    os.kill(ranks[0], signal.SIGSTOP)
    error, seconds = run_until_error(client)
    assert "step_timeout (0.5 s)" in str(error)
    assert f"rank 0 (pid {ranks[0]})" in str(error)
    assert "stopped by a signal" in str(error)
    assert seconds < 0.5 + DETECTION_SECONDS
    wait_gone(ranks)


def test_stuck_step_is_named(clients: list[EngineClient]) -> None:
    client = start(clients, "StuckRunner", step_timeout=0.5)
    client.wait_ready()
    client.add([make_request(0, [1], 200)])
    error, _ = run_until_error(client)
    assert "at step 3" in str(error)


def test_time_behind_other_steps_does_not_count(clients: list[EngineClient]) -> None:
    """Two steps in flight of a second each: the later one's tokens come two seconds after it was submitted."""
    client = start(clients, "CrawlingRunner", step_timeout=1.6)
    client.wait_ready()
    client.add([make_request(0, [1], 3)])
    assert unpack(collect(client, 1)[0].token_ids).tolist() == [100, 101, 102]


def test_exception_in_a_step_names_rank_step_and_cause(
    clients: list[EngineClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVCLI_TEST_RANK", "1")
    client = start(clients, "FailingRunner", tensor_parallel_size=2)
    client.wait_ready()
    client.add([make_request(0, [1], 200)])
    error, _ = run_until_error(client)
    assert str(error) == "rank 1 failed at step 5: ZeroDivisionError: as planned"
    assert error.traceback.endswith("ZeroDivisionError: as planned\n")


def test_rank_that_dies_while_loading_is_noticed(clients: list[EngineClient]) -> None:
    """The other rank waits for it in a collective or loads on: neither may hold up the end (vllm #19204)."""
    client = start(clients, "DiesLoadingRunner", tensor_parallel_size=2)
    with pytest.raises(WorkerError, match=r"rank 1 .* was killed by SIGKILL; it was at: load weights"):
        client.wait_ready(30)


def test_errors_of_the_users_keep_their_kind(clients: list[EngineClient]) -> None:
    client = start(clients, "UnloadableRunner", tensor_parallel_size=2)
    with pytest.raises(LoadError, match=r"lm_head\.weight is missing"):
        client.wait_ready(30)


def test_rank_that_ended_while_the_other_waits_for_it_says_why() -> None:
    others = children_of(os.getpid())
    executor = Executor(engine_config(tensor_parallel_size=2), "fake_runners:UnloadableBesideWaitingRunner")
    try:
        _, rank_1 = sorted(set(children_of(os.getpid())) - set(others))
        wait_gone([rank_1], seconds=30)
        with pytest.raises(LoadError, match=r"lm_head\.weight is missing"):
            executor.wait_ready()
    finally:
        executor.close()


@pytest.mark.usefixtures("nobody_reaps")
@pytest.mark.parametrize("runner", ["UnloadableRunner", "DiesLoadingRunner", "SlowStartRunner"])
def test_a_failed_start_leaves_no_zombie(clients: list[EngineClient], runner: str) -> None:
    client = start(clients, runner, tensor_parallel_size=2)
    with contextlib.suppress(LoadError, WorkerError):
        client.wait_ready(0.7)
    client.close()
    assert client._process._popen.returncode != -signal.SIGKILL


@pytest.mark.usefixtures("nobody_reaps")
def test_close_during_start_ends_at_once(clients: list[EngineClient]) -> None:
    client = start(clients, "SlowStartRunner", tensor_parallel_size=2)
    assert client.wait_ready(0.5) is None
    pids = [client.pid, *ranks_of(client)]
    client.close()
    client.close()
    wait_gone(pids)


@pytest.mark.usefixtures("nobody_reaps")
@pytest.mark.parametrize("action", ["close", "kill", "stop"])
def test_end_while_ranks_start_anew(
    clients: list[EngineClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    """After a step that ran out of memory it is as at the first start."""
    monkeypatch.setenv("NVCLI_TEST_STEPS", "3,4")
    monkeypatch.setenv("NVCLI_TEST_FOLDER", str(tmp_path))
    client = start(clients, "StuckRestartRunner", tensor_parallel_size=2, step_timeout=1.0)
    client.wait_ready()
    first = ranks_of(client)
    client.add([make_request(0, [1], 100)])
    deadline = time.monotonic() + 10
    while len(list(tmp_path.iterdir())) < 2:
        assert client.poll(0.02) == []
        assert time.monotonic() < deadline
    ranks = ranks_of(client)
    if action == "close":
        client.close()
    else:
        os.kill(ranks[1], signal.SIGKILL if action == "kill" else signal.SIGSTOP)
        error, seconds = run_until_error(client)
        assert re.search(
            rf"rank 1 \(pid {ranks[1]}\) was killed by SIGKILL; it was at: load weights$"
            if action == "kill"
            else rf"rank 1 \(pid {ranks[1]}\) at load weights \(stopped by a signal\)$",
            str(error),
        )
        assert seconds < 1.0 + DETECTION_SECONDS
    wait_gone([*first, *ranks])


@pytest.mark.usefixtures("nobody_reaps")
@pytest.mark.parametrize(("num_processes", "where"), [(1, "__init__"), (3, "recover")])
def test_ranks_that_cannot_be_started_are_an_error(
    clients: list[EngineClient], monkeypatch: pytest.MonkeyPatch, num_processes: int, where: str
) -> None:
    """Of the system's: not to be taken for the end of the parent, whom nobody would tell."""
    monkeypatch.setenv("NVCLI_TEST_STEPS", "3,4")
    monkeypatch.setenv("NVCLI_TEST_PROCESSES", str(num_processes))
    argument = EngineStart(config=engine_config(tensor_parallel_size=2), runner="fake_runners:OutOfMemoryRunner")
    process = ChildProcess("fake_processes:engine_without_processes", argument, name="engine")
    clients.append(client := EngineClient(process, step_timeout=60))

    def use() -> None:
        client.wait_ready()
        client.add([make_request(0, [1], 100)])
        while True:
            client.poll(1.0)

    with pytest.raises(WorkerError) as caught:
        use()
    assert str(caught.value) == f"the engine failed: BlockingIOError: [Errno 11] {os.strerror(11)}"
    assert f"in {where}" in caught.value.traceback


def test_abort_reaches_a_running_request(clients: list[EngineClient]) -> None:
    client = start(clients, "SlowRunner")
    client.wait_ready()
    client.add([make_request(0, [1], 200), make_request(1, [1], 5)])
    client.abort([0, 99])
    done = collect(client, 2)
    assert done[0].finish_reason == "abort"
    assert done[1].finish_reason == "length"
    assert client.stats.num_blocks == 64
