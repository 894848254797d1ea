"""Requests of one call where threads are scarce, or end with the tier."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fsspec_support import S3Server, get, key, open_at, put

from tierkv_fsspec.stores.request_batch import RequestBatch

PATIENCE_S = 30.0


def refuse_threads(patch: pytest.MonkeyPatch, allowed: int) -> None:
    """Let the system start this number of further threads of pools."""
    start, left = threading.Thread.start, [allowed]

    def start_if_allowed(thread: threading.Thread) -> None:
        if "batch" in thread.name or "tierkv-remote" in thread.name:
            left[0] -= 1
            if left[0] < 0:
                raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", start_if_allowed)


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_a_call_without_threads_leaves_no_request_behind(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    """At the limit of threads (`ulimit -u`) a pool kept the request that it refused, and ran it after the end of the
    call: an object was received into the slot of another chunk."""
    refuse_threads(monkeypatch, allowed)
    sent: list[int] = []
    hold = threading.Event()

    def send(number: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            assert hold.wait(PATIENCE_S)
        sent.append(number)
        if len(sent) == 6 - allowed:  # the caller has sent all that no thread holds
            hold.set()
        return 10 * number

    with ThreadPoolExecutor(4, thread_name_prefix="batch") as pool:
        assert RequestBatch(send, range(6)).send(pool, lambda: False) == [0, 10, 20, 30, 40, 50]
        assert sorted(sent) == list(range(6))
    assert sorted(sent) == list(range(6)), "a request was sent after the end of its call"


def test_a_pool_that_is_shut_down_begins_no_further_request() -> None:
    """A close waits for no request but those under way; their buffers are in use."""
    began, hold, ended = threading.Event(), threading.Event(), []

    def send(number: int) -> int:
        began.set()
        assert hold.wait(PATIENCE_S)
        ended.append(number)
        return number

    pool = ThreadPoolExecutor(1, thread_name_prefix="batch")
    results: list[object] = []
    caller = threading.Thread(target=lambda: results.append(RequestBatch(send, range(3)).send(pool, lambda: True)))
    caller.start()
    assert began.wait(PATIENCE_S)
    pool.shutdown(wait=False, cancel_futures=True)
    time.sleep(0.01)
    assert not results
    hold.set()
    caller.join(PATIENCE_S)
    assert results == [None]
    assert ended == [0]


def test_a_tier_reads_at_the_limit_of_threads(s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call said that the tier was closed, which is a reason to look for another fault. It only takes longer."""
    frames = {key(number): bytes([number]) * 5000 for number in range(8)}
    writer = open_at(url, endpoint_url=s3.endpoint, warm_up_keys_max=0)
    assert put(writer, frames) == [None] * 8
    writer.close()
    reader = open_at(url, endpoint_url=s3.endpoint, warm_up_keys_max=0)
    refuse_threads(monkeypatch, 1)
    assert get(reader, *frames) == list(frames.values())
    reader.close()
