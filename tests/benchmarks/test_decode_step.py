"""Ends of engine processes in the benchmark of decode steps."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.steps.decode_step import end_process


def engine(code: str) -> subprocess.Popen[bytes]:
    """Process in place of an engine."""
    return subprocess.Popen([sys.executable, "-I", "-c", code], stdin=subprocess.PIPE)


def test_an_engine_that_does_not_exit_is_killed_and_loses_no_rows(capfd: pytest.CaptureFixture[str]) -> None:
    """An engine that writes back for longer than a minute raised, and every row of the run was lost."""
    with engine("import time; time.sleep(600)") as hung:
        end_process(hung, 0.2)
        assert hung.returncode not in {None, 0}
    assert "did not exit within 0 s" in capfd.readouterr().err


def test_an_engine_that_exits_is_not_killed(capfd: pytest.CaptureFixture[str]) -> None:
    """The usual end: its input is closed."""
    with engine("import sys; sys.stdin.read()") as ended:
        assert ended.stdin is not None
        ended.stdin.close()
        end_process(ended, 60)
        assert ended.returncode == 0
    assert not capfd.readouterr().err
