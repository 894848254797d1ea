"""Locks of files that end with the process that took them, whatever it has forked."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tierkv.abc.held_locks import HeldLock

OWNER = """
import fcntl, os, sys
from tierkv.abc.held_locks import HeldLock

fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
lock = HeldLock(fd)


def forked(first):
    if not os.fork():
        first()
        print("forked", flush=True)
        sys.stdin.read()  # until the test has closed its end of the pipe, also after the end of the owner
        os._exit(0)


"""


def owner(tmp_path: Path, then: str) -> subprocess.Popen[str]:
    """A process with a lock, which goes on with some lines of code. It prints "forked" before they end."""
    command = [sys.executable, "-c", OWNER + textwrap.dedent(then), str(tmp_path / "lock")]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "forked\n"
    return process


def may_lock(tmp_path: Path) -> bool:
    """Whether no process holds the lock."""
    with (tmp_path / "lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def test_a_forked_process_does_not_keep_the_lock_of_a_killed_one(tmp_path: Path) -> None:
    """An engine is killed and its forked helper lives on: the next engine may open the tier."""
    with owner(tmp_path, "forked(lambda: None)\nsys.stdin.read()") as process:
        assert not may_lock(tmp_path)
        process.kill()
        process.wait()
        assert may_lock(tmp_path)


def test_a_forked_process_does_not_end_the_lock(tmp_path: Path) -> None:
    """It closes what it has inherited; two engines that write in one directory would damage each other's files."""
    with owner(tmp_path, "forked(lock.release)\nsys.stdin.read()") as process:
        assert not may_lock(tmp_path)
        process.kill()


def test_a_release_ends_the_lock_beside_other_copies(tmp_path: Path) -> None:
    """A copy may be in a process that was forked in between, or by a library."""
    fd = os.open(tmp_path / "lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    copy = os.dup(fd)
    lock = HeldLock(fd)
    assert not may_lock(tmp_path)
    lock.release()
    lock.release()
    assert may_lock(tmp_path)
    os.close(copy)
