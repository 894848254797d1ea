"""A proxy that ends answers early, sends a page in their place, or damages them: no object is deleted for that."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fsspec_support import S3Server, get, key, names, open_at, put

import tierkv_fsspec
from tierkv.abc import DamagedEntry
from tierkv.errors import BackendUnavailableError
from tierkv.testing.engines.hand_engine import Prompt
from tierkv.testing.engines.small_stack import COOLDOWN_S, TESTED, SmallStack
from tierkv.testing.frames import make_frame
from tierkv_fsspec import FsspecOptions
from tierkv_fsspec.failures import Failure
from tierkv_fsspec.stores import obstore_store


@contextlib.contextmanager
def cutting(s3: S3Server, length: int) -> Iterator[None]:
    """Within the block, answers to GET have at most that number of bytes."""
    with changing(s3, lambda content: content[:length]):
        yield


@contextlib.contextmanager
def changing(s3: S3Server, change: Callable[[bytes], bytes]) -> Iterator[None]:
    """Within the block, answers to GET of an object have another content, and declare its length."""
    answer = s3._answer

    def changed(path: str, environ: dict[str, Any], start_response: Any) -> Any:
        told: list[Any] = []
        content = b"".join(answer(path, environ, lambda status, headers, *_: told.extend((status, headers))))
        if environ["REQUEST_METHOD"] == "GET" and "?" not in path and "list-type" not in environ["QUERY_STRING"]:
            content = change(content)
            told[1] = [(name, value) for name, value in told[1] if name.lower() != "content-length"]
            told[1].append(("Content-Length", str(len(content))))
        start_response(*told)
        return [content]

    s3._answer = changed  # type: ignore[method-assign]
    try:
        yield
    finally:
        del s3._answer  # type: ignore[attr-defined]


@pytest.fixture(params=["obstore", "fsspec", "plain"])
def options(s3: S3Server, url: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FsspecOptions:
    """Of each way to read an object: through obstore, through s3fs, and over plain HTTP."""
    monkeypatch.setattr(obstore_store, "OBJECT_BYTES_MIN", 1 if request.param == "plain" else 1 << 40)
    implementation = "fsspec" if request.param == "fsspec" else "obstore"
    return FsspecOptions(url=url, endpoint_url=s3.endpoint, implementation=implementation)


def check_that_it_is_spared(
    stack: SmallStack, prompt: Prompt, s3: S3Server, url: str, change: Callable[[bytes], bytes]
) -> None:
    """Load a stored prompt while answers are changed: it is a miss, no object is deleted, and later it is a hit."""
    stored = names(s3, url)
    with changing(s3, change):
        assert stack.load_cold(prompt) == 0
        stack.settle()
    assert names(s3, url) == stored
    assert stack.stack.tiers.stats()[TESTED]["corrupt"] == 0
    stack.pass_time(60.0)
    assert stack.load_cold(prompt) == 4


@pytest.mark.parametrize("length", [0, 1000, 4096, 10_000])
def test_no_object_is_deleted_for_an_answer_that_was_cut(
    s3: S3Server, url: str, tmp_path: Path, options: FsspecOptions, length: int
) -> None:
    """Engines share the bucket: one bad proxy before one of them must not empty it for all."""
    prompt = Prompt(1)
    with SmallStack(tierkv_fsspec.PLUGIN, lambda _: options, tmp_path, capacity_bytes=None) as stack:
        stack.store_all(prompt)
        check_that_it_is_spared(stack, prompt, s3, url, lambda content: content[:length])


def test_no_object_is_deleted_for_the_answer_to_another_request(
    s3: S3Server, url: str, tmp_path: Path, options: FsspecOptions
) -> None:
    """A proxy that mixed up its answers made whole objects look damaged: 80 of a bucket were deleted in 8 s."""
    prompt = Prompt(1)
    with SmallStack(tierkv_fsspec.PLUGIN, lambda _: options, tmp_path, capacity_bytes=None) as stack:
        stack.store_all(prompt)
        mixed_up: list[bytes] = []
        with changing(s3, lambda content: mixed_up.append(content) or content):  # type: ignore[func-returns-value]
            assert stack.load_cold(Prompt(2)) == 0
            stack.store_all(Prompt(2))
            assert stack.load_cold(Prompt(2)) == 4
        check_that_it_is_spared(stack, prompt, s3, url, lambda _: mixed_up[-1])


def test_no_object_is_deleted_for_a_page_of_a_proxy(
    s3: S3Server, url: str, tmp_path: Path, options: FsspecOptions
) -> None:
    """A login page or a notice of maintenance comes with status 200, and is longer than the header of a frame."""
    prompt = Prompt(1)
    with SmallStack(tierkv_fsspec.PLUGIN, lambda _: options, tmp_path, capacity_bytes=None) as stack:
        stack.store_all(prompt)
        check_that_it_is_spared(stack, prompt, s3, url, lambda _: b"<html>Please log in.</html>".ljust(9000))


@pytest.mark.parametrize("implementation", ["obstore", "fsspec"])
def test_an_answer_that_the_network_damaged_costs_no_hit(
    s3: S3Server, url: str, tmp_path: Path, implementation: str
) -> None:
    """A bad cable or memory of a switch: the next answer is whole, and so is the object."""
    options = FsspecOptions(url=url, endpoint_url=s3.endpoint, implementation=implementation)
    prompt = Prompt(1)
    left = [2]

    def flip_twice(content: bytes) -> bytes:
        left[0] -= 1
        return content if left[0] < 0 else content[:-1] + bytes([content[-1] ^ 1])

    tier = {"retries": 2}
    with SmallStack(tierkv_fsspec.PLUGIN, lambda _: options, tmp_path, capacity_bytes=None, tier=tier) as stack:
        stack.store_all(prompt)
        stored = names(s3, url)
        with changing(s3, flip_twice):
            assert stack.load_cold(prompt) == 4
            stack.settle()
        assert left[0] < 0, "no answer was damaged"
        assert names(s3, url) == stored


def test_a_connection_that_ends_within_an_answer_is_tried_again() -> None:
    """The library reports it by an exception of its HTTP client, whose type says nothing to the framework."""
    error = Failure.of(aiohttp.ClientPayloadError("Response payload is not completed")).to_error("cannot", tier="t")
    assert error.retryable


def test_answers_that_are_always_cut_keep_the_tier_out_of_service(s3: S3Server, url: str, tmp_path: Path) -> None:
    """A trial that takes a part of a frame for an answer would cost requests a wasted wait at every cooldown."""
    options = FsspecOptions(url=url, endpoint_url=s3.endpoint)
    prompts = [Prompt(number) for number in range(3)]
    tier = {"breaker_failures": 2}
    with SmallStack(tierkv_fsspec.PLUGIN, lambda _: options, tmp_path, capacity_bytes=None, tier=tier) as stack:
        stack.store_all(*prompts)
        with cutting(s3, 10_000):
            assert [stack.load_cold(prompt) for prompt in prompts] == [0, 0, 0]
            assert not stack.stack.introspection.tiers()[TESTED].usable
            for _ in range(3):
                end_trial(stack)
                assert not stack.stack.introspection.tiers()[TESTED].usable
        end_trial(stack)
        assert [stack.load_cold(prompt) for prompt in prompts] == [4, 4, 4]


def end_trial(stack: SmallStack) -> None:
    """Let the next trial of the tier begin and end."""
    stack.pass_time(COOLDOWN_S)
    stack.step_until(lambda: not stack.stack.introspection.stack().pending_trials, "the end of the trial")


@pytest.mark.parametrize("implementation", ["obstore", "fsspec"])
def test_a_listing_takes_a_head_that_was_cut_for_no_damage(s3: S3Server, url: str, implementation: str) -> None:
    """`tierkv verify --repair` would remove the object."""
    backend = open_at(url, endpoint_url=s3.endpoint, implementation=implementation)
    put(backend, {key(1): make_frame(key(1), 1, 8192)})
    with cutting(s3, 1000), pytest.raises(BackendUnavailableError, match="1000 of its first 4096 bytes arrived"):
        list(backend.list_frames(keys=True))
    assert len(list(backend.list_frames(keys=True))) == 1
    assert get(backend, key(1)) == [make_frame(key(1), 1, 8192)]
    backend.close()


@pytest.mark.parametrize("implementation", ["obstore", "fsspec"])
def test_an_empty_object_is_listed_as_damaged_and_replaced(s3: S3Server, url: str, implementation: str) -> None:
    """Servers refuse a range of nothing: that ended the listing, and each write of the chunk."""
    backend = open_at(url, endpoint_url=s3.endpoint, implementation=implementation)
    frame = make_frame(key(1), 1, 8192)
    put(backend, {key(1): frame})
    (listed,) = [found for page in backend._store.list_objects() for found in page if found.size >= 8192]
    backend._store.write(listed.name, memoryview(b""))
    assert [type(found) for found in backend.list_frames(keys=True)] == [DamagedEntry]
    put(backend, {key(1): frame})
    assert get(backend, key(1)) == [frame]
    backend.close()
