"""Any bytes in the files of an LMDB tier: checked before LMDB uses them, and read or refused by our own errors."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from pathlib import Path

import pytest
from hypothesis import strategies as st
from lmdb_support import KIB, MIB, context, directory, key, namespace, open_at, put
from parser_inputs import any_bytes, any_json, changed_bytes, parser_test

from tierkv.errors import NamespaceMismatchError
from tierkv_lmdb.directory import FORMAT, LOSSES_MAX, claim_namespace, claim_root, read_losses, record_loss
from tierkv_lmdb.frame_reads import INDEX, PLACED_INDEX, RANKED_INDEX, page_of, unpack_index
from tierkv_lmdb.verification.file_format import DamageError
from tierkv_lmdb.verification.verify import used_bytes, verify

HERE = Path(__file__).parent
NAMESPACE = {**FORMAT, "fingerprint": namespace().fingerprint().hex(), "namespace": namespace().describe()}
LOSSES = {"count": 3, "last": "a page is damaged"}


@functools.cache
def data_file() -> bytes:
    """Data file of a small tier."""
    with tempfile.TemporaryDirectory() as place:
        backend = open_at(Path(place), context(MIB), durability="none")
        put(backend, {key(number): bytes([number]) * (100 if number % 3 else 5 * KIB) for number in range(24)})
        backend.delete([key(2), key(9)])
        backend.close()
        return (directory(Path(place)) / "data.mdb").read_bytes()


def data_files() -> st.SearchStrategy[bytes]:
    """Draw data files with a few changes of bytes, made when they are drawn: the file needs LMDB."""
    return st.deferred(lambda: changed_bytes([data_file()]) | any_bytes([data_file()[:8192]]))


@parser_test(HERE / "corpus" / "data", data_files())
def test_any_data_file_is_checked(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """LMDB trusts its pages, and may end the process: the check before it must itself survive whatever is there."""
    path = tmp_path_factory.getbasetemp() / "data.mdb"
    path.write_bytes(data)
    with contextlib.suppress(DamageError):
        assert all(isinstance(lonely, bytes) for lonely in verify(path, MIB))
    with contextlib.suppress(DamageError):
        assert used_bytes(path) >= 0


@parser_test(HERE / "corpus" / "documents", any_json([FORMAT, NAMESPACE, LOSSES]))
def test_any_document_is_read_set_aside_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """Marker, manifest and the count of losses: none may keep an engine from starting with a traceback."""
    root = tmp_path_factory.mktemp("place", numbered=True)
    (root / "tierkv-lmdb.json").write_bytes(data)
    with contextlib.suppress(NamespaceMismatchError):
        claim_root(root)
    inside = root / namespace().fingerprint().hex()
    inside.mkdir(exist_ok=True)
    (inside / "namespace.json").write_bytes(data)
    with contextlib.suppress(NamespaceMismatchError):
        claim_namespace(inside, namespace())
    (inside / "damage.json").write_bytes(data)
    before = read_losses(inside)[0]
    record_loss(inside, "a page is damaged")
    assert read_losses(inside) == (min(before + 1, LOSSES_MAX), "a page is damaged")


ENTRIES = [INDEX.pack(1, 4096), RANKED_INDEX.pack(1, 4096, 7), PLACED_INDEX.pack(1, 8192, 7, 12)]


@parser_test(HERE / "corpus" / "entries", any_bytes(ENTRIES, 40))
def test_any_entry_of_the_index_is_read_or_none(data: bytes) -> None:
    """The check at open looks at each entry; one that changes afterwards must not end a listing."""
    size, rank = unpack_index(data)
    assert size >= 0
    assert rank >= 0
    assert page_of(data) >= 0
