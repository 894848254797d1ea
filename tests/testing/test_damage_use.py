"""Use of a damaged place: each promise that a backend breaks is named, and what it may do is no finding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from plain_files import PlainFiles, PlainOptions

from tierkv.abc import BackendContext, BackendPlugin, Capabilities, ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.errors import BackendError, NamespaceMismatchError
from tierkv.frames.frame import frame_bytes
from tierkv.testing.conformance.session import Session
from tierkv.testing.damage import Outcome
from tierkv.testing.damage_use import SealedFrames, Use
from tierkv.types.namespace import Namespace

KEYS, RAW_BYTES, VERSIONS = 6, 300, 2
NAMESPACE = Namespace("tests", "r1", "bfloat16", "page", ((16, (4096,), "full_attention", None),), 4, 16)
STORED = SealedFrames(NAMESPACE.fingerprint(), [RAW_BYTES], VERSIONS)


class Forger(PlainFiles):
    """Reads a sealed frame that was never stored."""

    def read_one(self, request: ReadRequest) -> ReadResult:
        forged = STORED.frame(0, VERSIONS + 1)
        request.buffer[: len(forged)] = forged
        return len(forged)


class Mixing(PlainFiles):
    """Reads damaged frames, whatever is stored."""

    def read_one(self, request: ReadRequest) -> ReadResult:
        request.buffer[:10] = b"0123456789"
        return 10


class Stuck(PlainFiles):
    """Never writes over a file."""

    def write_one(self, request: WriteRequest) -> WriteResult:
        return (
            BackendError("it exists", key=request.key)
            if self.path(request.key).exists()
            else super().write_one(request)
        )


class Forgetful(PlainFiles):
    """Loses a frame when it is closed."""

    def close(self) -> None:
        next(self.root.glob("*.frame")).unlink()
        super().close()


class Clinging(PlainFiles):
    """Deletes nothing."""

    def delete(self, keys: Sequence[bytes]) -> list[WriteResult]:
        return [BackendError("no")] * len(keys)


class Restarting(PlainFiles):
    """Raises at its first two writes."""

    failures = 2

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        if self.failures:
            self.failures -= 1
            raise BackendError("it starts afresh")
        return super().write(requests)


def outcome_of(place: Path, kind: type[PlainFiles] = PlainFiles, **arguments: float) -> Outcome:
    """Outcome of the use of a place in which one frame is damaged."""

    def opened_as(some: type[PlainFiles], at: Path) -> Session:
        plugin = BackendPlugin("plain", "one file per chunk", PlainOptions, Capabilities(scan=True), some)
        return Session(plugin, BackendContext("plain", NAMESPACE, frame_bytes(RAW_BYTES), None), PlainOptions(str(at)))

    with opened_as(PlainFiles, place) as session:
        session.put(STORED.frames(range(KEYS), 1))
        damaged = session.backend.path(next(iter(STORED.frames([1], 1))))  # type: ignore[union-attr]  # of PlainFiles
    damaged.write_bytes(b"damaged")
    return Use(lambda at: opened_as(kind, at), STORED, KEYS, VERSIONS, **arguments).play(place)  # type: ignore[arg-type]  # as named


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        (PlainFiles, ""),
        (Forger, "frame 0 is wrong"),
        (Mixing, "another frame was read than was stored"),
        (Stuck, "not storable: it exists"),
        (Clinging, "not deletable: no"),
        (Forgetful, "a frame that was stored is lost by a restart"),
        (Restarting, "not storable: it starts afresh"),
    ],
)
def test_what_breaks_is_named(tmp_path: Path, kind: type[PlainFiles], broken: str) -> None:
    """A use that finds nothing where something is broken would call any backend sound."""
    assert outcome_of(tmp_path, kind).broken.startswith(broken)
    assert bool(outcome_of(tmp_path / "again", kind).broken) == bool(broken)


def test_what_a_backend_may_do_is_no_finding(tmp_path: Path) -> None:
    """Some backends start afresh in use, or write over no damaged frame before the framework has deleted it."""
    assert outcome_of(tmp_path / "heals", Restarting, heal_s=5.0, rounds=2).broken == ""
    assert outcome_of(tmp_path / "deleted", deletes_damaged=True).broken == ""


@pytest.mark.parametrize("names_place", [True, False])
def test_a_refusal_names_the_place(tmp_path: Path, names_place: bool) -> None:
    """A place of another namespace is left alone; its user must learn which one it is."""

    def refuse(place: Path) -> Session:
        raise NamespaceMismatchError(f"{place if names_place else 'it'} belongs to another namespace")

    outcome = Use(refuse, STORED, KEYS).play(tmp_path)
    assert (outcome.note, outcome.broken == "") == ("refused", names_place)
