"""Side by side with LMCache: its compiled file client and tierkv's disk tier, on the same frames. Needs LMCache.

Both move the same slots of one arena, with as many threads, and LMCache gets all keys in one call, which is its best
case. Measured is the client that its ``fs_native`` adapter drives. The adapter itself, which adds Python for each key,
is left out: it imports packages for GPUs.

The two do not promise the same. LMCache writes a file per chunk and renames it; the kernel decides when the device has
it, and a read checks no byte. tierkv's disk forces what it acknowledges to the device, and checks two checksums of
every frame.
"""

from __future__ import annotations

import importlib.util
import select
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.measure import Cost, Settings, progress, take_turns, timed
from benchmarks.page_cache import drop_page_cache
from benchmarks.rows import Row
from benchmarks.tiers.bandwidth import Limit, bandwidth_row, frame_sizes
from benchmarks.tiers.rig import Frames, OpenTier, disk_options, opened

CLIENT = "lmcache_fs"
WAIT_S = 120.0


def run(settings: Settings) -> Iterator[Row]:
    """Measure put and cold get of five sizes of frames; nothing where LMCache is not installed."""
    module = _compiled_client()
    if module is None:
        progress("lmcache: LMCache is not installed here; `nox -s lmcache` has it")
        return
    for size, frames in frame_sizes(settings):
        with tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder:
            yield from _rows(Path(folder), module, frames, size, settings.rounds)


def _rows(folder: Path, module: ModuleType, frames: Frames, size: str, rounds: int) -> Iterator[Row]:
    with (
        opened(disk_options(folder / "tier", frames), frames) as tier,
        _client(module, folder / "direct", frames, tier.threads, direct=True) as direct,
        _client(module, folder / "cached", frames, tier.threads, direct=False) as cached,
    ):
        puts = take_turns([lambda: _put(tier, frames), direct.put, cached.put], rounds)
        gets = take_turns([lambda: timed(lambda: tier.get(frames)), direct.get, cached.get], rounds)
        for get in (lambda: tier.get(frames), direct.get, cached.get):
            frames.wipe()
            get()
            frames.verify()
    total, extra = frames.total_bytes, {"threads": float(tier.threads)}
    for verb, (ours, *theirs) in (("put", puts), ("cold get", gets)):
        for name, costs in zip(("O_DIRECT", "page cache, its default"), theirs, strict=True):
            yield bandwidth_row(f"{verb}, {size}", total, ours, Limit(f"LMCache, {name}", costs, 1.0), extra)


def _put(tier: OpenTier, frames: Frames) -> Cost:
    tier.delete(frames)
    return timed(lambda: tier.put(frames))


class _Client:
    """LMCache's client on a folder of its own.

    Args:
        client: its compiled client.
        folder: where it keeps its files.
        frames: to move.
    """

    def __init__(self, client: Any, folder: Path, frames: Frames) -> None:  # noqa: ANN401 - its module has no types
        self._client = client
        self._folder = folder
        # Model, rank, group and hash, as its adapter joins them.
        self._keys = [f"model@00000000@0@{key.hex()}" for key in frames.keys]
        self._buffers = [frames.arena.slot(ref.slot) for ref in frames.slots]

    def put(self) -> Cost:
        """Write all frames to new files."""
        for path in [path for path in self._folder.rglob("*") if path.is_file()]:
            path.unlink()
        return timed(lambda: self._run(self._client.submit_batch_set))

    def get(self) -> Cost:
        """Read all frames into their slots, from files that the page cache does not hold."""
        drop_page_cache(self._folder)
        return timed(lambda: self._run(self._client.submit_batch_get))

    def release(self) -> None:
        """End its threads, and let go of the slots."""
        self._client.close()
        for buffer in self._buffers:
            buffer.release()

    def _run(self, submit: Callable[[Sequence[str], list[memoryview]], int]) -> None:
        number = submit(self._keys, self._buffers)
        deadline_s = time.monotonic() + WAIT_S
        while time.monotonic() < deadline_s:
            select.select([self._client.event_fd()], [], [], 1.0)
            for ended, good, error, found in self._client.drain_completions():
                if ended == number and good and (not found or all(found)):
                    return
                raise RuntimeError(f"LMCache did not move every frame: {error or 'some are missing'}")
        raise RuntimeError(f"LMCache did not answer within {WAIT_S:.0f} s")


@contextmanager
def _client(module: ModuleType, folder: Path, frames: Frames, threads: int, *, direct: bool) -> Iterator[_Client]:
    folder.mkdir()
    made = _Client(module.LMCacheFSClient(str(folder), threads, "", direct, 0), folder, frames)
    try:
        yield made
    finally:
        made.release()


def _compiled_client() -> ModuleType | None:
    """LMCache's extension module, without the package around it; None where that is not installed."""
    package = importlib.util.find_spec("lmcache")
    for folder in (package.submodule_search_locations or ()) if package else ():
        for path in sorted(Path(folder).glob(f"{CLIENT}.*.so")):
            import torch  # noqa: F401, PLC0415 - it loads the libraries that the extension is linked with

            spec = importlib.util.spec_from_file_location(CLIENT, path)
            if spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                return module
    return None
