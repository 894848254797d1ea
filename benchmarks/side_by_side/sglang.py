"""Side by side in SGLang: its own ``HiCacheFile`` and tierkv's backend under SGLang's cache controller. Needs SGLang.

Real host pools and controllers on the CPU, both backends in turns. A round backs a whole pool up to a new folder,
attaches a new controller, and prefetches everything into another pool, once with the files out of the page cache and
once with whatever the cache has. Times are from the call to the controller's acknowledgement.

The two do not promise the same. ``HiCacheFile`` acknowledges bytes that are in the page cache only, and compares
lengths when it reads. tierkv's disk acknowledges bytes that a kill of the process does not lose, reads past the page
cache, and compares two checksums.
"""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from benchmarks.measure import Cost, Settings, progress, take_turns, timed
from benchmarks.page_cache import drop_page_cache
from benchmarks.rows import Row

if TYPE_CHECKING:
    from sglang.srt.managers.cache_controller import HiCacheController
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

MIB = 1024**2
ROUNDS = 5
PAGE_TOKENS, HEADS, HEAD_WIDTH = 64, 4, 128
WAIT_S = 120.0
STEPS = ("backup", "prefetch, files not in the page cache", "prefetch again")


def run(settings: Settings) -> Iterator[Row]:
    """Measure backup and prefetch with small and large pages; nothing where SGLang is not installed."""
    if importlib.util.find_spec("sglang") is None:
        progress("sglang: SGLang is not installed here; `nox -s sglang -- sglang` has it")
        return
    _import_torchvision()
    for layers, pages in settings.pick([(2, 512), (16, 128)], [(1, 6)]):
        with tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder:
            bench = _Bench(Path(folder), layers, pages)
            costs = take_turns([bench.ours, bench.theirs], settings.pick(ROUNDS, 1))
        yield from bench.rows(costs, settings.pick(ROUNDS, 1))


class _Bench:
    """Pools of one size, and a round with each backend.

    Args:
        folder: for the files of a round.
        layers: layers of the model, which make the size of a page.
        pages: pages of the pool.
    """

    def __init__(self, folder: Path, layers: int, pages: int) -> None:
        import torch  # noqa: PLC0415 - only where SGLang is

        self._folder, self._layers, self._pages = folder, layers, pages
        self._tokens = list(range(pages * PAGE_TOKENS))
        self._source, self._target = _pool(layers, pages), _pool(layers, pages)
        values = self._source[1].kv_buffer.view(torch.uint8)
        values.copy_(torch.randint(0, 256, values.shape, dtype=torch.uint8))
        self.page_bytes = values[:, : PAGE_TOKENS * pages].numel() // pages
        self._steps: dict[str, list[list[float]]] = {"ours": [], "theirs": []}

    def ours(self) -> Cost:
        """One round with tierkv's backend over a disk."""
        space = 2 * self._pages * (self.page_bytes + 8192)
        host = min(256, self._pages) * (self.page_bytes + 4096) + MIB
        disk = {"backend": "disk", "path": str(self._folder / "ours"), "capacity": space, "min_free_bytes": 0}
        extra = {
            "backend_name": "tierkv", "module_path": "tierkv.integrations.sglang", "class_name": "TierKVHiCache",
            "interface_v1": 1, "revision": "1", "stack": {"host": {"capacity": host}, "tiers": [disk]},
        }  # fmt: skip
        return timed(lambda: self._round("ours", "dynamic", extra))

    def theirs(self) -> Cost:
        """One round with SGLang's own backend."""
        (self._folder / "theirs").mkdir()
        return timed(lambda: self._round("theirs", "file", {"file_storage_path": str(self._folder / "theirs")}))

    def _round(self, side: str, backend: str, extra: dict[str, Any]) -> None:
        with _controller(self._source, backend, extra) as first:
            seconds = [_seconds(lambda: _back_up(first, self._tokens))]
        drop_page_cache(self._folder / side)
        with _controller(self._target, backend, extra) as second:
            for _ in range(2):
                self._target[1].kv_buffer.zero_()
                seconds.append(_seconds(lambda: _prefetch(second, self._tokens)))
                self._verify()
        shutil.rmtree(self._folder / side)
        self._steps[side].append(seconds)

    def _verify(self) -> None:
        import torch  # noqa: PLC0415 - only where SGLang is

        count = self._pages * PAGE_TOKENS
        source, target = (pools[1].kv_buffer[:, :count].view(torch.uint8) for pools in (self._source, self._target))
        if not torch.equal(source, target):
            raise AssertionError("a prefetch loaded other bytes than were backed up")

    def rows(self, costs: list[list[Cost]], rounds: int) -> Iterator[Row]:
        """One row per step of a round: MiB per second of each side, and the ratio round by round."""
        total = self._pages * self.page_bytes / MIB
        ours, theirs = self._steps["ours"][-rounds:], self._steps["theirs"][-rounds:]
        cpu = [sorted(cost.cpu_s for cost in side)[len(side) // 2] for side in costs]
        for number, step in enumerate(STEPS):
            pairs = [(total / mine[number], total / other[number]) for mine, other in zip(ours, theirs, strict=True)]
            yield Row(
                f"{step}, pages of {self.page_bytes / MIB:g} MiB",
                "MiB/s",
                sorted(mine for mine, _ in pairs)[rounds // 2],
                "HiCacheFile",
                sorted(other for _, other in pairs)[rounds // 2],
                [mine / other for mine, other in pairs],
                extra={"MiB": total, "processor s a round": cpu[0], "processor s a round, HiCacheFile": cpu[1]},
            )


def _import_torchvision() -> None:
    """Import torchvision as tests/integrations/sglang/conftest.py does: also where its library cannot be loaded."""
    import torch  # noqa: PLC0415 - only where SGLang is

    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for name in ("torchvision::nms", "torchvision::qnms"):
            torch.library.define(name, "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")


def _seconds(work: Callable[[], object]) -> float:
    return timed(work).wall_s


def _pool(layers: int, pages: int) -> tuple[Any, Any]:
    """A device pool on the CPU, and the real host pool of it, which has room for as many tokens."""
    import torch  # noqa: PLC0415 - only where SGLang is
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: PLC0415
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: PLC0415

    tokens = pages * PAGE_TOKENS
    device = MHATokenToKVPool(
        tokens, PAGE_TOKENS, torch.bfloat16, HEADS, HEAD_WIDTH, layers, "cpu", enable_memory_saver=False
    )
    host = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info, 1.0, 0, PAGE_TOKENS, "page_first", pin_memory=False,
        device_capacity_tokens=tokens, start_layer=0, end_layer=layers - 1,
    )  # fmt: skip
    return device, host


@contextmanager
def _controller(pools: tuple[Any, Any], backend: str, extra: dict[str, Any]) -> Iterator[Any]:
    """The real controller with a backend; only its storage configuration is given, since there is no server."""
    from sglang.srt.managers.cache_controller import HiCacheController  # noqa: PLC0415 - only where SGLang is
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig  # noqa: PLC0415
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

    device, host = pools
    config = HiCacheStorageConfig(
        tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, is_mla_model=False,
        enable_storage_metrics=False, is_page_first_layout=True, model_name="m", extra_config=extra,
    )  # fmt: skip

    class Controller(HiCacheController):  # type: ignore[misc]  # SGLang is not installed where types are checked
        def _generate_storage_config(self, *_unused: object, **_unused_too: object) -> HiCacheStorageConfig:
            return config

    allocator = SimpleNamespace(get_kvcache=lambda: device)
    with get_parallel().override(attn_dcp_size=1):
        made = Controller(allocator, host, PAGE_TOKENS, None, None, storage_backend=backend, prefetch_threshold=1)
        try:
            yield made
        finally:
            made.detach_storage_backend()


def _back_up(controller: HiCacheController, tokens: list[int]) -> None:
    hashes, parent = [], None
    for start in range(0, len(tokens), PAGE_TOKENS):
        parent = controller.get_hash_str(tokens[start : start + PAGE_TOKENS], parent)
        hashes.append(parent)
    import torch  # noqa: PLC0415 - only where SGLang is

    controller.write_storage(torch.arange(len(tokens)), tokens, hashes)
    done = controller.ack_backup_queue.get(timeout=WAIT_S).completed_tokens
    if done != len(tokens):
        raise AssertionError(f"{done} of {len(tokens)} tokens were backed up")


def _prefetch(controller: HiCacheController, tokens: list[int]) -> None:
    import torch  # noqa: PLC0415 - only where SGLang is

    operation = controller.prefetch("request", tokens)
    controller.prefetch_hit_queue.get(timeout=WAIT_S)
    operation.host_indices = torch.arange(len(operation.hash_value) * PAGE_TOKENS)
    controller.prefetch_buffer.put(operation)
    deadline_s, done = time.monotonic() + WAIT_S, 0
    while time.monotonic() < deadline_s:
        try:
            ack = controller.ack_prefetch_queue.get(timeout=1)
        except Empty:
            continue
        done = max(done, ack.completed_tokens or 0)
        if ack.completed_req:
            break
    if done != len(tokens):
        raise AssertionError(f"{done} of {len(tokens)} tokens were loaded")
