"""Traces are files from elsewhere: read as they are published, refused with the line that is wrong."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from tierkv.errors import ConfigError
from tierkv.replay.trace import load_trace, read_trace
from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import tenant_of, tenant_of_salt

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
        ("{}", "timestamp and hash_ids are missing"),
        ('{"timestamp": "3", "hash_ids": []}', "timestamp is '3', and must be a number of milliseconds"),
        ('{"timestamp": NaN, "hash_ids": []}', "timestamp is nan"),
        ('{"timestamp": true, "hash_ids": []}', "timestamp is True"),
        ('{"timestamp": 1790000000000000, "hash_ids": []}', "more than 1e+12 seconds; give it in milliseconds"),
        ('{"timestamp": 1e300, "hash_ids": []}', "timestamp is 1e+300, more than"),
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


def test_a_name_does_not_decide_how_a_file_is_read(tmp_path: Path) -> None:
    """A download tool unpacks a file and keeps its name, or drops the ending: the trace is read all the same."""
    for name, content in (("plain.jsonl.gz", LINES.encode()), ("packed.jsonl", gzip.compress(LINES.encode()))):
        (tmp_path / name).write_bytes(content)
    plain, packed = (list(read_trace(tmp_path / name)) for name in ("plain.jsonl.gz", "packed.jsonl"))
    assert plain == packed
    assert plain


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    """No file, no gzip, no text, a truncated file: each is reported, and none counts as the trace's end."""
    whole = gzip.compress(b"".join(b'{"timestamp": %d, "hash_ids": []}\n' % i for i in range(5_000)))
    for name, content, words in (
        ("absent.jsonl", None, "there is no such file"),
        ("wrong.gz", b"\x1f\x8b" + LINES.encode(), "Unknown compression method"),
        ("cut.gz", whole[: len(whole) // 2], "ended before"),
        ("binary.jsonl", b"\xff\x00\x00", "this is no text in UTF-8; a line of a trace is a JSON object"),
        ("packed.jsonl", b"\x28\xb5\x2f\xfd\x00", "compressed with zstd; unpack it, or pack it with gzip"),
        ("windows.jsonl", LINES.encode("utf-16"), "text in UTF-16; save it as UTF-8"),
        ("table.parquet", b"PAR1\x15\x04", "Parquet's format; a line of a trace is a JSON object"),
    ):
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ConfigError, match=words):
            list(read_trace(path))
    with pytest.raises(ConfigError, match="this is a directory; a line of a trace is"):
        list(read_trace(tmp_path))


FULL = (
    '{"timestamp": 0, "hash_ids": [1, 2], "input_length": 700, "output_length": 9, "tenant": "acme", "session": "s",'
    ' "hints": {"continues": "yes", "ttl_s": 60}}\n'
    '{"timestamp": 5, "hash_ids": [1, 2], "tenant": null, "hints": null}\n'
)


def test_optional_fields_are_read(tmp_path: Path) -> None:
    """Tenants decide what is shared, hints what is kept, and lengths what computing costs."""
    path = tmp_path / "trace.jsonl"
    path.write_text(FULL, encoding="utf-8")
    table = load_trace(path)
    assert table.num_chunks == 4
    assert table.has_hints
    for first, second in (read_trace(path), table.requests()):
        assert (first.input_tokens, first.output_tokens, first.tenant) == (700, 9, "acme")
        assert first.hints == RequestHints(session="s", continues=1.0, ttl_s=60.0)
        assert (second.input_tokens, second.output_tokens, second.tenant, second.hints) == (None, None, None, NO_HINTS)
        assert not set(first.keys) & set(second.keys)
        assert tenant_of(first.keys[0]) == tenant_of_salt("acme")


@pytest.mark.parametrize(
    ("field", "words"),
    [
        ('"input_length": -1', "input_length is -1, and must be a whole number of tokens from 0"),
        ('"output_length": 1.5', "output_length is 1.5, and must be a whole number"),
        ('"tenant": 7', "tenant is 7, and must be text of 1 to 4096 characters; leave the field out"),
        ('"session": ""', "session is '', and must be text of 1 to 256 characters"),
        ('"hints": [1]', "hints is [1], and must be an object such as"),
        ('"hints": {"ttl": 3}', "in hints, ttl is unknown and ignored (did you mean 'ttl_s'?)"),
        ('"hints": {"priority": 1000}', "in hints, priority = 1000 is ignored: give a whole number from -100 to 100"),
        ('"hash_ids": [4, 5, 4]', "hash_ids has 4 twice; an id identifies its chunk and all chunks before it"),
        ('"timestamp": ' + "9" * 400, "timestamp is 9999"),
        ('"is": "prompt", "timestamp": 3', "this is the record of a stack; `tierkv trace` turns it into a trace"),
    ],
)
def test_a_wrong_field_is_named_with_its_value(tmp_path: Path, field: str, words: str) -> None:
    """Line, field, value and fix: the author of a converter changes one thing and is done."""
    path = tmp_path / "trace.jsonl"
    ids = "" if "prompt" in field or "hash_ids" in field else '"hash_ids": [1], '
    first = "" if '"timestamp"' in field else '"timestamp": 1, '
    path.write_text("\n{" + ids + first + field + "}\n", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        list(read_trace(path))
    assert str(caught.value).startswith(f"trace {path}, line 2: ")
    assert words in str(caught.value)


def test_a_trace_is_read_up_to_a_bound(tmp_path: Path) -> None:
    """Memory is bounded by a number that a user knows, whatever the length of the file; whole requests are kept."""
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f'{{"timestamp": {i}, "hash_ids": [0, {i + 1}]}}\n' for i in range(100)), encoding="utf-8")
    seen: list[int] = []
    cut = load_trace(path, 21, seen.append)
    assert (len(cut), len(cut.chunks), cut.is_cut) == (10, 20, True)
    assert seen[-1] == 10
    whole = load_trace(path)
    assert (len(whole), whole.is_cut, whole.num_chunks) == (100, False, 101)
    assert [len(request.keys) for request in whole.requests()] == [2] * 100


def test_the_mark_of_an_editor_is_no_part_of_the_first_line(tmp_path: Path) -> None:
    """A spreadsheet saves UTF-8 with a mark, and lines that end as on Windows."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"timestamp": 1, "hash_ids": [1]}\r\n\r\n{"timestamp": 2, "hash_ids": [1]}\r\n')
    assert [request.at_s for request in read_trace(path)] == [0.001, 0.002]


def test_a_trace_without_a_request_is_refused(tmp_path: Path) -> None:
    """A converter that wrote nothing would give a plan of zeros; so would a bound below the first request."""
    path = tmp_path / "trace.jsonl"
    path.write_text("\n\n", encoding="utf-8")
    for read in (load_trace, lambda one: list(read_trace(one))):
        with pytest.raises(ConfigError, match="no request is in it; a line of a trace"):
            read(path)
    path.write_text('{"timestamp": 1, "hash_ids": [1, 2, 3]}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="more than 2 chunks; raise --chunks-max"):
        load_trace(path, 2)
