"""Engines of one description over one storage: data parallel replicas (``EngineSpec.replica``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stack_bed import CHUNK_TOKENS, ENGINE, prompts_of, serve, stack_config

from tierkv.config import parse_config
from tierkv.errors import BackendUnavailableError, ConfigError
from tierkv.stack.opening import open_stack, open_staged_stack
from tierkv.stack.stack import Stack
from tierkv.types.namespace import Namespace

pytestmark = pytest.mark.needs_torch

CHUNKS = 120 // CHUNK_TOKENS * CHUNK_TOKENS
OURS, THEIRS = prompts_of(1, 1, shared=0), prompts_of(2, 1, shared=0)
Expected = Callable[..., list[list[int]]]


@contextmanager
def replica_of(config: dict[str, Any], number: int) -> Iterator[Stack]:
    """Open the stack of one replica."""
    stack = open_stack(config, replace(ENGINE.engine_spec(), replica=number))
    try:
        yield stack
    finally:
        assert stack.close(timeout_s=30.0)


def over(place: Path, backend: str, *, objects: bool = False) -> dict[str, Any]:
    """Host over a tier that one process at a time may open, and optionally over a shared one."""
    local = {"name": "local", "backend": backend, "path": str(place / "local"), "capacity": "8MiB"}
    if backend == "disk":
        local["min_free_bytes"] = 0
    shared = {"name": "objects", "backend": "fsspec", "url": f"file://{place}/objects"}
    return stack_config(place, tiers=[local, shared] if objects else [local])


def loaded(stack: Stack, prompts: list[list[int]], expected: Expected) -> dict[str, int]:
    """Tokens by the tier that served them, of right answers."""
    before = stack.metrics.counters.tokens_loaded.copy()
    assert serve(stack, prompts) == expected(prompts)
    return dict(stack.metrics.counters.tokens_loaded - before)


@pytest.mark.parametrize("backend", ["disk", "lmdb"])
def test_each_replica_has_its_own_place_and_finds_it_again(tmp_path: Path, backend: str, expected: Expected) -> None:
    """`--data-parallel-size 2` with one configured path: both replicas start, and a restart finds both."""
    pytest.importorskip(f"tierkv_{backend}")
    config = over(tmp_path, backend)
    with replica_of(config, 0) as one, replica_of(config, 1) as other:
        assert loaded(one, OURS, expected) == loaded(other, THEIRS, expected) == {}
    with replica_of(config, 1) as other, replica_of(config, 0) as one:
        assert loaded(one, THEIRS, expected) == loaded(other, OURS, expected) == {}
        assert loaded(one, OURS, expected) == loaded(other, THEIRS, expected) == {"local": CHUNKS}


def test_shared_tiers_are_shared_by_replicas(tmp_path: Path, expected: Expected) -> None:
    """A bucket below the local tiers: chunks that one replica has computed are found by the other at once."""
    config = over(tmp_path, "disk", objects=True)
    with replica_of(config, 0) as one, replica_of(config, 1) as other:
        assert loaded(one, OURS, expected) == loaded(other, THEIRS, expected) == {}
        assert one.flush()
        assert other.flush()
        assert loaded(one, THEIRS, expected) == loaded(other, OURS, expected) == {"objects": CHUNKS}


def test_the_first_replica_has_the_place_of_an_engine_without_replicas(tmp_path: Path, expected: Expected) -> None:
    """A second replica is added or removed: the first one keeps its cache."""
    config = over(tmp_path, "disk")
    with open_stack(config, ENGINE.engine_spec()) as alone:
        assert loaded(alone, OURS, expected) == {}
        required = {**config, "tiers": [{**table, "required": True} for table in config["tiers"]]}
        with pytest.raises(BackendUnavailableError, match="another `path`"), replica_of(required, 0):
            pass  # not reached: the storage is locked
    with replica_of(config, 0) as first, replica_of(config, 1):
        assert loaded(first, OURS, expected) == {"local": CHUNKS}


def test_a_tier_that_is_attached_later_is_the_replicas_own_too(tmp_path: Path, expected: Expected) -> None:
    """An operator attaches the same table to every replica."""
    table = over(tmp_path, "disk")["tiers"][0]
    config = stack_config(tmp_path, tiers=[])
    for prompts, found in ((OURS, {}), (OURS, {"local": CHUNKS})):
        with replica_of(config, 0) as one, replica_of(config, 1) as other:
            for stack in (one, other):
                stack.tiers.attach(table)
            assert loaded(other, prompts, expected) == found
            assert loaded(one, THEIRS, expected) == found


def test_engines_that_schedule_themselves_have_replicas_too(tmp_path: Path) -> None:
    """Replicas of staged stacks have separate storage, too."""
    config = over(tmp_path, "disk")
    config["tiers"][0]["required"] = True
    spec = ENGINE.engine_spec()
    with open_staged_stack(config, spec):
        with pytest.raises(BackendUnavailableError):
            open_staged_stack(config, spec)
        open_staged_stack(config, replace(spec, replica=1)).close()


def test_each_replica_writes_a_record_of_its_own(tmp_path: Path, expected: Expected) -> None:
    """Lines of two processes in one file would mix two records."""
    config = {**over(tmp_path, "disk"), "record": {"path": str(tmp_path / "run.jsonl")}}
    with replica_of(config, 0) as one, replica_of(config, 1) as other:
        loaded(one, OURS, expected)
        loaded(other, THEIRS, expected)
    files = sorted(path.name for path in tmp_path.glob("run*"))
    assert files == ["run.jsonl", "run.replica-1.jsonl"]
    for name in files:
        assert (tmp_path / name).read_text(encoding="utf-8").count('"is":"record"') == 1


def test_a_replica_is_no_property_of_the_bytes() -> None:
    """Number 0 changes neither fingerprint nor manifest: earlier storage is found. Other numbers have storage of their
    own.
    """
    first = Namespace("m", "r", "bfloat16", "page", ((16, (4096,), "full_attention", None),), 1, 16)
    assert "replica" not in first.describe()
    second = replace(first, replica=1)
    assert second.describe() == {**first.describe(), "replica": 1}
    assert len({item.fingerprint() for item in (first, replace(first, replica=0), second, replace(first, rank=1))}) == 3


def test_a_replica_has_a_number() -> None:
    """Numbers count from 0; anything else is an error of the engine author."""
    with pytest.raises(ConfigError, match="replica = -1"):
        open_stack(parse_config({"host": {"capacity": "1MiB"}}), replace(ENGINE.engine_spec(), replica=-1))
