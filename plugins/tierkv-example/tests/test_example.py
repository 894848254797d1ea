"""The tutorial backend: its conformance, and its length of a page."""

from __future__ import annotations

import ast
import contextlib
import inspect
import sqlite3
from pathlib import Path
from typing import Any

import tierkv_example
from tierkv.abc import BackendContext, WriteRequest
from tierkv.errors import BackendError, OutOfSpaceError
from tierkv.testing import BackendConformance
from tierkv.types.keys import Key
from tierkv_example import ExampleOptions

LINES_MAX = 60


class ExampleRows:
    """Rows accessed without the backend; the kit calls this while the database is closed."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def sql(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self.file)) as database, database:
            return database.execute(statement, values).fetchall()

    def read(self, key: Key) -> bytes:
        rows = self.sql("SELECT frame FROM frames WHERE key = ?", key)
        if not rows:
            raise KeyError(key.hex())
        return rows[0][0]

    def write(self, key: Key, data: bytes) -> None:
        self.sql("UPDATE frames SET frame = ? WHERE key = ?", data, key)

    def remove(self, key: Key) -> None:
        self.sql("DELETE FROM frames WHERE key = ?", key)

    def count(self) -> int:
        return self.sql("SELECT count(*) FROM frames")[0][0]


class TestExample(BackendConformance):
    """Conformance: every test that the capabilities require."""

    plugin = tierkv_example.PLUGIN

    def make_options(self, place: Path) -> ExampleOptions:
        return ExampleOptions(path=str(place))

    def raw(self, place: Path, context: BackendContext) -> ExampleRows:
        return ExampleRows(place / f"{context.namespace.fingerprint().hex()}.sqlite")


def test_only_a_full_database_is_called_full(tmp_path: Path) -> None:
    """OutOfSpaceError makes the framework evict: reported by a failing disk, it would empty the tier chunk by chunk."""
    suite = TestExample()
    with suite.open(tmp_path / "place", capacity_bytes=4096) as session:
        backend = session.backend
        frames = [WriteRequest(Key(bytes([i]) * 8), memoryview(bytes(4096))) for i in range(8)]
        assert {type(result) for result in backend.write(frames)} == {OutOfSpaceError}
        backend._db.execute("DROP TABLE frames")
        assert {type(result) for result in backend.write(frames[:1])} == {BackendError}


def test_it_fits_on_a_page() -> None:
    """The plugin interface promises a backend in one page: code, without docstrings, imports and blank lines."""
    source = inspect.getsource(tierkv_example)
    skipped: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code = [line for number, line in enumerate(source.splitlines(), 1) if line.strip() and number not in skipped]
    assert len(code) <= LINES_MAX, f"{len(code)} lines"
