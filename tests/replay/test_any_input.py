"""Any trace: requests, or an error that names the line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import strategies as st
from parser_inputs import any_bytes, changed_documents, parser_test, written

from tierkv.errors import ConfigError
from tierkv.replay.trace import load_trace, read_trace

HERE = Path(__file__).parent
LINES = [
    {"timestamp": 0, "hash_ids": [0, 14, "x"], "input_length": 700, "output_length": 9, "tenant": "acme"},
    {"timestamp": 5.5, "hash_ids": [1], "session": "s", "hints": {"continues": "yes", "ttl_s": 60}, "more": None},
]


def traces() -> st.SearchStrategy[bytes]:
    """Draw traces of a few lines, plain and compressed."""
    lines = st.lists(changed_documents(LINES).map(written), max_size=4).map(b"\n".join)
    whole = b"\n".join(map(written, LINES))
    return lines | lines.map(gzip.compress) | any_bytes([whole, gzip.compress(whole)])


@parser_test(HERE / "corpus" / "trace", traces())
def test_any_trace_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Traces are converted by scripts of others: a wrong line is named, whether it is played or loaded."""
    path = tmp_path_factory.getbasetemp() / ("trace.gz" if data[:2] == b"\x1f\x8b" else "trace.jsonl")
    path.write_bytes(data)
    try:
        read = list(read_trace(path))
    except ConfigError as error:
        message = str(error)
        assert message.startswith(f"trace {path}")
        with pytest.raises(ConfigError):
            load_trace(path)
        return
    table = load_trace(path)
    assert [len(one.keys) for one in table.requests()] == [len(one.keys) for one in read]
    assert [one.hints for one in table.requests()] == [one.hints for one in read]


def test_a_line_without_an_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small compressed file may unfold to a line of gigabytes, which would be read whole."""
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(b" " * 5000))
    monkeypatch.setattr("tierkv.replay.trace_lines.LINE_CHARS_MAX", 4096)
    with pytest.raises(ConfigError, match="line 1: the line has more than 4096 characters"):
        list(read_trace(path))
