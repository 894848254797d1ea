"""Opening a stack: errors name their cause, and a failed opening closes everything."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from panics import Panic
from stack_bed import Faults

import tierkv
from tierkv.errors import BackendError, ConfigError, EngineProtocolError, NoThreadError, PluginError
from tierkv.hookspecs import hookimpl
from tierkv.plugins.loading import load_plugins
from tierkv.stack.stack import Stack
from tierkv.testing.faults import raise_error
from tierkv.types.cache_events import CacheEvent, CacheEventKind
from tierkv.types.engine import EngineCapabilities, EngineSpec, GroupKind, GroupSpec, ScheduledRequest, StepOutput

SPEC = EngineSpec("m", "float32", (GroupSpec(16, (4096,)),), 16)


class OneRequest:
    """Sixteen tokens, one block, one chunk."""

    request_id = "r"
    num_tokens = num_prompt_tokens = 16
    block_hashes: Sequence[bytes] = (b"h" * 16,)
    kv_transfer_params = None


class LongerRequest(OneRequest):
    """A request with the same first block, so that a hit may end with the chunk in a group of any kind."""

    num_tokens = num_prompt_tokens = 18


class OneBlock:
    """Block 1, not computed yet."""

    block_id = 1
    block_hash = None
    is_null = False


def store_one_chunk(stack: Stack) -> None:
    """Compute and store the one chunk."""
    stack.worker.register_kv_caches([[np.ones((4, 1024), np.float32)]])
    request = OneRequest()
    stack.on_new_request(request)
    assert stack.get_num_new_matched_tokens(request, 0) == (0, False)
    stack.update_state_after_alloc(request, [[OneBlock()]], 0)
    meta = stack.build_connector_meta(StepOutput((ScheduledRequest("r", 0, 16, ((1,),), replaces_table=True),)))
    stack.worker.start_step(meta)
    stack.worker.queue_stores(meta)
    stack.update_connector_output(stack.worker.get_finished())
    stack.request_finished(request, [[1]])


def disk(place: Path, **more: Any) -> dict[str, Any]:
    """A disk tier."""
    return {"backend": "disk", "path": str(place), "capacity": "8MiB", "min_free_bytes": 0, **more}


def test_a_failed_opening_leaves_no_lock_behind(tmp_path: Path) -> None:
    """The second tier cannot be opened: the first one is closed, and the next attempt finds it unlocked."""
    (tmp_path / "file").write_text("not a directory")
    broken = {"host": {"capacity": "1MiB"}, "tiers": [disk(tmp_path / "a"), disk(tmp_path / "file", name="b")]}
    with pytest.raises(BackendError, match="file"):
        tierkv.open_stack(broken, SPEC)
    tierkv.open_stack({"host": {"capacity": "1MiB"}, "tiers": [disk(tmp_path / "a")]}, SPEC).close()


def end_opening_threads() -> None:
    """Wait for tiers that are still being opened, and for those that are closed then."""
    patience_s = time.monotonic() + 20.0
    while any(thread.name.endswith(("-open", "-close")) for thread in threading.enumerate()):
        assert time.monotonic() < patience_s
        time.sleep(0.01)


def test_an_opening_without_threads_leaves_no_lock_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container at its limit of threads: the error says which thread, and the next attempt finds all unlocked.

    The first error was a bare "can't start new thread", and the tiers stayed locked until the program ended.
    """
    tiers = [disk(tmp_path / name, name=name, io_threads=2) for name in "ab"]
    config = {"host": {"capacity": "1MiB", "populate": False}, "tiers": tiers}
    start, refused = threading.Thread.start, list[str]()
    for allowed in range(20):
        left = iter(range(allowed))

        def start_some(thread: threading.Thread, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                end_opening_threads()
                raise RuntimeError("can't start new thread")
            start(thread)

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_some)
            try:
                stack = tierkv.open_stack(config, SPEC)
            except NoThreadError as error:
                refused.append(str(error))
                end_opening_threads()
                continue
        break
    assert stack.tiers.names == ("a", "b"), "one is locked"
    stack.close()
    pattern = r"thread 'tierkv-[ab]-\w+' cannot be started beside \d+ others .*ulimit -u.* io_threads"
    assert all(re.match(pattern, message) for message in refused), refused
    assert len({message.split("'")[1] for message in refused}) > 4, "each thread of the opening was refused once"


def test_an_interrupted_opening_leaves_no_lock_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a notebook, a key interrupted the opening while a thread started: the tier stayed locked until the end."""
    config = {"host": {"capacity": "1MiB"}, "tiers": [disk(tmp_path / name, name=name) for name in "ab"]}
    start = threading.Thread.start
    for interrupted in ("tierkv-a-open", "tierkv-b-open"):

        def start_and_be_interrupted(thread: threading.Thread, interrupted: str = interrupted) -> None:
            start(thread)
            if thread.name == interrupted:
                raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start_and_be_interrupted)
            with pytest.raises(KeyboardInterrupt):
                tierkv.open_stack(config, SPEC)
        end_opening_threads()
        stack = tierkv.open_stack(config, SPEC)
        assert stack.tiers.names == ("a", "b"), "one is locked"
        stack.close()


def test_a_chunk_size_that_does_not_fit_the_engine(tmp_path: Path) -> None:
    """chunk.tokens is checked against the engine's blocks; the error names the next valid size."""
    with pytest.raises(ConfigError, match="next valid size is 32"):
        tierkv.open_stack({"host": {"capacity": "1MiB"}, "chunk": {"tokens": 20}}, SPEC)


GROUPS = [
    GroupSpec(16, (4096,)),
    GroupSpec(16, (4096,), GroupKind.SLIDING_WINDOW, 32),
    GroupSpec(16, (4096,), GroupKind.SLIDING_WINDOW, 48),
    GroupSpec(16, (4096,), GroupKind.CHUNKED_LOCAL, 32),
    GroupSpec(16, (4096,), GroupKind.SSM),
]


@pytest.mark.parametrize("later", GROUPS[1:])
def test_what_a_group_attends_to_is_part_of_the_namespace(tmp_path: Path, later: GroupSpec) -> None:
    """A windowed group's chunk is stored with zeros in place of the blocks before the window. For a group that attends
    to more, they would be wrong bytes with a valid checksum: such an engine finds nothing.
    """
    config = {"host": {"capacity": "1MiB"}, "tiers": [disk(tmp_path / "a")]}
    namespaces = set()
    for group in GROUPS:
        with tierkv.open_stack(config, replace(SPEC, groups=(group,))) as stack:
            namespaces.add(stack.namespace.fingerprint())
    assert len(namespaces) == len(GROUPS)
    with tierkv.open_stack(config, replace(SPEC, groups=(later,))) as stack:
        store_one_chunk(stack)
    with tierkv.open_stack(config, SPEC) as stack:
        assert stack.get_num_new_matched_tokens(OneRequest(), 0) == (0, False)
    with tierkv.open_stack(config, replace(SPEC, groups=(later,))) as stack:
        assert stack.get_num_new_matched_tokens(LongerRequest(), 0)[0] != 0


@pytest.mark.parametrize("flag", ["loads_may_fail", "loads_span_steps"])
def test_an_engine_that_cannot_live_with_loads(flag: str) -> None:
    """Loads may fail and may take several steps: an engine that cannot handle this is refused at once."""
    engine = replace(SPEC, capabilities=EngineCapabilities(**{flag: False}))
    with pytest.raises(ConfigError, match=rf"EngineCapabilities\({flag}=False\).* leave the flag at True"):
        tierkv.open_stack({"host": {"capacity": "1MiB"}}, engine)


def test_a_host_tier_without_room_for_a_chunk() -> None:
    """Capacity below one slot: the error names both numbers."""
    with pytest.raises(ConfigError, match="4096 bytes holds no chunk"):
        tierkv.open_stack({"host": {"capacity": "4KiB"}}, SPEC)


def test_missing_opentelemetry_names_its_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message named an extra of ``tierkv``, which in an index is another project."""
    monkeypatch.setitem(sys.modules, "tierkv.recording.exporting", None)
    with pytest.raises(ConfigError, match="pip install opentelemetry-sdk opentelemetry-exporter-otlp"):
        tierkv.open_stack({"host": {"capacity": "1MiB"}, "record": {"spans": "program"}}, SPEC)


def test_a_missing_plugin_names_the_distribution() -> None:
    """For a backend of an unknown name the error names the distribution to install."""
    with pytest.raises((ConfigError, PluginError), match="pip install tierkv-ceph"):
        tierkv.open_stack({"host": {"capacity": "1MiB"}, "tiers": [{"backend": "ceph"}]}, SPEC)


def test_a_tier_whose_scan_fails_is_out_of_service(tmp_path: Path, faults: Faults) -> None:
    """The content of a tier that cannot be listed is unknown: the tier serves misses until its breaker closes."""
    registry = faults.registry()
    config = {"host": {"capacity": "1MiB"}, "tiers": [disk(tmp_path / "a", backend="faulty")]}
    with tierkv.open_stack(config, SPEC, plugins=registry) as stack:
        store_one_chunk(stack)
    scanning = faults.registry()
    original = scanning.require_backend("faulty").plugin.open

    def open_and_spoil(context: Any, options: Any) -> Any:
        backend = original(context, options)
        faults.last.add("scan", raise_error(lambda: OSError("unreadable")))
        return backend

    object.__setattr__(scanning.require_backend("faulty").plugin, "open", open_and_spoil)
    with tierkv.open_stack(config, SPEC, plugins=scanning) as stack:
        assert stack.get_num_new_matched_tokens(OneRequest(), 0) == (0, False)


@pytest.mark.parametrize("error", [RuntimeError, Panic])
def test_observers_receive_every_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    """tierkv_observe gets every event, in order, on a framework thread; an observer that raises affects no other."""
    received: list[CacheEvent] = []

    class Listener:
        TIERKV_SPI = 1

        @hookimpl
        def tierkv_observe(self, events: Iterable[CacheEvent]) -> None:
            received.extend(events)
            raise error("an observer's own fault")

    config = {"host": {"capacity": "1MiB"}, "tiers": [disk(tmp_path / "a")]}
    with tierkv.open_stack(config, SPEC, plugins=load_plugins([Listener()])) as stack:
        store_one_chunk(stack)
        assert stack.flush()
        taken = stack.events.take()
    assert [(event.kind, event.tier, len(event.keys)) for event in taken] == [
        (CacheEventKind.STORED, "host", 1),
        (CacheEventKind.STORED, "disk", 1),
    ]
    assert received == taken
    assert "an observer's own fault" in caplog.text or "observers of cache events failed" in caplog.text


def test_s95_closing_twice_is_harmless(tmp_path: Path) -> None:
    """A server's shutdown path may call close more than once."""
    stack = tierkv.open_stack({"host": {"capacity": "1MiB"}, "tiers": [disk(tmp_path / "a")]}, SPEC)
    store_one_chunk(stack)
    assert stack.close()
    assert stack.close()


def test_close_loses_nothing_that_was_stored(tmp_path: Path) -> None:
    """A store that was only queued when the engine stopped still reaches the disk (landscape G15)."""
    config = {"host": {"capacity": "1MiB"}, "tiers": [disk(tmp_path / "a")]}
    stack = tierkv.open_stack(config, SPEC)
    store_one_chunk(stack)  # no step follows: the store stays queued
    assert stack.close()
    with tierkv.open_stack(config, SPEC) as stack:
        assert stack.metrics.counters.tokens_loaded == {}
        request = OneRequest()
        tokens, _ = stack.get_num_new_matched_tokens(request, 0)
        assert tokens is None or tokens == 16


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": None}, "EngineSpec.model = None: give text"),
        ({"dtype": np.dtype("float32")}, r"EngineSpec.dtype = dtype\('float32'\): give text"),
        ({"revision": None}, "EngineSpec.revision = None: give text"),
        ({"hash_block_tokens": None}, "EngineSpec.hash_block_tokens = None: give a whole number"),
        ({"num_workers": 1.0}, "EngineSpec.num_workers = 1.0: give a whole number"),
        ({"replica": True}, "EngineSpec.replica = True: give a whole number"),
        ({"capabilities": None}, "EngineSpec.capabilities = None: give a tierkv.EngineCapabilities"),
        ({"groups": (None,)}, r"EngineSpec.groups\[0\] = None: give a tierkv.GroupSpec"),
        ({"groups": (GroupSpec("16", (4096,)),)}, "group 0: block_tokens = '16': give a whole number"),  # type: ignore[arg-type]
        ({"groups": (GroupSpec(16, None),)}, "group 0: page_bytes = None: give the bytes"),  # type: ignore[arg-type]
        ({"groups": (GroupSpec(16, (None,)),)}, "group 0: page_bytes = None: give whole numbers"),  # type: ignore[arg-type]
        ({"groups": (GroupSpec(16, (1,), window_tokens="2"),)}, "group 0: window_tokens = '2'"),  # type: ignore[arg-type]
    ],
)
def test_a_field_of_another_type_is_named(changed: dict[str, Any], message: str) -> None:
    """A model without a name opened, and wrote chunks in a namespace that no command could read again."""
    with pytest.raises(ConfigError, match=message):
        tierkv.open_stack({"host": {"capacity": "1MiB"}}, replace(SPEC, **changed))


def test_arguments_of_another_type_are_named() -> None:
    """`None` is what a program has that read no configuration; an AttributeError names neither call nor argument."""
    host: dict[str, Any] = {"host": {"capacity": "1MiB"}}
    nothing: Any = None
    with pytest.raises(ConfigError, match=r"engine = None: give a tierkv.EngineSpec"):
        tierkv.open_stack(host, nothing)
    for config in (None, 3, [], b"stack.toml"):
        with pytest.raises(ConfigError, match=r"config = .*: give the path of a stack's file, or a mapping"):
            tierkv.open_stack(config, SPEC)  # type: ignore[arg-type]
    with pytest.raises(EngineProtocolError, match=r"open_worker: setup = None: give what Stack.worker_setup"):
        tierkv.open_worker(nothing)
    with pytest.raises(ConfigError, match="serve_metrics: stack = None: give an open stack"):
        tierkv.serve_metrics(nothing)
    stack = tierkv.open_stack(host, SPEC)
    for port in (nothing, -1, 65_536, True):
        with pytest.raises(ConfigError, match=f"serve_metrics: port = {port}: give a whole number up to 65535"):
            tierkv.serve_metrics(stack, port)
    with pytest.raises(ConfigError, match=r"stack.tiers.attach: table = None: give a mapping"):
        stack.tiers.attach(nothing)
    assert stack.close()


@pytest.mark.parametrize("timeout_s", [3600, 1e300, 10**400])
def test_a_patient_close_ends_when_all_is_written(tmp_path: Path, timeout_s: float) -> None:
    """Waits of the system overflow beyond some weeks; a user without haste must not learn of that."""
    config = {"host": {"capacity": "1MiB"}, "tiers": [{"backend": "disk", "path": str(tmp_path), "capacity": "8MiB"}]}
    stack = tierkv.open_stack(config, SPEC)
    store_one_chunk(stack)
    assert stack.flush(timeout_s)
    assert stack.close(timeout_s)


@pytest.mark.parametrize("timeout_s", [None, "5", float("nan"), float("inf"), True])
def test_a_close_with_a_wrong_time_closes_nothing(tmp_path: Path, timeout_s: Any) -> None:
    """It once left the stack half closed: the next call returned False, and released neither threads nor the lock."""
    config = {"host": {"capacity": "1MiB"}, "tiers": [{"backend": "disk", "path": str(tmp_path), "capacity": "8MiB"}]}
    stack = tierkv.open_stack(config, SPEC)
    store_one_chunk(stack)
    for call in (stack.flush, stack.close):
        with pytest.raises(
            EngineProtocolError, match=f"{call.__name__}: timeout_s = .*: give a finite number of seconds"
        ):
            call(timeout_s)
    assert stack.close()
    again = tierkv.open_stack(config, SPEC)
    assert again.tiers.content()["disk"].chunks == 1
    assert again.close()
