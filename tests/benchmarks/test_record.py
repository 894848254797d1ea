"""Record of benchmarks: a run replaces its own entries, and a foreign file stays as it is."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.record import RecordError, read_record, write_record
from benchmarks.rows import Row

ABOUT = {"disk": "the disk tier", "lookup": "one lookup"}


def test_a_run_replaces_its_own_entries(tmp_path: Path) -> None:
    """The others keep their dates, and the order is that of the program."""
    file = tmp_path / "measured.json"
    write_record(file, ABOUT, "lookup", [Row("lookup", "ns", 123.456789)], "an old machine")
    write_record(file, ABOUT, "disk", [Row("put", "GB/s", 1.0, "raw", 2.0, extra={"CPU s/GB": 0.123456})], "a machine")
    write_record(file, ABOUT, "disk", [Row("put", "GB/s", 3.0)], "a new machine")
    entries = read_record(file)
    assert [*entries] == ["disk", "lookup"]
    assert entries["lookup"]["machine"] == "an old machine"
    assert entries["disk"]["machine"] == "a new machine"
    assert [row["measured"] for row in entries["disk"]["rows"]] == [3.0]
    assert [row["measured"] for row in entries["lookup"]["rows"]] == [123.5], "four digits"


@pytest.mark.parametrize("text", ["not JSON", json.dumps([1]), json.dumps({"disk": {"no": "rows"}})])
def test_a_foreign_file_is_refused(tmp_path: Path, text: str) -> None:
    """A mistyped name must not cost a file."""
    file = tmp_path / "notes.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(RecordError, match="no record of benchmarks"):
        write_record(file, ABOUT, "disk", [Row("put", "GB/s", 3.0)], "a machine")
    assert file.read_text(encoding="utf-8") == text
