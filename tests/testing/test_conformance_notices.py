"""A kit that accepts everything is worse than none: each promise is broken once, and the right test must fail."""

from __future__ import annotations

import gc
import warnings

import broken_at_rest
import broken_backends
import broken_calls
import broken_remotes
import broken_stores
import pytest
from broken_frameworks import BREAKS
from broken_registry import BROKEN

from tierkv.testing import BackendConformance
from tierkv.testing.conformance.rules import kit_tests

pytest_plugins = ["pytester"]

MISTAKES = (broken_at_rest, broken_backends, broken_calls, broken_stores)
"""Modules that fill BROKEN when they are imported."""

SUITE = """
import broken_at_rest, broken_backends, broken_calls, broken_stores
import plain_files
import pytest
from broken_registry import BROKEN
from tierkv.testing import BackendConformance

class TestBroken(BackendConformance):
    plugin = {plugin}
    not_installed = "a mistake for these tests"
    crash_rounds = 20
    model_examples = 300
    raw_live = True

    def make_options(self, place):
        return plain_files.PlainOptions(str(place))

    def raw(self, place, context):
        return plain_files.PlainRaw(place, context)
"""

REMOTE = """
import broken_remotes
import plain_remote
from tierkv.testing import BackendConformance
from tierkv.testing.conformance.backend import outages
from tierkv.testing.conformance.stack import outages as stack_outages

outages.HEALED_MAX_S = stack_outages.HEALED_MAX_S = 3.0

class TestBroken(BackendConformance):
    plugin = broken_remotes.OUTAGES[{name!r}][1]
    not_installed = "a mistake for these tests"
    local_place = False
    raw_access = "not needed here"

    def make_options(self, place):
        return plain_remote.PlainremoteOptions(url=f"http://127.0.0.1:{{plain_remote.one_server().port}}{{place}}")

    def server_control(self):
        return plain_remote.one_server()
"""

PATCH = """
from broken_frameworks import BREAKS

@pytest.fixture(autouse=True)
def broken(monkeypatch):
    BREAKS[{name!r}].apply(monkeypatch)
"""


def failures(pytester: pytest.Pytester, text: str, test: str) -> int:
    """Number of failed or erroneous cases of one test of the suite."""
    file = pytester.makepyfile(text)
    with warnings.catch_warnings():
        # A broken backend may leave files open. They are collected here, and not in the middle of a later test.
        warnings.simplefilter("ignore", ResourceWarning)
        outcomes = pytester.runpytest_inprocess(f"{file}::TestBroken::{test}").parseoutcomes()
        gc.collect()
    return outcomes.get("failed", 0) + outcomes.get("errors", 0)


@pytest.mark.parametrize("name", BROKEN)
def test_the_mistake_is_noticed(pytester: pytest.Pytester, name: str) -> None:
    """The test named beside the mistake fails, by an assertion with an explanation or by what the backend raised."""
    test, _ = BROKEN[name]
    assert failures(pytester, SUITE.format(plugin=f"BROKEN[{name!r}][1]"), test)


@pytest.mark.parametrize("name", broken_remotes.OUTAGES)
def test_a_mistake_in_an_outage_is_noticed(pytester: pytest.Pytester, name: str) -> None:
    """Remote backends fail in their own ways: their server really is killed and frozen."""
    test, _ = broken_remotes.OUTAGES[name]
    assert failures(pytester, REMOTE.format(name=name), test)


@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_promise_of_the_framework_is_noticed(pytester: pytest.Pytester, name: str) -> None:
    """Joint promises of backend and framework can be broken on the framework's side, too."""
    plugin = f"plain_files.{BREAKS[name].plugin}"
    text = SUITE.format(plugin=plugin) + PATCH.format(name=name)
    assert any(failures(pytester, text, BREAKS[name].test) for _ in range(BREAKS[name].attempts))


def test_every_test_of_the_kit_was_seen_to_fail() -> None:
    """A new test in the kit comes with a mistake that it notices."""
    seen = {test for test, _ in (*BROKEN.values(), *broken_remotes.OUTAGES.values())}
    seen |= {broken.test for broken in BREAKS.values()} | set(RULES)
    assert set(kit_tests(BackendConformance)) == seen


RULES: dict[str, str] = {
    "test_users_can_install_it": "    not_installed = ''",
    "test_the_kit_is_whole": "    test_empty_batches = None",
    "test_raw_access_is_given_or_excused": "    raw = BackendConformance.raw",
    "test_the_numbers_are_no_excuse": "    crash_rounds = 0",
    "test_local_place_is_the_truth": "    local_place = False",
}
"""Rules of the kit for suites -> a line that breaks them."""


@pytest.mark.parametrize("rule", RULES)
def test_a_suite_that_cheats_is_noticed(pytester: pytest.Pytester, rule: str) -> None:
    """A suite can be written so that it proves nothing; the kit's rules for suites each forbid a way to do that."""
    assert failures(pytester, SUITE.format(plugin="plain_files.PLUGIN") + RULES[rule], rule)


@pytest.mark.parametrize(
    "line",
    [
        "    def test_empty_batches(self, session): assert True",
        "    raw_access = 'too lazy'",
        "    model_examples = 0",
        "    pytestmark = pytest.mark.skip(reason='later')",
        "    pytestmark = pytest.mark.xfail",
    ],
)
def test_other_ways_to_cheat_are_noticed(pytester: pytest.Pytester, line: str) -> None:
    """The suite's class is checked as a whole: it breaks a rule."""
    text = SUITE.format(plugin="plain_files.PLUGIN") + line
    assert any(failures(pytester, text, rule) for rule in RULES)


@pytest.mark.parametrize(
    "skip",
    ["pytest.skip('not today')", "pytest.importorskip('no_such_module')", "pytest.xfail('one day')"],
)
def test_a_skip_that_is_not_the_kits_fails(pytester: pytest.Pytester, skip: str) -> None:
    """A capability that is declared is tested: a suite that skips from within its own methods does not pass."""
    text = SUITE.format(plugin="plain_files.PLUGIN").replace(
        "return plain_files.PlainOptions(str(place))", f"{skip}; return plain_files.PlainOptions(str(place))"
    )
    assert failures(pytester, text, "test_empty_batches") or failures(pytester, text, "test_close_twice")


def test_a_shared_backend_without_live_access_is_noticed(pytester: pytest.Pytester) -> None:
    """Others may change a shared place at any time: a suite that looks at closed places only has not tried it."""
    text = SUITE.format(plugin="plain_files.SHARED_PLUGIN") + "    raw_live = False"
    assert failures(pytester, text, "test_raw_access_is_given_or_excused")


def test_there_are_enough_tests() -> None:
    """The number of tests for third parties is promised."""
    assert len(kit_tests(BackendConformance)) >= 80
    assert len(BROKEN) >= 40
