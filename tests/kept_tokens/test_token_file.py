"""File of kept tokens: rows come back whole or not at all, stay bounded, and stay private."""

from __future__ import annotations

import random
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierkv.errors import ConfigError
from tierkv.kept_tokens.token_file import TokenFile
from tierkv.logs.stack_log import StackLog
from tierkv.types.keys import Key

OURS, THEIRS = b"n" * 16, b"m" * 16


def key(number: int) -> Key:
    """Key of a chunk."""
    return Key(number.to_bytes(4, "big") * 9)


def opened(path: Path, namespace: bytes = OURS, rows_max: int = 1000) -> TokenFile:
    """The file, with the log of a stack."""
    return TokenFile(path, namespace, rows_max, StackLog(time.monotonic))


def numbers_in(file: TokenFile) -> list[int]:
    """Numbers of the keys, in order."""
    return [int.from_bytes(found[:4], "big") for found, _ in file.rows()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Path of a file in a folder of its own."""
    return tmp_path / "tokens.db"


def test_rows_come_back_in_order_after_a_close(path: Path) -> None:
    """The oldest row is first; a row that is written again is the newest."""
    file = opened(path)
    file.apply([(key(number), bytes([number]) * 100) for number in range(5)])
    file.apply([(key(1), b"again"), (key(3), None)])
    file.close()
    file = opened(path)
    assert list(file.rows()) == [(key(n), bytes([n]) * 100) for n in (0, 2, 4)] + [(key(1), b"again")]
    file.close()


def test_rows_of_another_namespace_are_kept_and_never_read(path: Path) -> None:
    """A server with another model at the same path: its tokens would be other tokens."""
    for namespace, row in ((OURS, b"ours"), (THEIRS, b"theirs")):
        file = opened(path, namespace)
        file.apply([(key(7), row)])
        file.close()
    for namespace, row in ((OURS, b"ours"), (THEIRS, b"theirs")):
        file = opened(path, namespace)
        assert list(file.rows()) == [(key(7), row)]
        file.close()


def test_a_row_moved_to_another_namespace_or_key_is_left_out(path: Path) -> None:
    """The checksum covers both, so that no row describes another chunk."""
    file = opened(path)
    file.apply([(key(1), b"one"), (key(2), b"two"), (key(3), b"three")])
    file.close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE chunks SET key = ? WHERE key = ?", (key(9), key(1)))
        database.execute("UPDATE chunks SET namespace = ? WHERE key = ?", (THEIRS, key(2)))
    database.close()
    for namespace, left in ((OURS, [3]), (THEIRS, [])):
        file = opened(path, namespace)
        assert numbers_in(file) == left
        file.close()


def test_changed_bytes_never_come_back(path: Path, rng: random.Random, caplog: pytest.LogCaptureFixture) -> None:
    """Damage at rest costs rows, or the whole file, and never gives a wrong one. The log has what a row shows."""
    rows = {key(number): rng.randbytes(600) for number in range(40)}
    file = opened(path)
    file.apply(list(rows.items()))
    file.close()
    whole, lost, reported = path.read_bytes(), 0, 0
    for _ in range(60):
        content = bytearray(whole)
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        caplog.clear()
        file = opened(path)
        found = dict(file.rows())
        file.close()
        assert found.items() <= rows.items()
        reported += "rows of" in caplog.text
        lost += len(rows) - len(found)
        path.with_name(f"{path.name}.damaged").unlink(missing_ok=True)
    assert lost
    assert reported


def test_a_file_that_is_no_database_is_set_aside(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cache of hints must not keep a server from its start; an operator can still look at the old file."""
    path.write_bytes(b"not a database, but long enough to be taken for one" * 100)
    file = opened(path)
    file.apply([(key(1), b"one")])
    file.close()
    assert path.with_name("tokens.db.damaged").is_file()
    assert "tokens_set_aside" in caplog.text
    file = opened(path)
    assert numbers_in(file) == [1]
    file.close()


def test_the_oldest_rows_are_trimmed_at_the_next_start(path: Path) -> None:
    """Rows of this namespace, and those of all others together, have one bound each."""
    for namespace in (THEIRS, OURS):
        file = opened(path, namespace)
        file.apply([(key(number), b"row") for number in range(10)])
        file.close()
    file = opened(path, OURS, rows_max=4)
    assert numbers_in(file) == [6, 7, 8, 9]
    file.close()
    file = opened(path, THEIRS)
    assert numbers_in(file) == [6, 7, 8, 9]
    file.close()


def test_only_the_user_can_read_the_file(path: Path) -> None:
    """Tokens are prompts."""
    file = opened(path)
    file.apply([(key(1), b"one")])
    modes = {stat.S_IMODE(each.stat().st_mode) for each in path.parent.iterdir()}
    file.close()
    assert modes == {0o600}


def test_a_folder_where_every_user_may_write_is_refused(path: Path) -> None:
    """Another user could lead traffic to any server."""
    path.parent.chmod(0o777)
    with pytest.raises(ConfigError, match=r"events\.tokens_path"):
        opened(path)


def test_a_missing_folder_is_an_error_with_its_fix(tmp_path: Path) -> None:
    """The message names key, path and what to do."""
    with pytest.raises(ConfigError, match=r'events.tokens_path = ".*nowhere.*folder that exists'):
        opened(tmp_path / "nowhere" / "tokens.db")


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the file open."""
    code = (
        "import sys, time; from pathlib import Path\n"
        "from tierkv.kept_tokens.token_file import TokenFile; from tierkv.logs.stack_log import StackLog\n"
        "file = TokenFile(Path(sys.argv[1]), b'n' * 16, 10, StackLog(time.monotonic))\n"
        "file.apply([(b'k' * 36, b'row')]); print('open', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-I", "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_and_a_killed_one_leaves_its_rows(
    path: Path, holder: subprocess.Popen[str]
) -> None:
    """Two writers would delete each other's rows. A kill loses nothing that was written, and no lock stays."""
    with pytest.raises(ConfigError, match="another process uses it"):
        opened(path)
    holder.kill()
    holder.wait()
    file = opened(path)
    assert list(file.rows()) == [(Key(b"k" * 36), b"row")]
    file.close()
