"""Kit, in a stack: a chunk reaches the engine intact, or not at all; and a bad one is removed.

In each case chunks are stored, one of them is damaged, and the engine gets the prefix before it. Computed and stored
again, the chunk is intact again, also after a restart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tierkv.testing import raw as raws
from tierkv.testing.conformance.kit import A, B, StackKit
from tierkv.testing.engines.hand_engine import PAYLOAD_BYTES, Prompt
from tierkv.testing.engines.small_stack import TESTED, SmallStack
from tierkv.testing.raw import FLIPS, Damage
from tierkv.types.keys import Key

BAD = 2
"""Index of the damaged chunk of prompt A."""


class StackDataTests(StackKit):
    """Promise 1, with this backend below."""

    def test_in_a_stack(self, opened: SmallStack) -> None:
        """Chunks of a prompt are read from this tier, byte for byte, after the host tier has lost them."""
        opened.store_all(A, B)
        assert opened.load_cold(A) == opened.load_cold(B) == 4
        assert opened.stack.metrics.counters.promotions[TESTED] == 8

    def test_a_restart_finds_everything(self, place: Path) -> None:
        """The purpose of tiers: a new process starts with the old one's chunks, and may add to them."""
        self.need("durable")
        with self.stack(place) as stack:
            stack.store_all(A)
        with self.stack(place) as stack:
            assert stack.load(A) == 4
            stack.store_all(B)
        with self.stack(place) as stack:
            assert [stack.load(A), stack.load(B)] == [4, 4]

    def test_closing_brings_everything_down(self, place: Path) -> None:
        """Queued stores once vanished silently at shutdown: close writes them, and returns whether it could."""
        self.need("durable")
        with self.stack(place) as stack:
            stack.store(A)
            stack.store(B)
            assert stack.close()
        with self.stack(place) as stack:
            assert [stack.load(A), stack.load(B)] == [4, 4]

    @pytest.mark.parametrize("part", FLIPS)
    def test_bit_flip_at_rest_is_a_miss(self, place: Path, part: str) -> None:
        """A bit flip once loaded as success: the frame binds key, namespace and checksum, and each read verifies it."""
        self._spoilt_at_rest(place, FLIPS[part])

    def test_truncated_at_rest_is_a_miss(self, place: Path) -> None:
        """A truncated file once was never loadable and never rewritten: bad entries are deleted, and stored again."""
        self._spoilt_at_rest(place, raws.truncate)

    def test_empty_at_rest_is_a_miss(self, place: Path) -> None:
        """A power cut truncates a file that was not synced."""
        self._spoilt_at_rest(place, raws.empty)

    def test_rubbish_at_rest_is_a_miss(self, place: Path) -> None:
        """A misdirected write replaces the bytes."""
        self._spoilt_at_rest(place, raws.fill_with_rubbish)

    def test_removed_at_rest_is_a_miss(self, place: Path) -> None:
        """A cleanup script removes the file."""
        self._spoilt_at_rest(place, raws.remove)

    def test_swapped_at_rest_is_a_miss(self, place: Path) -> None:
        """Two exchanged files once loaded as success: an intact frame under another key is still bad."""
        self.need("durable")
        self.need_raw()
        with self.stack(place) as stack:
            stack.store_all(A, B)
        raws.swap(self.raw(place, stack.context), A.keys[BAD], B.keys[0])
        with self.stack(place) as stack:
            assert [stack.load(A), stack.load(B)] == [BAD, 0]
            self._heals(stack, A, B)

    def test_foreign_namespace_at_rest_is_a_miss(self, place: Path) -> None:
        """A file copied from another model's directory is an intact frame of the right key, with wrong bytes."""
        self.need("durable")
        self.need_raw()
        with self.stack(place, model="other") as other:
            other.store_all(A)
        with self.stack(place) as stack:
            stack.store_all(A)
        foreign = self.raw(place, other.context).read(A.keys[BAD])
        self.raw(place, stack.context).write(A.keys[BAD], foreign)
        self._one_bad(place)

    def test_another_layout_at_rest_is_a_miss(self, place: Path) -> None:
        """An object of another length once loaded "ok": identity carries the layout, the length is checked first."""
        self.need("durable")
        self.need_raw()
        with self.stack(place, payload_bytes=PAYLOAD_BYTES // 2) as other:
            other.store_all(A)
        with self.stack(place) as stack:
            stack.store_all(A)
        shorter = self.raw(place, other.context).read(A.keys[BAD])
        self.raw(place, stack.context).write(A.keys[BAD], shorter)
        self._one_bad(place)

    def test_another_layout_is_another_namespace(self, place: Path) -> None:
        """A prompt has the same keys in a model with other pages: the lookup may miss, never return wrong bytes."""
        with self.stack(place) as stack:
            stack.store_all(A)
        with self.stack(place, payload_bytes=PAYLOAD_BYTES // 2) as other:
            assert other.load(A) == 0
            other.store_all(A)
            assert other.load_cold(A) == 4
        if self.capabilities.durable:
            with self.stack(place) as stack:
                assert stack.load(A) == 4

    def test_bit_flip_while_open_is_a_miss(self, opened: SmallStack) -> None:
        """Bytes may change under a running stack, whose index lists the frames that it wrote."""
        self._spoilt_while_open(opened, raws.flip(lambda length: length - 1))

    def test_truncated_while_open_is_a_miss(self, opened: SmallStack) -> None:
        """A frame is shorter than the index says."""
        self._spoilt_while_open(opened, raws.truncate)

    def test_swapped_while_open_is_a_miss(self, opened: SmallStack) -> None:
        """Two entries are exchanged while their namespace is open."""
        self._spoilt_while_open(opened, lambda raw, key: raws.swap(raw, key, B.keys[0]), others=(Prompt(3),))

    def test_removed_while_open_is_forgotten(self, opened: SmallStack) -> None:
        """An object deleted out of band once was a false hit for ever: a failed load removes it from the index."""
        opened.store_all(A, B)
        opened.verbs.remove(A.keys[BAD])
        reads: list[Key] = []
        opened.faulty.add("read_into", _note_keys(reads))
        assert opened.load_cold(A) == BAD
        assert opened.load_cold(A) == BAD
        assert reads.count(A.keys[BAD]) <= 1, "what is gone was read again"
        self._heals(opened, A, B)

    def test_bad_frames_are_quarantined(self, opened: SmallStack) -> None:
        """A frame that fails its check is counted and deleted; otherwise each lookup would read it again."""
        opened.store_all(A)
        raws.flip(lambda length: length - 1)(opened.verbs, A.keys[BAD])
        assert opened.load_cold(A) == BAD
        opened.settle()
        assert opened.stack.metrics.counters.chunks_corrupt[TESTED] == 1
        assert opened.verbs.has([A.keys[BAD]]) == [False]
        assert opened.verbs.has([A.keys[0]]) == [True]

    def _spoilt_at_rest(self, place: Path, damage: Damage) -> None:
        self.need("durable")
        self.need_raw()
        with self.stack(place) as stack:
            stack.store_all(A, B)
        damage(self.raw(place, stack.context), A.keys[BAD])
        self._one_bad(place, B)

    def _one_bad(self, place: Path, *whole: Prompt) -> None:
        """Check that chunk BAD of A is a miss and all others are hits, and that a re-store is durable."""
        with self.stack(place) as stack:
            assert stack.load(A) == BAD
            assert [stack.load(prompt) for prompt in whole] == [4] * len(whole)
            self._heals(stack, A, *whole)
        with self.stack(place) as stack:
            assert [stack.load(prompt) for prompt in (A, *whole)] == [4] * (1 + len(whole))

    def _spoilt_while_open(self, stack: SmallStack, damage: Damage, others: tuple[Prompt, ...] = (B,)) -> None:
        stack.store_all(A, B, *others)
        damage(stack.verbs, A.keys[BAD])
        assert stack.load_cold(A) == BAD
        assert [stack.load_cold(prompt) for prompt in others] == [4] * len(others)
        self._heals(stack, A, *others)

    def _heals(self, stack: SmallStack, *prompts: Prompt) -> None:
        """The engine computes the missing chunks again; from then on they are found."""
        stack.settle()
        stack.pass_time(60.0)  # whatever is believed for a while
        stack.forget_host()
        stack.store_all(*prompts)
        assert [stack.load_cold(prompt) for prompt in prompts] == [4] * len(prompts)


def _note_keys(into: list[Key]) -> Callable[..., object]:
    def fault(batch: list[object], inner: Callable[[list[object]], object]) -> object:
        into.extend(request.key for request in batch)  # type: ignore[attr-defined]  # requests of a read
        return inner(batch)

    return fault
