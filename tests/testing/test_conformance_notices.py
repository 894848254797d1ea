"""A kit that accepts everything is worse than none: each promise is broken once, and the right test must fail."""

from __future__ import annotations

import inspect

import pytest
from broken_backends import BROKEN

from tierkv.testing import BackendConformance

pytest_plugins = ["pytester"]

SUITE = """
import plain_files
from broken_backends import BROKEN
from tierkv.testing import BackendConformance

class TestBroken(BackendConformance):
    plugin = BROKEN[{name!r}][1]
    crash_rounds = 20
    model_examples = 100

    def make_options(self, place):
        return plain_files.PlainOptions(str(place))

    def path(self, place, key):
        return place / self.context().namespace.fingerprint().hex() / f"{{key.hex()}}.frame"

    def damage(self, place, key):
        data = bytearray(self.path(place, key).read_bytes())
        data[0] ^= 1
        self.path(place, key).write_bytes(data)

    def raw_remove(self, place, key):
        self.path(place, key).unlink()
"""


@pytest.mark.parametrize("name", BROKEN)
def test_the_mistake_is_noticed(pytester: pytest.Pytester, name: str) -> None:
    """The test named beside the mistake fails, by an assertion with an explanation or by what the backend raised."""
    pytester.makepyfile(SUITE.format(name=name))
    expected = BROKEN[name][0]
    result = pytester.runpytest_inprocess("-k", expected)
    result.assert_outcomes(failed=1, deselected=len(kit_tests()) - 1)


def test_every_test_of_the_kit_was_seen_to_fail() -> None:
    """A new test in the kit comes with a mistake that it notices."""
    assert kit_tests() == {test for test, _ in BROKEN.values()}


def kit_tests() -> set[str]:
    """Names of all tests that a backend inherits."""
    functions = inspect.getmembers(BackendConformance, inspect.isfunction)
    return {name for name, _ in functions if name.startswith("test_")}
