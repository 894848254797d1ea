"""Any bytes in the files beside the segments: read as far as they are whole, and never the reason of a traceback."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from itertools import pairwise
from pathlib import Path

import pytest
import xxhash
from disk_support import PAGE, make_namespace
from hypothesis import strategies as st
from parser_inputs import any_bytes, any_json, changed_documents, parser_test, written

from tierkv.errors import NamespaceMismatchError
from tierkv.testing.frames import make_key
from tierkv_disk.directory.layout import check_directory, claim_directory, read_slot_bytes
from tierkv_disk.extents import PAGES_MAX, page_of
from tierkv_disk.log.index_log import (
    RECORD_BYTES,
    LogHealth,
    LogIdentity,
    Record,
    encode_header,
    encode_records,
)
from tierkv_disk.log.reading import read_records
from tierkv_disk.space.quarantine import Quarantine, read_quarantine

HERE = Path(__file__).parent
IDENTITY = LogIdentity(bytes(range(16)))
LOGS = [(HERE / "golden" / name).read_bytes()[: 16 * RECORD_BYTES] for name in ("index-v1.log", "index-v2.log")]
LINE = {"key": make_key(1).hex(), "runs": [{"segment": 0, "page": 3, "pages": 1}], "reason": "it differs"}
TWO = {**LINE, "runs": [{"segment": 1, "page": 0, "pages": 2}, {"segment": 0, "page": 8, "pages": 4}]}
MARKER = {"program": "tierkv-disk", "format": 1}
MANIFEST = {"program": "tierkv-disk", "format": 2, "namespace": make_namespace().describe()}
OLD_MANIFEST = {**MANIFEST, "format": 1, "slot_bytes": 2 * PAGE}


def with_checksums(log: bytes) -> bytes:
    """Return a log whose whole records have the checksums of their bytes."""
    records = [log[start : start + RECORD_BYTES] for start in range(RECORD_BYTES, len(log), RECORD_BYTES)]
    summed = [
        struct.pack("<Q", xxhash.xxh3_64_intdigest(record[8:], IDENTITY.seed)) + record[8:]
        for record in records
        if len(record) == RECORD_BYTES
    ]
    return log[:RECORD_BYTES] + b"".join(summed)


def logs() -> st.SearchStrategy[bytes]:
    """Draw logs, with and without the checksums that would betray a change."""
    changed = any_bytes(LOGS, 3 * RECORD_BYTES)
    return changed | changed.map(with_checksums)


@parser_test(HERE / "corpus" / "log", logs())
def test_any_log_gives_the_records_that_are_whole(data: bytes) -> None:
    """Each record counts by its own checksum: what is read could be written again, and is found again."""
    fd = os.memfd_create("log")
    try:
        os.pwrite(fd, data, 0)
        for slot_bytes in (2 << 20, 0):
            health = LogHealth()
            records = [Record(*row) for row in read_records(fd, IDENTITY, health, slot_bytes)]
            assert health.records == len(records)
            assert health.records + health.damaged <= len(data) // RECORD_BYTES
        os.ftruncate(fd, 0)
        whole = encode_header(IDENTITY) + encode_records(records, IDENTITY.seed)
        os.pwrite(fd, whole, 0)
        assert [Record(*row) for row in read_records(fd, IDENTITY, LogHealth())] == records
    finally:
        os.close(fd)


def lists() -> st.SearchStrategy[bytes]:
    """Draw lists of quarantined frames."""
    lines = st.lists(changed_documents([LINE, TWO]).map(written), max_size=4).map(b"\n".join)
    return lines | any_bytes([written(LINE) + b"\n" + written(TWO)])


@parser_test(HERE / "corpus" / "quarantine", lists())
def test_any_list_keeps_possible_pages_out_of_service(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Pages that overlap, or that no segment can have, would make free pages of used ones."""
    directory = tmp_path_factory.getbasetemp()
    (directory / "quarantine.jsonl").write_bytes(data)
    for entry in read_quarantine(directory):
        assert all(0 < run.pages <= PAGES_MAX - page_of(run.address) for run in entry.runs)
        assert all(first.address + first.pages <= second.address for first, second in pairwise(sorted(entry.runs)))
    quarantine = Quarantine(directory, 1 << 40)
    quarantine.save()
    assert list(read_quarantine(directory)) == list(quarantine)


@parser_test(HERE / "corpus" / "documents", any_json([MARKER, MANIFEST, OLD_MANIFEST]))
def test_any_document_is_read_set_aside_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """A marker or a manifest of another program or version is left alone; a damaged one is set aside."""
    place = tmp_path_factory.mktemp("place", numbered=True)
    (place / "tierkv-disk.json").write_bytes(data)
    for call in (check_directory, claim_directory):
        with contextlib.suppress(NamespaceMismatchError):
            call(place)
    namespace = make_namespace()
    (place / "namespace.json").write_bytes(data)
    try:
        slot_bytes = read_slot_bytes(place, namespace)
    except NamespaceMismatchError as error:
        message = str(error)
        assert str(place) in message
    else:
        assert slot_bytes % PAGE == 0
        assert json.loads(data)["namespace"] == json.loads(json.dumps(namespace.describe()))
