"""Our classes against the abstract ones of the vLLM that is installed, and against what other served versions call."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.transformers_utils.repo_utils import resolve_revision
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingSpec, OffloadingWorker
from vllm.version import __version__ as vllm_version

from tierkv.integrations import vllm as adapter
from tierkv.integrations.vllm import signatures
from tierkv.integrations.vllm.identity.weights import revision_of
from tierkv.integrations.vllm.metrics import TierKVPromMetrics, TierKVStats
from tierkv.integrations.vllm.signatures import (
    functions,
    misfits,
    misfits_of_call,
    misfits_of_class,
    missing_names,
)
from tierkv.integrations.vllm.versions import SUPPORTED


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


@pytest.mark.parametrize("base", BASES)
def test_every_abstract_method_is_there(base: str) -> None:
    """VLLM makes the object when the engine starts: a method that is missing would be found by a user."""
    assert not getattr(ours(BASES[base]), "__abstractmethods__", ())


@pytest.mark.parametrize("base", BASES)
def test_every_call_of_vllm_fits(base: str) -> None:
    """By position and by name, with and without what may be left out: as the abstract class says it will be called.

    VLLM asks classes before it has objects, and reads properties without a call: each stays of its kind."""
    theirs, mine = dict(functions(BASES[base])), dict(functions(ours(BASES[base])))
    assert list(misfits_of_class(BASES[base], ours(BASES[base]))) == []
    assert any(theirs[name] is not mine[name] for name in theirs)


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

    assert misfits_of_call(called, fits) == misfits_of_call(called, open_) == []
    assert misfits_of_call(called, lacks) == ["has no parameter 'b'"]
    assert len(misfits_of_call(called, swaps)) == 2
    assert misfits_of_call(called, needs) == ["requires 'b', which callers may omit"]
    assert misfits_of_call(called, wants) == ["requires 'd', which is not given"]


def test_what_is_read_and_called_is_there() -> None:
    """The tables name attributes and functions of this vLLM, and nothing that does not exist."""
    assert missing_names() == []
    assert misfits() == []


def test_what_is_missing_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A renamed attribute, a removed class and a function with another argument would fail in the first step."""
    monkeypatch.setattr(signatures, "READ", {"vllm.v1.request:Request": ("request_id", "ident"), "vllm.v1:Gone": ()})
    monkeypatch.setattr(signatures, "CALLED", {"vllm.v1.kv_cache_interface:get_kv_cache_spec_kind": 3})
    lines = missing_names()
    assert lines[:2] == ["vllm.v1.request:Request has no attribute 'ident'", "vllm.v1:Gone is missing"]
    assert "get_kv_cache_spec_kind does not take 3 arguments" in lines[2]
    assert len(lines) == 3


def test_a_class_that_does_not_fit_is_listed() -> None:
    """A new method that must be there, one with another parameter, and one that became a property."""

    class Theirs(ABC):
        @abstractmethod
        def new(self) -> None: ...

        def changed(self, more: int) -> int:
            return more

        def now(self) -> int:
            return 1

    class Ours(Theirs):
        def changed(self) -> int:  # type: ignore[override]
            return 1

        @property
        def now(self) -> int:  # type: ignore[override]
            return 1

    assert list(misfits_of_class(Theirs, Ours)) == [
        "Theirs.new is new, and required",
        "Theirs.changed: ours has no parameter 'more'",
        "Theirs.now is a function, ours a property",
    ]


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


def test_the_offloading_connector_cannot_report_a_failed_load() -> None:
    """An error at a load ends the engine under the spec, as the guide says. When this fails, it can be contained."""
    reports = {"get_block_ids_with_load_errors", "get_transfer_results"}
    assert not reports & set(vars(OffloadingConnector))
    assert reports <= set(dir(KVConnectorBase_V1))
    assert "assert transfer_result.success" in inspect.getsource(OffloadingConnectorWorker.get_finished)


def test_vllm_keeps_the_commit_of_a_model_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text of a revision stays "main" when the branch moves: the commit beside it tells weights apart."""
    refs, commits = tmp_path / "models--org--tiny" / "refs", ["a" * 40, "b" * 40]
    refs.mkdir(parents=True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for commit in commits:
        (refs / "main").write_text(commit, encoding="utf-8")
        for revision in (None, "main", commit):
            resolved = resolve_revision("org/tiny", revision)
            assert revision_of(SimpleNamespace(model="org/tiny", revision=resolved)) == commit
