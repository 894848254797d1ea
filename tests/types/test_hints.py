"""Hints are read strictly; faults are named, and the other hints still count."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierkv.types.hints import _READERS, ALLOWED, NO_HINTS, RequestHints, parse_hints


def read(**hints: object) -> RequestHints:
    """Hints without a fault."""
    found, faults = parse_hints({"tierkv": hints})
    assert not faults
    return found


def test_one_list_of_keys() -> None:
    """A key that is read but not described, or described but not read, is of no use."""
    assert list(ALLOWED) == list(_READERS) == [field.name for field in fields(RequestHints)]


def test_every_key_is_taken() -> None:
    """The user's values reach the stack."""
    hints = read(
        load_tiers=["host", "disk"], max_load_tokens=8, max_offload_tokens=0, store=["disk"], priority=-3, ttl_s=1.5,
        retain=True, session="s1", continues=0.25, closed=True, one_shot=True,
    )  # fmt: skip
    assert hints == RequestHints(
        load_tiers=frozenset({"host", "disk"}), max_load_tokens=8, max_offload_tokens=0, store=frozenset({"disk"}),
        priority=-3, ttl_s=1.5, retain=True, session="s1", continues=0.25, closed=True, one_shot=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given_", "meant"), [("yes", 1.0), ("no", 0.0), (True, 1.0), (False, 0.0), (0, 0.0), (1, 1.0), (0.5, 0.5)]
)
def test_continues_is_a_word_or_a_probability(given_: object, meant: float) -> None:
    """Three ways of saying how likely the session goes on end in one number."""
    assert read(continues=given_).continues == meant


def test_store_false_and_an_empty_list_store_nothing() -> None:
    """Both spellings of "nowhere" mean it, and true means everywhere."""
    assert not read(store=False).stores
    assert not read(store=[]).stores
    assert read(store=True).stores
    assert read(store=True).store is None


WRONG = [
    ("load_tiers", "disk"), ("load_tiers", [1]), ("load_tiers", ["t"] * 65), ("max_load_tokens", True),
    ("max_load_tokens", -1), ("max_load_tokens", 1.0), ("max_offload_tokens", "5"), ("store", 1), ("store", "disk"),
    ("priority", 101), ("priority", True), ("priority", 0.5), ("ttl_s", 0), ("ttl_s", -1.0), ("ttl_s", float("inf")),
    ("ttl_s", float("nan")), ("ttl_s", True), ("ttl_s", "9"), ("retain", 1), ("session", ""), ("session", "x" * 257),
    ("session", 7), ("continues", "maybe"), ("continues", 1.1), ("continues", float("nan")), ("continues", []),
    ("closed", "yes"), ("one_shot", 0),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG, ids=str)
def test_a_wrong_value_is_ignored_by_name(key: str, value: object) -> None:
    """True is not 1 and "5" is no number; the message names key, value and what may be given."""
    hints, (fault,) = parse_hints({"tierkv": {key: value}})
    assert getattr(hints, key) == getattr(NO_HINTS, key)
    assert fault.key == f"tierkv.{key}"
    assert ALLOWED[key] in fault.message


def test_a_fault_leaves_the_other_keys_alone() -> None:
    """One typing error must not disable the user's other hints."""
    hints, faults = parse_hints({"tierkv": {"priority": "high", "session": "s", "ttl_s": None}})
    assert [fault.kind for fault in faults] == ["type"]
    assert hints == RequestHints(session="s")


def test_an_unknown_key_is_told_with_the_nearest_one() -> None:
    """A misspelt key would otherwise be a hint that silently never works."""
    _, (fault,) = parse_hints({"tierkv": {"one_shoot": True}})
    assert "tierkv.one_shoot is unknown" in fault.message
    assert "'one_shot'" in fault.message


def test_an_unknown_tier_is_told_with_the_nearest_one() -> None:
    """The name is ignored, the others count: a fleet's requests may name tiers that only some stacks have."""
    hints, (fault,) = parse_hints({"tierkv": {"load_tiers": ["dsk", "host"]}}, ["host", "disk"])
    assert hints.load_tiers == frozenset({"host"})
    assert "'dsk'" in fault.message
    assert "'disk'" in fault.message


def test_s12_the_outer_key_still_counts_and_the_inner_one_wins() -> None:
    """S12: engines that say max_offload_tokens beside ``tierkv`` keep what they had."""
    assert parse_hints({"max_offload_tokens": 5})[0].max_offload_tokens == 5
    assert parse_hints({"max_offload_tokens": 5, "tierkv": {"max_offload_tokens": 0}})[0].max_offload_tokens == 0


@pytest.mark.parametrize("params", [[], "x", 3, {"tierkv": []}, {"tierkv": "yes"}], ids=str)
def test_what_is_no_mapping_says_nothing(params: object) -> None:
    """Reading raises nothing, whatever an engine passes."""
    hints, faults = parse_hints(params)
    assert hints is NO_HINTS
    assert len(faults) == 1


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*ALLOWED, "x", 3]), anything, max_size=5))
def test_any_value_is_read_or_ignored(hints: dict[Any, Any]) -> None:
    """Faulty input never raises; each value is either used or reported, never both."""
    found, faults = parse_hints({"tierkv": hints}, ["host", "disk"])
    for key, value in hints.items():
        path = f"tierkv.{key}"
        told = any(path in fault.message or repr(key) in fault.message for fault in faults)
        if key not in ALLOWED:
            assert told
        elif value is not None and not told and key not in ("continues", "ttl_s", "load_tiers", "store"):
            assert getattr(found, key) == value
            assert type(getattr(found, key)) is type(value)
