"""Processes that an engine forks while a tier is open."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from lmdb_support import get, key, killed_at_end, open_at


def test_a_forked_process_keeps_no_directory(tmp_path: Path) -> None:
    """An engine forks a helper and is killed: the next engine opens the tier while the helper lives."""
    forks = """
import os, pathlib, sys, lmdb_support
backend = lmdb_support.open_at(pathlib.Path(sys.argv[1]))
lmdb_support.put(backend, {lmdb_support.key(1): b"of the first owner"})
os.fork() or print("ready", flush=True)
sys.stdin.read()
"""
    with killed_at_end(forks, tmp_path) as pid:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        backend = open_at(tmp_path)
        assert get(backend, key(1)) == [b"of the first owner"]
        backend.close()


def test_a_close_in_a_forked_process_says_nothing(tmp_path: Path) -> None:
    """The helper of an engine closed its copy, and logged that a crash would empty the tier, which is not its own."""
    closes = """
import os, pathlib, sys, lmdb_support
backend = lmdb_support.open_at(pathlib.Path(sys.argv[1]), durability="none")
lmdb_support.put(backend, {lmdb_support.key(1): b"of the engine"})
child = os.fork()
backend.close()
if child:
    os.waitpid(child, 0)
"""
    done = subprocess.run(
        [sys.executable, "-c", closes, tmp_path], cwd=Path(__file__).parent, capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    backend = open_at(tmp_path)
    assert get(backend, key(1)) == [b"of the engine"]
    backend.close()
