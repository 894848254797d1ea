"""Kit: rules for the suite itself, so that "passes the kit" means the same for every backend."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from tierkv.testing.conformance.kit import KitBase
from tierkv.testing.frames import make_frame, make_key

SKIPPING_MARKS = {"skip", "skipif", "xfail"}


def kit_tests(suite: type) -> dict[str, Callable[..., object]]:
    """Tests that a suite inherits from the kit, as the kit defines them."""
    found: dict[str, Callable[..., object]] = {}
    for base in reversed(suite.__mro__):
        if base.__module__.startswith("tierkv.testing."):
            found |= {name: test for name, test in vars(base).items() if name.startswith("test_")}
    return found


class RuleTests(KitBase):
    """Rules for the author's settings."""

    def test_the_kit_is_whole(self, request: pytest.FixtureRequest) -> None:
        """A test that a suite replaces, removes or marks as skipped proves nothing, but looks passed."""
        suite = type(self)
        changed = [name for name, test in kit_tests(suite).items() if inspect.getattr_static(suite, name) is not test]
        assert not changed, f"{suite.__name__} overrides or removes tests of the kit: {', '.join(changed)}"
        marks = {mark.name for mark in request.node.iter_markers()}
        for name in kit_tests(suite):
            marks |= {mark.name for mark in getattr(getattr(suite, name), "pytestmark", [])}
        assert not marks & SKIPPING_MARKS, f"{suite.__name__} is marked {', '.join(sorted(marks & SKIPPING_MARKS))}"

    def test_raw_access_is_given_or_excused(self) -> None:
        """Half of the kit damages stored bytes: a suite without raw access must give a reason in the report."""
        has_raw = type(self).raw is not KitBase.raw
        read_only = self.capabilities.read_only
        if not has_raw and not self.raw_access and not read_only:
            raise AssertionError(
                "define raw(self, place, context), or give the reason for its absence in raw_access; the table of "
                "capabilities shows it"
            )
        assert not (has_raw and self.raw_access), "raw() is defined, and raw_access says that there is none: which?"
        if has_raw and self.capabilities.shared and not read_only:
            assert self.raw_live, "others may change a shared place at any time: set raw_live, and let raw() do so"

    def test_the_numbers_are_no_excuse(self) -> None:
        """A suite may reduce the number of examples for slow stores, but not to zero."""
        least = {
            "frame_bytes_max": 12 * 1024,
            "full_capacity_bytes": 16 * self.frame_bytes_max,
            "many_frames": 20,
            "model_examples": 1,
            "model_steps": 5,
            "crash_rounds": 1,
        }
        small = {name: value for name, value in least.items() if getattr(self, name) < value}
        assert not small, f"at least: {small}"
        assert self.frame_bytes_max % self.capabilities.alignment == 0, "frame_bytes_max is no multiple of alignment"

    def test_local_place_is_the_truth(self, place: Path) -> None:
        """``local_place = False`` skips all tests of files, so it is only for backends without files."""
        self.need()
        with self.open(place) as session:
            session.put({make_key(1): make_frame(make_key(1), 1, self.small)})
            assert place.exists() == self.local_place, f"local_place = {self.local_place}, and files are there or not"
