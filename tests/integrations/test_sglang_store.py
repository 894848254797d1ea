"""Page store over real disks and a real server, with pools of plain memory that name their pages as SGLang's do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tierkv.config.loading import parse_config
from tierkv.errors import ConfigError
from tierkv.integrations.sglang.identity import engine_spec
from tierkv.integrations.sglang.options import read_seconds, read_stack
from tierkv.integrations.sglang.pages import PageMemory, PoolPages
from tierkv.integrations.sglang.store import PageStore
from tierkv.stack.opening import open_staged_stack
from tierkv.types.keys import make_key
from tierkv_disk.backend import DiskBackend

PAGE_SIZE, LAYERS, WIDTH, NUM_PAGES = 4, 3, 64, 32
HASHES = [bytes([number]) * 32 for number in range(24)]


@dataclass
class Pool:
    """Host pool of plain memory: K, then V, each ``[layers, tokens, width]`` or ``[tokens, layers, width]``."""

    layout: str = "layer_first"
    dtype: str = "bfloat16"
    page_size: int = PAGE_SIZE
    layer_num: int = LAYERS
    values: Any = field(default_factory=lambda: np.zeros(2 * LAYERS * NUM_PAGES * PAGE_SIZE * WIDTH, dtype=np.uint8))

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        """Return addresses and lengths, two pieces a page, or two a layer."""
        base, half = self.values.ctypes.data, len(self.values) // 2
        starts = list(indices)[:: self.page_size]
        if self.layout == "layer_first":
            layer_bytes, length = half // LAYERS, self.page_size * WIDTH
            addresses = [
                base + part * half + layer * layer_bytes + start * WIDTH
                for start in starts
                for layer in range(LAYERS)
                for part in range(2)
            ]
        else:
            length = self.page_size * WIDTH * LAYERS
            addresses = [base + part * half + start * WIDTH * LAYERS for start in starts for part in range(2)]
        return addresses, [length] * len(addresses)


STORAGE = SimpleNamespace(
    tp_rank=0, tp_size=1, pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, dcp_rank=0, dcp_size=1, dp_rank=0,
    is_mla_model=False, should_split_heads=False, tp_lcm_size=None, model_name="tiny",
)  # fmt: skip


def tokens(first: int, count: int) -> list[int]:
    """Positions of the tokens of ``count`` pages, from page ``first`` on."""
    return list(range(first * PAGE_SIZE, (first + count) * PAGE_SIZE))


def description(path: Path, **tier: Any) -> dict[str, Any]:
    """A stack with room for eight staged pages over one disk."""
    frame = 4096 * 2
    disk = {"backend": "disk", "path": str(path), "capacity": "16MiB", **tier}
    return {"host": {"capacity": 8 * frame}, "tiers": [disk]}


Open = Callable[..., tuple[PageStore, PoolPages]]


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Open]:
    """Open stores, and close them at the end."""
    opened: list[PageStore] = []

    def open_one(
        pool: Pool,
        stack: dict[str, Any] | None = None,
        revision: str = "r1",
        storage: Any = STORAGE,
        wait_s: float = 20,
    ) -> tuple[PageStore, PoolPages]:
        config = parse_config(stack or description(tmp_path / "disk"))
        pages = PoolPages(pool, tokens(0, 1))
        spec = engine_spec(config, storage, [("kv", pool, pages)], {"revision": revision})
        store = PageStore(
            open_staged_stack(config, spec), PAGE_SIZE,
            timeout_s=wait_s, probe_timeout_s=wait_s, queue_bytes_max=config.tiers[0].queue_bytes_max,
        )  # fmt: skip
        opened.append(store)
        return store, pages

    yield open_one
    for store in opened:
        store.close()


def filled(layout: str, rng: Any) -> Pool:
    """A pool with random bytes."""
    pool = Pool(layout)
    pool.values[:] = np.frombuffer(rng.randbytes(len(pool.values)), dtype=np.uint8)
    return pool


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_a_new_process_finds_every_page_with_equal_bytes(layout: str, open_store: Open, rng: Any) -> None:
    """Three times as many pages as the staging memory holds survive a restart, at other positions of the pool."""
    pool = filled(layout, rng)
    store, pages = open_store(pool)
    assert store.store(HASHES, pages.locate(tokens(0, 24), 24)) == [True] * 24
    store.close()

    other = Pool(layout)
    store, there = open_store(other)
    assert store.count_prefix([*HASHES, b"unknown"]) == 24
    assert store.load(HASHES, there.locate(tokens(5, 24), 24)) == [True] * 24
    half, cells = len(pool.values) // 2, PAGE_SIZE * WIDTH
    for part in (0, 1):
        before = pool.values[part * half :][:half].reshape((LAYERS, -1) if layout == "layer_first" else (1, -1))
        after = other.values[part * half :][:half].reshape(before.shape)
        page = cells if layout == "layer_first" else cells * LAYERS
        assert np.array_equal(before[:, : 24 * page], after[:, 5 * page : 29 * page])
    assert other.values[: 5 * cells].sum() == 0  # no byte in front of the pages was touched


def test_damage_at_rest_gives_false_and_touches_no_page(tmp_path: Path, open_store: Open, rng: Any) -> None:
    """One changed byte of a stored page: pages in front of it are loaded, its own place in the pool is not written."""
    pool = filled("page_first", rng)
    store, pages = open_store(pool)
    assert all(store.store(HASHES, pages.locate(tokens(0, 24), 24)))
    store.close()
    piece = bytes(pool.values[7 * PAGE_SIZE * WIDTH * LAYERS :][: PAGE_SIZE * WIDTH * LAYERS])
    damaged = 0
    for path in (tmp_path / "disk").rglob("*"):
        content = path.read_bytes() if path.is_file() else b""
        if (at := content.find(piece)) >= 0:
            path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
            damaged += 1
    assert damaged == 1

    other = Pool("page_first")
    store, there = open_store(other)
    assert store.load(HASHES, there.locate(tokens(0, 24), 24)) == [True] * 7 + [False] * 17
    assert other.values[7 * len(piece) :][: len(piece)].sum() == 0


@pytest.mark.parametrize("difference", ["revision", "dtype", "layout", "rank", "heads"])
def test_pages_of_another_identity_are_never_found(difference: str, tmp_path: Path, open_store: Open, rng: Any) -> None:
    """Equal page hashes under another revision, dtype, layout, share or number of heads: nothing is found."""
    store, pages = open_store(filled("page_first", rng))
    assert all(store.store(HASHES, pages.locate(tokens(0, 24), 24)))
    store.close()

    other: Any = Pool("page_first")
    storage = STORAGE
    if difference == "dtype":
        other.dtype = "float8_e5m2"
    elif difference == "layout":
        other.layout = "page_first_direct"
    elif difference == "heads":
        other.head_num = 2
    elif difference == "rank":
        storage = SimpleNamespace(**{**vars(STORAGE), "tp_rank": 1, "tp_size": 2})
    store, there = open_store(other, revision="r2" if difference == "revision" else "r1", storage=storage)
    assert store.count_prefix(HASHES) == 0
    assert not any(store.load(HASHES, there.locate(tokens(0, 24), 24)))
    assert other.values.sum() == 0


def test_ranks_of_latent_attention_share_pages() -> None:
    """Every rank of tensor parallelism holds the same latent pages, so all of them name one share."""
    pool = Pool("page_first")
    pages = PoolPages(pool, tokens(0, 1))
    config = parse_config(description(Path("unused")))
    specs = []
    for rank in range(2):
        storage = SimpleNamespace(**{**vars(STORAGE), "tp_rank": rank, "tp_size": 2, "is_mla_model": True})
        specs.append(engine_spec(config, storage, [("kv", pool, pages)], {"revision": "r1"}))
    assert specs[0] == specs[1]


def test_a_revision_or_an_epoch_is_demanded(tmp_path: Path) -> None:
    """SGLang does not name the weights, so without either a stack would serve pages of old ones."""
    pool = Pool()
    pages = PoolPages(pool, tokens(0, 1))
    plain = description(tmp_path)
    with pytest.raises(ConfigError, match="which revision of the model"):
        engine_spec(parse_config(plain), STORAGE, [("kv", pool, pages)], {})
    epoch = {**plain, "namespace": {"epoch": "7"}}
    assert engine_spec(parse_config(epoch), STORAGE, [("kv", pool, pages)], {}).revision == ""


def test_plain_bytes_must_be_named(tmp_path: Path) -> None:
    """SGLang keeps both 8-bit float formats as bytes, and pages of one are wrong numbers in the other."""
    pool = Pool(dtype="torch.uint8")
    config, pools = parse_config(description(tmp_path)), [("kv", pool, PoolPages(pool, tokens(0, 1)))]
    with pytest.raises(ConfigError, match="--kv-cache-dtype"):
        engine_spec(config, STORAGE, pools, {"revision": "r1"})
    names = ("fp8_e4m3", "fp8_e5m2")
    dtypes = {engine_spec(config, STORAGE, pools, {"revision": "r1", "dtype": name}).dtype for name in names}
    assert len(dtypes) == 2


def test_wrong_options_name_option_and_fix(tmp_path: Path) -> None:
    """Each mistake in the extra configuration is an error at start, not a cache that never hits."""
    good = {"interface_v1": 1, "stack": description(tmp_path)}
    assert read_stack(good).tiers[0].backend == "disk"
    for wrong, message in [
        ({**good, "interface_v1": 0}, '"interface_v1": 1'),
        ({**good, "stack": None}, '"stack"'),
        ({**good, "stack": description(tmp_path, write="back")}, 'write = "through"'),
    ]:
        with pytest.raises(ConfigError, match=message):
            read_stack(wrong)
    for value in (0, -1, "3", True, float("inf")):
        with pytest.raises(ConfigError, match="timeout_s"):
            read_seconds({"timeout_s": value}, "timeout_s", 1.0)


def test_a_chunk_of_several_pages_is_refused(tmp_path: Path) -> None:
    """SGLang stores single pages, so a description with larger chunks would store nothing."""
    pool = Pool()
    config = parse_config({**description(tmp_path), "chunk": {"blocks": 4}})
    with pytest.raises(ConfigError, match="--page-size"):
        engine_spec(config, STORAGE, [("kv", pool, PoolPages(pool, tokens(0, 1)))], {"revision": "r1"})


def test_positions_that_fit_no_pages_are_refused() -> None:
    """A wrong number of positions would copy the bytes of other pages."""
    pages = PoolPages(Pool(), tokens(0, 1))
    assert pages.locate(tokens(0, 2), 3) is None
    assert len(pages.locate(tokens(0, 2), 2) or ()) == 2


def test_a_backup_and_a_prefetch_on_two_threads_are_both_right(open_store: Open, rng: Any) -> None:
    """SGLang backs up and prefetches at the same time, over staging memory that holds neither batch."""
    pool = filled("page_first", rng)
    store, pages = open_store(pool)
    first, second = HASHES[:12], HASHES[12:]
    assert all(store.store(first, pages.locate(tokens(0, 12), 12)))
    other = Pool("page_first")
    there = PoolPages(other, tokens(0, 1))
    results: dict[str, list[bool]] = {}

    def back_up() -> None:
        results["stored"] = store.store(second, pages.locate(tokens(12, 12), 12))

    thread = threading.Thread(target=back_up)
    thread.start()
    results["loaded"] = store.load(first, there.locate(tokens(0, 12), 12))
    thread.join(60)
    assert results == {"stored": [True] * 12, "loaded": [True] * 12}
    part, half = 12 * PAGE_SIZE * WIDTH * LAYERS, len(pool.values) // 2
    assert np.array_equal(pool.values[:part], other.values[:part])
    assert np.array_equal(pool.values[half : half + part], other.values[half : half + part])


def test_pages_are_copied_while_others_are_read(
    tmp_path: Path, open_store: Open, rng: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pages of a batch wait for no others, so a tier that reads and a thread that copies work at once."""
    pool = filled("page_first", rng)
    store, pages = open_store(pool)
    assert all(store.store(HASHES, pages.locate(tokens(0, 24), 24)))
    store.close()

    stack = description(tmp_path / "disk", read_deadline_s=100)  # the tier gives no read up,
    stack["lookup"] = {"deadline_s": 100}  # and no lookup is late
    stack["host"]["capacity"] = 64 * 8192  # room for all pages at once
    store, there = open_store(Pool("page_first"), stack, wait_s=10)
    copied, real, last = threading.Event(), DiskBackend.read_into, make_key(HASHES[-1], 0)

    class FirstPage(PageMemory):
        def copy_from(self, payload: Any) -> None:
            PageMemory.copy_from(self, payload)
            copied.set()

    def read_into(backend: DiskBackend, requests: Any) -> Any:
        if any(request.key == last for request in requests):
            copied.wait(30)
        return real(backend, requests)

    monkeypatch.setattr(DiskBackend, "read_into", read_into)
    first, *others = there.locate(tokens(0, 24), 24)
    try:
        assert store.load(HASHES, [FirstPage(first.pieces), *others]) == [True] * 24
    finally:
        copied.set()


def test_a_page_is_not_stored_while_no_tier_takes_it(tmp_path: Path, open_store: Open, rng: Any) -> None:
    """A read-only tier acknowledges nothing, so no page may be reported as stored, though it was staged."""
    pool = filled("page_first", rng)
    store, pages = open_store(pool)
    assert all(store.store(HASHES[:2], pages.locate(tokens(0, 2), 2)))
    store.close()
    store, pages = open_store(pool, description(tmp_path / "disk", write="read_only"))
    assert store.store(HASHES[:4], pages.locate(tokens(0, 4), 4)) == [True, True, False, False]


def test_a_closed_store_answers_false(open_store: Open, rng: Any) -> None:
    """Threads of SGLang may call once more while it detaches the backend."""
    store, pages = open_store(filled("page_first", rng))
    store.close()
    memory = pages.locate(tokens(0, 2), 2)
    assert store.count_prefix(HASHES) == 0
    assert store.load(HASHES[:2], memory) == store.store(HASHES[:2], memory) == [False, False]
    assert store.close()


@pytest.mark.parametrize("verb", ["read_into", "write"])
def test_a_call_ends_while_the_tier_hangs_and_pages_return_when_it_answers(
    verb: str, tmp_path: Path, open_store: Open, rng: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount that stops to answer costs SGLang its timeout, never its thread; the bytes that arrive late are right."""
    pool = filled("page_first", rng)
    store, pages = open_store(pool)
    assert all(store.store(HASHES[:8], pages.locate(tokens(0, 8), 8)))
    store.close()

    other = Pool("page_first")
    patient = description(tmp_path / "disk", read_deadline_s=100, write_deadline_s=100)  # the tier ends no operation
    store, there = open_store(other, patient, wait_s=1)
    real = getattr(DiskBackend, verb)
    begun, answers, ended = threading.Event(), threading.Event(), threading.Event()

    def hang(backend: DiskBackend, requests: Any) -> Any:
        begun.set()
        answers.wait(30)  # longer than the timeout of the call: one that waits for the tier fails below
        ended.set()
        return real(backend, requests)

    def call() -> list[bool]:
        if verb == "read_into":
            return store.load(HASHES[:8], there.locate(tokens(0, 8), 8))
        return store.store(HASHES[8:16], pages.locate(tokens(8, 8), 8))

    monkeypatch.setattr(DiskBackend, verb, hang)
    try:
        assert call() == [False] * 8
        assert begun.wait(30)
        assert not ended.is_set()  # the call did not wait for the tier
        assert other.values.sum() == 0
    finally:
        answers.set()
    while not all(call()):  # the tier is tried again after a while; a store that never recovers is ended by pytest
        time.sleep(0.05)
    first = 0 if verb == "read_into" else 8
    if verb == "write":
        assert store.close()
        store, there = open_store(other)
        assert store.load(HASHES[8:16], there.locate(tokens(8, 8), 8)) == [True] * 8
    piece, half = PAGE_SIZE * WIDTH * LAYERS, len(pool.values) // 2
    for part in (0, half):
        loaded = slice(part + first * piece, part + (first + 8) * piece)
        assert np.array_equal(other.values[loaded], pool.values[loaded])
