"""A check that crashes or hangs is an answer, and nothing of it stays behind."""

from __future__ import annotations

import pytest

from nvcli.tools.doctor.probe import Probe, ProbeFailed


def probe(function: str, argument: object = None, timeout: float = 60.0) -> Probe:
    return Probe(f"fake_probes:{function}", argument, name="fake", timeout=timeout)


def test_a_probe_answers(capfd: pytest.CaptureFixture[str]) -> None:
    with probe("answer", {"a": 1}) as running:
        assert running.result() == {"a": 1}
    assert not running.child.is_alive
    assert capfd.readouterr() == ("", ""), "its chatter is kept for failures"


@pytest.mark.parametrize("missing", ["os.memfd_create", "tempfile.TemporaryFile"])
def test_a_machine_without_memfd_or_temporary_folder_is_examined(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(missing, refuse)
    with probe("crash") as running, pytest.raises(ProbeFailed, match="libsomething"):
        running.result()


def test_a_hang_ends_at_the_timeout() -> None:
    with probe("hang_silently", timeout=0.5) as running, pytest.raises(ProbeFailed, match=r"no answer within 0\.5 s"):
        running.result()
    assert not running.child.is_alive


def test_a_crash_tells_the_error() -> None:
    with probe("crash") as running, pytest.raises(ProbeFailed, match="exited with code 1: OSError: libsomething"):
        running.result()


def test_our_own_error_is_told_without_its_type() -> None:
    with probe("refuse") as running, pytest.raises(ProbeFailed, match="exited with code 1: loopback is down"):
        running.result()


def test_a_killed_probe_tells_the_signal() -> None:
    with probe("be_killed") as running, pytest.raises(ProbeFailed, match="was killed by SIGSEGV: last words"):
        running.result()
