"""Any lines of a record: explained, counted and turned into a trace without a traceback."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from parser_inputs import any_bytes, changed_documents, parser_test, written

from tierkv.errors import ConfigError
from tierkv.recording.as_trace import trace_of
from tierkv.recording.entries import matches
from tierkv.recording.reading import (
    FailureFilter,
    KeyFilter,
    RequestFilter,
    entries_so_far,
    filter_entries,
    read_entries,
)
from tierkv.recording.rendering import entry_line, explain_losses
from tierkv.recording.shapes import is_whole
from tierkv.recording.waits import waits_of

HERE = Path(__file__).parent
A, B = "aa" * 16 + ".0", "bb" * 16 + ".0"


def entry(kind: str, **fields: Any) -> dict[str, Any]:
    """An entry as a recorder writes it."""
    return {"is": kind, "step": 3, "t": 0.25, **fields}


ACCOUNT = {"loaded_tokens": {"disk": 16}, "stored_tokens": 32, "deferrals": 1, "deferred_s": 0.5}
ENTRIES = [
    entry("record", tiers=["host", "disk"], model="m", pid=7, opened="2026-11-24T10:00:00.000Z", chunk_tokens=16),
    entry("prompt", r="a", at=0, keys=[A, B], asked=0.1, tokens=40, tenant="01", adapter="ff", hints={"session": "s"}),
    entry("prompt", r="a", at=2, keys=[A]),
    entry("answer", r="a", local=0, tokens=None, why="", chunks=2, ready=0, wanted=[A, B], expired=False, missing=B),
    entry("request", r="a", event="asked", before="idle", after="asking"),
    entry("op", op=4, tier="disk", verb="read", keys=[A]),
    entry("op end", op=4, tier="disk", verb="read", ok=0, bad={A: "corrupt: x"}, late=False),
    entry("job", r="a", job=9, store=False, keys=[A]),
    entry("job end", r="a", job=9, store=False, failed=[A]),
    entry("not stored", r="a", keys=[A]),
    entry("chunks", tier="disk", event="stored", keys=[A]),
    entry("chunks", tier="disk", event="cleared", keys=[]),
    entry("health", tier="disk", usable=False, why="it left"),
    entry(
        "metrics", counters={"tierkv_lookups": {"": 2}}, gauges={"g": {"disk": 0.5}}, histograms={"h": {"": [1, 2.5]}}
    ),
    entry("finished", r="a", account=ACCOUNT, generated=5),
    entry("reset"),
    entry("lost", entries=4),
    entry("of a later version", keys=[A], r="b"),
]


def records() -> st.SearchStrategy[bytes]:
    """Draw records: lines in any order, most of them changed."""
    lines = st.lists(changed_documents(ENTRIES).map(written), max_size=6).map(b"\n".join).map(lambda data: data + b"\n")
    return lines | lines | any_bytes([b"\n".join(map(written, ENTRIES)) + b"\n"])


@parser_test(HERE / "corpus" / "record", records())
def test_any_record_is_explained(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """The record is read after a crash, to find its cause: no damaged line may hide the others."""
    path = tmp_path_factory.getbasetemp() / "run.jsonl"
    path.write_bytes(data)
    try:
        entries = list(read_entries(path))
    except ConfigError:  # no line of it is an entry, or its version is unknown
        return
    assert list(takewhile(lambda one: one is not None, entries_so_far(path))) == entries
    for wanted in (KeyFilter("aa" * 8), RequestFilter("a"), FailureFilter()):
        for one in filter_entries(entries, wanted):
            assert entry_line(one, lambda short: matches(short, "aa" * 8))
    assert list(explain_losses(entries, lambda short: matches(short, A)))
    assert all(waits.describe() for waits in waits_of(entries))
    for line in trace_of(entries).lines:
        assert json.loads(json.dumps(line)) == line


def test_entries_of_a_recorder_are_whole() -> None:
    """The changes above begin with entries that pass; each field that a kind requires is missed."""
    assert all(map(is_whole, ENTRIES))
    for one in ENTRIES:
        assert not is_whole({name: value for name, value in one.items() if name != "step"})
    assert not any(is_whole({**ENTRIES[5], "keys": wrong}) for wrong in (None, A, [1], {A: 1}))
