"""Our classes against the abstract ones of the vLLM that is installed, and against what other served versions call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec, OffloadingWorker
from vllm.version import __version__ as vllm_version

from tierkv.integrations import vllm as adapter
from tierkv.integrations.vllm.metrics import TierKVPromMetrics, TierKVStats
from tierkv.integrations.vllm.versions import SUPPORTED

Kind = inspect._ParameterKind
NAMED = (Kind.POSITIONAL_OR_KEYWORD, Kind.KEYWORD_ONLY)


def ours(base: type) -> type:
    """Class of the adapter for one of vLLM's classes; loads both adapters."""
    _ = adapter.TierKVConnector, adapter.TierKVSpec
    (found,) = [kind for kind in base.__subclasses__() if kind.__module__.startswith("tierkv.")]
    return found


BASES: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        *(KVConnectorBase_V1, KVConnectorStats, KVConnectorPromMetrics),
        *(OffloadingSpec, OffloadingManager, OffloadingWorker),
    )
}


def functions(kind: type) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Public methods that a class defines, or inherits from a class other than ``object``; unbound."""
    for name in dir(kind):
        item = inspect.getattr_static(kind, name)
        function = item.__func__ if isinstance(item, classmethod | staticmethod) else item
        if inspect.isfunction(function) and (not name.startswith("_") or name == "__init__"):
            yield name, function


def misfits(called: Callable[..., Any], defined: Callable[..., Any]) -> list[str]:
    """In what a call made for one signature would not fit another."""
    theirs, mine = inspect.signature(called).parameters, inspect.signature(defined).parameters
    takes_all = {parameter.kind for parameter in mine.values()}
    wrong = []
    for position, (name, parameter) in enumerate(theirs.items()):
        if parameter.kind in NAMED and name not in mine and Kind.VAR_KEYWORD not in takes_all:
            wrong.append(f"has no parameter {name!r}")
        elif parameter.kind is Kind.POSITIONAL_OR_KEYWORD and name in mine and list(mine).index(name) != position:
            wrong.append(f"parameter {name!r} stands elsewhere")
        elif parameter.kind in (Kind.VAR_KEYWORD, Kind.VAR_POSITIONAL) and parameter.kind not in takes_all:
            wrong.append(f"takes no {parameter}")
        elif name in mine and parameter.default is not parameter.empty and mine[name].default is parameter.empty:
            wrong.append(f"wants {name!r}, which callers may leave out")
    wrong += [
        f"wants {name!r}, which is not given"
        for name, parameter in mine.items()
        if parameter.default is parameter.empty and parameter.kind in NAMED and name not in theirs
    ]
    return wrong


@pytest.mark.parametrize("base", BASES)
def test_every_abstract_method_is_there(base: str) -> None:
    """VLLM makes the object when the engine starts: a method that is missing would be found by a user."""
    assert not getattr(ours(BASES[base]), "__abstractmethods__", ())


@pytest.mark.parametrize("base", BASES)
def test_every_call_of_vllm_fits(base: str) -> None:
    """By position and by name, with and without what may be left out: as the abstract class says it will be called."""
    theirs, mine = dict(functions(BASES[base])), dict(functions(ours(BASES[base])))
    wrong = {name: misfits(theirs[name], mine[name]) for name in theirs if name != "__init__"}
    assert not {name: problems for name, problems in wrong.items() if problems}
    assert any(theirs[name] is not mine[name] for name in theirs)


@pytest.mark.parametrize("base", BASES)
def test_what_is_a_property_or_a_class_method_stays_one(base: str) -> None:
    """VLLM asks classes before it has objects, and reads properties without a call."""
    for name in dir(BASES[base]):
        if not name.startswith("_"):
            theirs, mine = (inspect.getattr_static(kind, name) for kind in (BASES[base], ours(BASES[base])))
            for kind in (property, classmethod, staticmethod):
                assert isinstance(theirs, kind) == isinstance(mine, kind), name


def test_the_connector_says_that_it_serves_several_groups() -> None:
    """Without it vLLM switches its hybrid KV cache manager off, and a model with windows loses its groups."""
    assert issubclass(ours(KVConnectorBase_V1), SupportsHMA)


def test_the_check_knows_what_does_not_fit() -> None:
    """Each kind of misfit is found. Otherwise the tests above would always pass."""

    def called(self: object, a: int, b: int = 0, *, c: int = 0) -> None: ...

    def fits(self: object, a: int, b: int = 1, *, c: int = 2, more: int = 0) -> None: ...
    def lacks(self: object, a: int, *, c: int = 0) -> None: ...
    def swaps(self: object, b: int = 0, a: int = 0, *, c: int = 0) -> None: ...
    def needs(self: object, a: int, b: int, *, c: int = 0) -> None: ...
    def wants(self: object, a: int, b: int = 0, *, c: int = 0, d: int) -> None: ...
    def open_(self: object, a: int, **rest: int) -> None: ...

    assert misfits(called, fits) == misfits(called, open_) == []
    assert misfits(called, lacks) == ["has no parameter 'b'"]
    assert len(misfits(called, swaps)) == 2
    assert misfits(called, needs) == ["wants 'b', which callers may leave out"]
    assert misfits(called, wants) == ["wants 'd', which is not given"]


# -- what vLLM 0.33 adds, whatever is installed ------------------------------------------------------------------------


def test_the_installed_version_is_one_that_is_served() -> None:
    """These tests speak about it."""
    assert vllm_version.startswith(SUPPORTED)


def test_a_load_may_be_expedited() -> None:
    """0.33 says by name which loads a step waits for (its ``sync_load_budget_bytes``)."""
    inspect.signature(ours(OffloadingWorker).submit_load).bind(object(), 1, object(), object(), expedited=True)


def test_the_manager_hears_of_a_flushed_reset_and_needs_no_lock() -> None:
    """0.33 tells when a reset is over; and it enters ``lock`` around each call, of which its base class has one."""
    manager = ours(OffloadingManager)
    inspect.signature(manager.on_reset_flushed).bind(object())
    lock = inspect.getattr_static(manager, "lock", None)
    if lock is not None:
        with lock.fget(object.__new__(manager)):
            pass


def test_facts_of_the_configuration_are_declared_as_they_are_given() -> None:
    """0.33 makes the labels of ``vllm:kv_offload_config_info`` from the spec and fills them from the manager."""
    inspect.signature(ours(OffloadingManager).config_info).bind(object())
    inspect.signature(ours(OffloadingSpec).config_info_keys).bind({})


def test_sleep_mode_may_take_the_memory_away() -> None:
    """0.33 calls these before and after the KV memory is unmapped."""
    connector = ours(KVConnectorBase_V1)
    inspect.signature(connector.unregister_kv_caches).bind(object())


def test_our_statistics_are_what_vllm_keeps_apart_by_type() -> None:
    """Its aggregation asserts that both sides are of one type."""
    assert ours(KVConnectorStats) is TierKVStats
    assert ours(KVConnectorPromMetrics) is TierKVPromMetrics
