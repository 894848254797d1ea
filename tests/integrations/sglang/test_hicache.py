"""SGLang's real host pools and cache controller over tierkv, on a CPU: backup, prefetch, damage, restart, failures."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fsspec_support import S3Server
from sglang.srt.environ import envs
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    HiCacheStorageFailureInjector,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_parallel

from tierkv.integrations.sglang import TierKVHiCache

PAGE_SIZE, PAGES, LAYERS, HEADS, WIDTH = 16, 24, 2, 2, 8
TOKENS = PAGE_SIZE * PAGES
WAIT_S = 60.0

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIATIERKVTESTS00001",
    "AWS_SECRET_ACCESS_KEY": "the-secret-of-the-tests",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
    "NO_PROXY": "127.0.0.1",
}

Controller = Callable[..., HiCacheController]
Tier = dict[str, Any]
TIERS = ("disk", "fsspec", "s3")


def storage_config(options: dict[str, Any], **changes: Any) -> HiCacheStorageConfig:
    """The configuration that SGLang would make for one rank."""
    facts = {
        "tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "attn_cp_rank": 0, "attn_cp_size": 1,
        "is_mla_model": False, "enable_storage_metrics": False, "is_page_first_layout": False, "model_name": "tiny",
    }  # fmt: skip
    return HiCacheStorageConfig(**{**facts, "extra_config": options, **changes})


def options(path: Path, tier: Tier | None = None, **changes: Any) -> dict[str, Any]:
    """Extra configuration with a small stack over a disk, or over another tier."""
    disk = {"backend": "disk", "path": str(path), "capacity": "64MiB"}
    stack = {"host": {"capacity": "256KiB"}, "tiers": [tier or disk]}
    return {
        "backend_name": "tierkv", "module_path": "tierkv.integrations.sglang", "class_name": "TierKVHiCache",
        "interface_v1": 1, "stack": stack, "revision": "r1", **changes,
    }  # fmt: skip


def host_pool(layout: str, dtype: torch.dtype = torch.bfloat16) -> tuple[MHATokenToKVPool, MHATokenToKVPoolHost]:
    """A device pool on the CPU, and the real host pool of it."""
    device = MHATokenToKVPool(TOKENS, PAGE_SIZE, dtype, HEADS, WIDTH, LAYERS, "cpu", False)
    host = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info, 3.0, 0, PAGE_SIZE, layout, pin_memory=False,
        device_capacity_tokens=TOKENS, start_layer=0, end_layer=LAYERS - 1,
    )  # fmt: skip
    return device, host


@pytest.fixture
def controller() -> Iterator[Controller]:
    """Start controllers, and detach them at the end."""
    started: list[HiCacheController] = []

    def start(config: HiCacheStorageConfig, layout: str, dtype: torch.dtype = torch.bfloat16) -> HiCacheController:
        device, host = host_pool(layout, dtype)
        allocator = SimpleNamespace(get_kvcache=lambda: device)

        class CpuController(HiCacheController):
            """The real controller; only its storage configuration is given, since no server has published one."""

            def _generate_storage_config(self, *unused: Any, **unused_too: Any) -> HiCacheStorageConfig:
                return config

        made = CpuController(allocator, host, PAGE_SIZE, None, None, storage_backend="dynamic", prefetch_threshold=1)
        started.append(made)
        return made

    with get_parallel().override(attn_dcp_size=1):
        yield start
    for made in started:
        if made.enable_storage:
            made.detach_storage_backend()


def back_up(controller: HiCacheController, tokens: list[int], first: int = 0) -> int:
    """Back up pages of the pool from ``first`` on, as SGLang does. Returns the tokens that were acknowledged."""
    hashes, parent = [], None
    for start in range(0, len(tokens), PAGE_SIZE):
        parent = controller.get_hash_str(tokens[start : start + PAGE_SIZE], parent)
        hashes.append(parent)
    controller.write_storage(torch.arange(first, first + len(tokens)), tokens, hashes)
    return int(controller.ack_backup_queue.get(timeout=WAIT_S).completed_tokens)


def prefetch(controller: HiCacheController, tokens: list[int], first: int) -> int:
    """Prefetch pages to positions from ``first`` on. Returns the tokens that were loaded."""
    operation = controller.prefetch("request", tokens)
    found = controller.prefetch_hit_queue.get(timeout=WAIT_S)
    assert found is operation
    if not operation.hash_value:
        return 0
    operation.host_indices = torch.arange(first, first + len(operation.hash_value) * PAGE_SIZE)
    controller.prefetch_buffer.put(operation)
    deadline, done = time.monotonic() + WAIT_S, 0
    while time.monotonic() < deadline:
        try:
            ack = controller.ack_prefetch_queue.get(timeout=1)
        except Empty:
            continue
        done = max(done, ack.completed_tokens or 0)
        if ack.completed_req:
            return int(done)
    raise AssertionError("the prefetch did not end")


def fill(host: MHATokenToKVPoolHost) -> None:
    """Put random numbers into the pool."""
    generator = torch.Generator().manual_seed(7)
    host.kv_buffer.view(torch.uint8).copy_(
        torch.randint(0, 256, host.kv_buffer.view(torch.uint8).shape, generator=generator, dtype=torch.uint8)
    )


def page(host: MHATokenToKVPoolHost, index: int) -> torch.Tensor:
    """The bytes of one page, flat."""
    return host.get_data_page(index * PAGE_SIZE, flat=True).view(torch.uint8).clone()


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    """A real server of objects on the loopback interface."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        server = S3Server()
        yield server
        server.stop()


def tier_of(kind: str, place: Path, s3: S3Server, **changes: Any) -> Tier:
    """A tier of each kind: a local disk, a directory through fsspec, a remote bucket."""
    if kind == "disk":
        return {"backend": "disk", "path": str(place / "kv"), "capacity": "64MiB", **changes}
    if kind == "fsspec":
        return {"backend": "fsspec", "url": f"file://{place}/objects", **changes}
    return {"backend": "fsspec", "url": f"s3://{s3.new_bucket()}/kv", "endpoint_url": s3.endpoint, **changes}


@pytest.mark.parametrize("kind", TIERS)
@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_the_controller_backs_up_and_prefetches_after_a_restart(
    kind: str, layout: str, tmp_path: Path, s3: S3Server, controller: Controller
) -> None:
    """The main job: SGLang's own threads store pages, and a new controller loads equal bytes to other positions."""
    tokens = list(range(1000, 1000 + TOKENS))
    tier = tier_of(kind, tmp_path, s3)
    first = controller(storage_config(options(tmp_path, tier)), layout)
    fill(first.mem_pool_host)
    assert back_up(first, tokens) == TOKENS
    first.detach_storage_backend()

    second = controller(storage_config(options(tmp_path, tier)), layout)
    assert prefetch(second, tokens, PAGE_SIZE * 3) == TOKENS
    for index in range(PAGES):
        assert torch.equal(page(second.mem_pool_host, index + 3), page(first.mem_pool_host, index))


def test_damage_at_rest_ends_the_prefetch_before_the_page(tmp_path: Path, controller: Controller) -> None:
    """SGLang's file backend would load these bytes; here the page is not loaded."""
    tokens = list(range(TOKENS))
    first = controller(storage_config(options(tmp_path / "kv")), "page_first")
    fill(first.mem_pool_host)
    assert back_up(first, tokens) == TOKENS
    wanted = bytes(page(first.mem_pool_host, 5)[:64].tolist())
    first.detach_storage_backend()
    damaged = 0
    for path in (tmp_path / "kv").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        if (at := content.find(wanted)) >= 0:
            path.write_bytes(content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :])
            damaged += 1
    assert damaged == 1
    second = controller(storage_config(options(tmp_path / "kv")), "page_first")
    assert prefetch(second, tokens, 0) == 5 * PAGE_SIZE


@pytest.mark.parametrize("difference", ["revision", "dtype", "layout"])
def test_two_identities_never_meet(difference: str, tmp_path: Path, controller: Controller) -> None:
    """Equal tokens, so equal page hashes; float16 and bfloat16 pages even have equal lengths."""
    tokens = list(range(TOKENS))
    first = controller(storage_config(options(tmp_path / "kv")), "page_first")
    assert back_up(first, tokens) == TOKENS
    first.detach_storage_backend()
    second = controller(
        storage_config(options(tmp_path / "kv", revision="r2" if difference == "revision" else "r1")),
        "layer_first" if difference == "layout" else "page_first",
        torch.float16 if difference == "dtype" else torch.bfloat16,
    )
    assert prefetch(second, tokens, 0) == 0


def test_under_the_failure_injector_every_loaded_page_is_right(tmp_path: Path, controller: Controller) -> None:
    """SGLang's injector fails half of all calls: fewer pages arrive, and none of them is wrong."""
    tokens = list(range(TOKENS))
    with envs.SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE.override(0.5):
        made = controller(storage_config(options(tmp_path / "kv")), "page_first")
    assert isinstance(made.storage_backend, HiCacheStorageFailureInjector)
    host = made.mem_pool_host
    fill(host)
    expected = [page(host, index) for index in range(PAGES)]
    while back_up(made, tokens) < TOKENS:  # about half of the calls succeed; pytest ends a loop that never ends
        pass
    loaded: list[int] = []
    while not {0, TOKENS} <= set(loaded) or len(loaded) < 12:
        host.kv_buffer.view(torch.uint8)[:, TOKENS:] = 0
        loaded.append(prefetch(made, tokens, TOKENS))
        for index in range(loaded[-1] // PAGE_SIZE):
            assert torch.equal(page(host, PAGES + index), expected[index])


def test_a_stopped_server_costs_a_bounded_time_and_pages_return_with_it(
    tmp_path: Path, s3: S3Server, controller: Controller
) -> None:
    """A server that is gone: backup and prefetch of SGLang's threads end, and say that nothing was moved."""
    tokens = list(range(TOKENS))
    tier = tier_of("s3", tmp_path, s3, breaker_cooldown_s=0.2, read_deadline_s=2, write_deadline_s=2)
    bounded = storage_config(options(tmp_path, tier, timeout_s=5, probe_timeout_s=1))
    first = controller(bounded, "page_first")
    fill(first.mem_pool_host)
    expected = [page(first.mem_pool_host, index) for index in range(PAGES)]
    assert back_up(first, tokens) == TOKENS
    first.detach_storage_backend()
    made = controller(bounded, "page_first")  # whose staging memory has none of the pages
    host = made.mem_pool_host
    s3.stop()
    try:  # each of these waits for WAIT_S at most
        assert prefetch(made, tokens, TOKENS) == 0
        assert back_up(made, [token + 7000 for token in tokens]) == 0
    finally:
        s3.start()
    while prefetch(made, tokens, TOKENS) < TOKENS:  # the tier is tried again; pytest ends a loop that never ends
        time.sleep(0.1)
    for index in range(PAGES):
        assert torch.equal(page(host, PAGES + index), expected[index])


def test_only_one_rank_writes_latent_pages(tmp_path: Path) -> None:
    """Ranks hold equal pages of latent attention: the second rank stores none, and reports no failure."""
    _, host = host_pool("page_first")
    backend = TierKVHiCache(storage_config(options(tmp_path / "kv"), is_mla_model=True, tp_rank=1, tp_size=2))
    backend.register_mem_pool_host(host)
    backend.on_host_pools_registered()
    try:
        assert backend.batch_set_v1(["aa" * 32], torch.arange(PAGE_SIZE)) == [True]
        assert backend.batch_exists(["aa" * 32]) == 0
    finally:
        backend.close()


def test_a_second_pool_limits_where_a_prefix_may_end(tmp_path: Path) -> None:
    """A pool of which only trailing pages are stored: the prefix ends there, and nowhere else."""
    (_, host), (_, states) = host_pool("page_first"), host_pool("page_first")
    fill(host)
    fill(states)
    backend = TierKVHiCache(storage_config(options(tmp_path / "kv")))
    backend.register_mem_pool_host(host)
    backend.register_mem_host_pool_v2(states, PoolName.MAMBA)
    backend.on_host_pools_registered()
    keys = [f"{number:02x}" * 32 for number in range(6)]
    try:
        assert backend.batch_set_v1(keys, torch.arange(6 * PAGE_SIZE)) == [True] * 6
        kept = PoolTransfer(PoolName.MAMBA, torch.arange(2 * PAGE_SIZE), keys=keys[3:5])
        assert backend.batch_set_v2([kept]) == {PoolName.MAMBA: [True, True]}
        asked = PoolTransfer(PoolName.MAMBA, keys=keys[-2:], hit_policy=PoolHitPolicy.TRAILING_PAGES)
        answer = backend.batch_exists_v2(keys, [asked])
        assert (answer.kv_hit_pages, answer.restorable_prefix_pages) == (5, [5])
        every = PoolTransfer(PoolName.MAMBA, keys=keys, hit_policy=PoolHitPolicy.ALL_PAGES)
        assert backend.batch_exists_v2(keys, [every]).kv_hit_pages == 0
        there = PoolTransfer(PoolName.MAMBA, torch.arange(2 * PAGE_SIZE, 3 * PAGE_SIZE), keys=keys[3:4])
        assert backend.batch_get_v2([there]) == {PoolName.MAMBA: [True]}
        assert torch.equal(page(states, 2), page(states, 0))
    finally:
        backend.close()


def test_missing_options_refuse_to_attach(tmp_path: Path, controller: Controller) -> None:
    """Without a revision SGLang's start fails, and the message says which option to give."""
    lacking = options(tmp_path / "kv")
    del lacking["revision"]
    with pytest.raises(ValueError, match="which revision"):
        controller(storage_config(lacking), "page_first")
