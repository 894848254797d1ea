"""Traces are files from elsewhere: read as they are published, refused with the line that is wrong."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tierkv.errors import ConfigError
from tierkv.replay.trace import read_trace

LINES = '{"timestamp": 0, "hash_ids": [0, 1], "input_length": 700}\n\n{"timestamp": 1500.5, "hash_ids": [0, "x", 1]}\n'


@pytest.mark.parametrize("packed", [False, True])
def test_a_trace_as_it_is_published(tmp_path: Path, *, packed: bool) -> None:
    """Numbers or text as ids, fields of others, empty lines, gzip: what published traces have."""
    path = tmp_path / ("trace.jsonl.gz" if packed else "trace.jsonl")
    path.write_bytes(gzip.compress(LINES.encode()) if packed else LINES.encode())
    first, second = read_trace(path)
    assert (first.at_s, second.at_s) == (0.0, 1.5005)
    assert second.keys[0] is first.keys[0]
    assert second.keys[2] is first.keys[1]
    assert len({*first.keys, *second.keys}) == 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "'[1, 2]' is no object"),
        ('{"timestamp": 3}', "hash_ids is missing"),
        ("{}", "timestamp and hash_ids is missing"),
        ('{"timestamp": "3", "hash_ids": []}', "timestamp is '3', and must be a number of milliseconds"),
        ('{"timestamp": NaN, "hash_ids": []}', "timestamp is nan"),
        ('{"timestamp": true, "hash_ids": []}', "timestamp is True"),
        ('{"timestamp": 3, "hash_ids": [1.5]}', "hash_ids must be a list of whole numbers or of texts"),
        ('{"timestamp": 3, "hash_ids": 7}', "hash_ids must be a list"),
        ('{"timestamp": 3, "hash_ids": [-1]}', "-1 is not from 0 to 2**128 - 1"),
        ('{"timestamp": 1, "hash_ids": []}', "timestamp 1 is before that of the last request, 2; sort the lines"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    """The author of a converter needs the line and the reason, not the traceback of a parser."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 2, "hash_ids": [0]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"trace {path}, line 2: ")
    assert words in str(caught.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """No file, no gzip, no text, a truncated file: each is reported, and none counts as the trace's end."""
    whole = gzip.compress(b"".join(b'{"timestamp": %d, "hash_ids": []}\n' % i for i in range(5_000)))
    for name, content, words in (
        ("absent.jsonl", None, "No such file"),
        ("plain.gz", LINES.encode(), "Not a gzipped file"),
        ("cut.gz", whole[: len(whole) // 2], "ended before"),
        ("binary.jsonl", b"\xff\xfe\x00", "can't decode"),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            list(read_trace(path))
