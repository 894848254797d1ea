"""Kit: keys and namespaces. Keys are bytes, whatever a store makes of them: only equal bytes are equal keys."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tierkv.errors import TierKVError
from tierkv.testing.conformance.kit import KitBase
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import make_frame, make_key
from tierkv.types.keys import Key

LIKE_NAMES = ("org/m", "org-m", "org_m", "org\\m", "org%2Fm", "Org/M", "org/m ", "../org/m", "org//m", "org:m")
"""Keys that a careless conversion to a file name maps to one name."""

OTHER_IDENTITIES: tuple[dict[str, Any], ...] = (
    {"revision": "r2"},
    {"dtype": "float16"},
    {"layout": "split"},
    {"groups": ((16, (8192,), "full_attention", None),)},
    {"groups": ((16, (4096,), "sliding_window", 128),)},
    {"blocks_per_chunk": 2},
    {"hash_block_tokens": 8},
    {"rank": 1, "world_size": 2},
    {"epoch": "1"},
    {"replica": 1},
)
"""One field of the namespace each: if it differs, the same key has other bytes."""


class KeyTests(KitBase):
    """Different keys are different entries, however similar."""

    def test_keys_of_every_length(self, session: Session) -> None:
        """Engines hash to 20 to 60 bytes, and the group adds four: no length may be special."""
        self._stays_apart(session, [make_key(length, length) for length in range(20, 65)])

    def test_keys_that_begin_alike(self, session: Session) -> None:
        """One key may be a prefix or suffix of another: prefix comparisons and truncated file names confuse them."""
        whole = bytes(range(1, 65))
        beginnings = [Key(whole[:length]) for length in (20, 21, 32, 63, 64)]
        self._stays_apart(session, [*beginnings, *(Key(whole[-length:]) for length in (20, 21, 32, 63))])

    def test_keys_that_differ_in_one_bit(self, session: Session) -> None:
        """A key that is shortened, hashed weakly or case-folded for a name loses such a bit."""
        base = make_key(1)
        changed = [bytes([*base[:i], base[i] ^ (1 << i % 8), *base[i + 1 :]]) for i in range(len(base))]
        self._stays_apart(session, [base, *map(Key, changed)])

    def test_oversized_keys(self, session: Session) -> None:
        """A key of up to 256 bytes exceeds NAME_MAX as a name: it is stored, or refused without its neighbours."""
        usual, size = make_key(1), self.small
        long = [Key(bytes([number]) * length) for number, length in enumerate((65, 100, 128, 200, 255, 256), start=1)]
        long.append(Key(bytes([6]) * 255 + b"\x07"))  # differs from its neighbour in the last byte alone
        refused: list[Key] = []
        for key in long:
            for stored, result in zip((usual, key), session.write_any([usual, key], size), strict=True):
                assert result is None or stored == key, f"{usual.hex()} was refused beside a key of {len(key)} bytes"
                refused += [key] if result is not None else []
        for key in long:
            (found,) = session.read([key])
            if key in refused:
                assert found is None or isinstance(found, TierKVError), "refused, yet there"
            else:
                assert found == make_frame(key, 1, size)
        assert session.get(usual) == make_frame(usual, 1, size)

    def test_namespaces_with_like_names(self, place: Path) -> None:
        """The models org/m and org-m once shared a file: similar names are different models."""
        self.need()
        self._namespaces_stay_apart(place, [{"model": name} for name in LIKE_NAMES])

    def test_namespaces_with_long_and_odd_names(self, place: Path) -> None:
        """A model's name is the user's: longer than any file name, in any script, and never truncated."""
        self.need()
        names = ["m" * 1000, "m" * 999 + "n", "模型/🦙" * 40, "", ".", "..", "\x00", "a\nb"]
        self._namespaces_stay_apart(place, [{"model": name} for name in names])

    def test_every_field_of_the_namespace_counts(self, place: Path) -> None:
        """Bytes of another dtype, layout, block size, rank or epoch are other bytes under the same key."""
        self.need()
        self._namespaces_stay_apart(place, [{}, *OTHER_IDENTITIES])

    def _stays_apart(self, session: Session, keys: list[Key]) -> None:
        frames = {key: make_frame(key, 1, self.small) for key in keys}
        session.put(frames)
        assert session.read(keys) == list(frames.values())
        if self.capabilities.scan:
            assert session.scan() == dict.fromkeys(keys, self.small)
        session.forget(keys[::2])
        assert session.read(keys) == [None if i % 2 == 0 else frames[key] for i, key in enumerate(keys)]

    def _namespaces_stay_apart(self, place: Path, identities: list[dict[str, Any]]) -> None:
        key, size = make_key(1), self.small
        with ExitStack() as opened:
            sessions = [
                opened.enter_context(self.open_with(place, self.context(**identity))) for identity in identities
            ]
            for version, session in enumerate(sessions, start=1):
                assert session.get(key) is None, f"{identities[version - 1]} sees another's chunk"
                session.put({key: make_frame(key, version, size)})
            for version, session in enumerate(sessions, start=1):
                assert session.get(key) == make_frame(key, version, size), f"{identities[version - 1]}"
