"""Common mistakes of a first backend: the kit says in plain words what to change, in the test that runs first."""

from __future__ import annotations

import pytest
from test_conformance_notices import REMOTE, SUITE

pytest_plugins = ["pytester"]


@pytest.mark.parametrize(
    ("mistake", "test", "words"),
    [
        ("AuthoritativeAndShared", "test_round_trip_of_every_size", "authoritative_index and shared exclude each"),
        ("OddAlignment", "test_empty_batches", "alignment = 1000 is no power of two"),
        ("CountsKeys", "test_contains_answers_true_or_false", "contains answered 1 (int): return True or False"),
        ("CountsKeys", "test_absent_is_none", "contains answered 0: return True or False"),
        ("ReturnsTheFrame", "test_round_trip_of_every_size", "copy the frame to request.buffer and return its length"),
        ("SaysTrueForStored", "test_contains_answers_true_or_false", "write answered True: return None where it"),
        ("ForgetsToReturn", "test_empty_batches", "delete returned None for 0 keys: return a list with one result"),
        ("YieldsPairs", "test_scan_yields_keys_as_they_were_given", "yield tierkv.abc.Entry(key, frame_bytes)"),
        ("HasNoDelete", "test_declaration_is_consistent", "the backend has no method delete: it needs all of"),
        ("LosesTheThird", "test_scan_yields_keys_as_they_were_given", "write said that it stored"),
        ("ListsItsOwnNames", "test_scan_yields_keys_as_they_were_given", "begins with b'frame:'"),
    ],
)
def test_a_mistake_is_explained(pytester: pytest.Pytester, mistake: str, test: str, words: str) -> None:
    """An author reads one sentence, and not the difference of two dictionaries."""
    file = pytester.makepyfile(SUITE.format(plugin=f"BROKEN[{mistake!r}][1]"))
    output = pytester.runpytest_inprocess(f"{file}::TestBroken::{test}").stdout.str()
    assert words in " ".join(output.replace("\nE  ", " ").split()), output


def test_an_open_that_asks_no_server_is_explained(pytester: pytest.Pytester) -> None:
    """An async client connects with its first call; the tier must know at its opening."""
    file = pytester.makepyfile(REMOTE.format(name="OpensUnasked-no_server_is_an_error_at_open"))
    output = pytester.runpytest_inprocess(f"{file}::TestBroken::test_no_server_is_an_error_at_open").stdout.str()
    assert "open succeeded without a server: contact it in open" in " ".join(output.replace("\nE  ", " ").split())


def test_a_missing_entry_point_is_explained(pytester: pytest.Pytester) -> None:
    """The message has the line of pyproject.toml that is missing, and names the plugins that cannot be used."""
    file = pytester.makepyfile(SUITE.format(plugin="plain_files.PLUGIN") + "    not_installed = ''")
    output = pytester.runpytest_inprocess(f"{file}::TestBroken::test_users_can_install_it").stdout.str()
    assert "[project.entry-points.tierkv]" in output
    assert "TIERKV_SPI" in output


def test_a_path_that_stays_relative_is_explained(pytester: pytest.Pytester) -> None:
    """An engine may change its directory, and a tier that is opened again would begin a second, empty store."""
    file = pytester.makepyfile("""
        import dataclasses, plain_files
        from tierkv.testing import BackendConformance

        @dataclasses.dataclass(frozen=True)
        class Options:
            path: str

        class TestBroken(BackendConformance):
            plugin = dataclasses.replace(plain_files.PLUGIN, options=Options)
            not_installed = "a mistake for these tests"
            raw_access = "not needed here"

            def make_options(self, place):
                return Options(str(place))
    """)
    output = pytester.runpytest_inprocess(f"{file}::TestBroken::test_declaration_is_consistent").stdout.str()
    assert "a relative `path` stays relative" in output
    assert "absolute_path(self.path)" in output


def test_the_declaration_comes_first_and_stacks_last(pytester: pytest.Pytester) -> None:
    """The first failure that an author sees is the one to mend first."""
    file = pytester.makepyfile(SUITE.format(plugin="plain_files.PLUGIN"))
    result = pytester.runpytest_inprocess("--collect-only", "-q", str(file))
    names = [line.rpartition("::")[2].partition("[")[0] for line in result.outlines if "::" in line]
    assert names[0] == "test_declaration_is_consistent"
    assert names.index("test_empty_batches") < names.index("test_close_twice")
    assert names.index("test_close_twice") < names.index("test_a_hot_hit_is_answered_at_once")
