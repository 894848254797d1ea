"""The parts of the spec seam that need no vLLM: shapes, contradictions, and blocks that do not fit their chunks."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tierkv.config.loading import parse_config
from tierkv.errors import ConfigError, EngineProtocolError
from tierkv.integrations.vllm.spec.notes import Noted, WorkerNote, read_note
from tierkv.integrations.vllm.spec.shape import check_engine, offloading_engine, with_pages, with_stack_chunks
from tierkv.integrations.vllm.spec.worker import DeviceBlocks, SpecWorker
from tierkv.stack.opening import open_staged_stack
from tierkv.stack.staged import StagedStack
from tierkv.types.engine import EngineSpec, GroupKind, GroupSpec
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key, make_key
from tierkv.types.lookup import LookupResult

HIT, MISS = LookupResult.HIT, LookupResult.MISS

NOTING = """
import json, sys
from tierkv.integrations.vllm.spec.notes import WorkerNote
note = WorkerNote(*json.loads(sys.stdin.readline()))
print("noted", flush=True)
sys.stdin.readline()
"""
"""A worker's process that waits for its end."""


@dataclass(frozen=True)
class Group:
    """As vLLM 0.33 tells of a group; 0.32 leaves the window out."""

    tokens_per_block: int = 32
    layer_names: tuple[str, ...] = ("layer",)
    group_id: int = 0
    sliding_window_size_in_chunks: int | None = None


@dataclass(frozen=True)
class Model:
    """As vLLM tells of a model."""

    name: str = "model"
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Cache:
    """As vLLM tells of sizes."""

    tokens_per_hash: int = 32
    blocks_per_chunk: int = 1


@dataclass(frozen=True)
class Parallel:
    """As vLLM tells of workers."""

    world_size: int = 1
    pp_size: int = 1
    pcp_size: int = 1
    dcp_size: int = 1
    data_parallel_index: int = 0


@dataclass(frozen=True)
class Config:
    """Attributes read from vLLM's ``OffloadingConfig``."""

    groups: tuple[Group, ...] = (Group(),)
    worker_kv_bytes_per_block: int = 4096
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    model: Model = field(default_factory=Model)
    cache: Cache = field(default_factory=Cache)
    parallel: Parallel = field(default_factory=Parallel)
    replicated_layout: bool = False
    canonical_layout: bool = False
    kv_cache_layout: str | None = "LBHNC"


def stack_of(**chunk: int) -> Any:
    """A stack's description with a chunk size."""
    return parse_config({"host": {"capacity": "1MiB"}, "chunk": chunk})


# -- shapes ------------------------------------------------------------------------------------------------------------


def test_the_stack_says_how_large_a_chunk_is() -> None:
    """In blocks or in tokens, and vLLM's scheduler reads it from the spec."""
    assert with_stack_chunks(Config(), stack_of(blocks=4)).cache.blocks_per_chunk == 4
    assert with_stack_chunks(Config(), stack_of(tokens=64)).cache.blocks_per_chunk == 2


def test_chunks_cannot_be_divided_by_heads() -> None:
    """VLLM does not describe the heads of a page here. The connector gets them."""
    with pytest.raises(ConfigError, match=r"chunk\.parts = 2: .*heads.*TierKVConnector"):
        with_stack_chunks(Config(), stack_of(blocks=1, parts=2))


@pytest.mark.parametrize(("key", "value"), [("blocks_per_chunk", 2), ("block_size", 64)])
def test_two_chunk_sizes_are_an_error(key: str, value: int) -> None:
    """VLLM's own key and the stack differ: named, both of them. If they agree, all is well."""
    config = Config(extra_config={key: value}, cache=Cache(blocks_per_chunk=2))
    with pytest.raises(ConfigError, match=rf"{key} = {value} is 2 blocks per chunk, but the stack's chunk has 4"):
        with_stack_chunks(config, stack_of(blocks=4))
    assert with_stack_chunks(config, stack_of(blocks=2)).cache.blocks_per_chunk == 2


def test_two_ways_to_store_prompts_only_are_an_error() -> None:
    """``offload_prompt_only`` is vLLM's key for ``store.prompt_only``."""
    with pytest.raises(ConfigError, match=r"offload_prompt_only = True, but the stack's store\.prompt_only is False"):
        with_stack_chunks(Config(extra_config={"offload_prompt_only": True}), stack_of())


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (32, 1), (33, 4), (128, 4), (500, 4), (512, 2), (513, 8)])
def test_windows_are_told_in_chunks_of_the_stack(tokens: int, blocks: int) -> None:
    """VLLM 0.33 counts a window in its own chunks (one block). It is converted to the stack's chunks, rounded up."""
    told = Config(groups=(Group(), Group(group_id=1, sliding_window_size_in_chunks=-(-tokens // 32))))
    rescaled = with_stack_chunks(told, stack_of(blocks=blocks))
    assert rescaled.groups[0].sliding_window_size_in_chunks is None
    assert rescaled.groups[1].sliding_window_size_in_chunks == -(-tokens // (32 * blocks))
    window = offloading_engine(
        rescaled,
        "cpu",
        Noted(
            (
                "",
                "",
            )
        ),
    ).groups[1]
    assert window.kind is GroupKind.SLIDING_WINDOW


def test_a_folder_has_one_name_from_all_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is started in another directory, or with a slash behind the path, keeps its chunks."""
    (tmp_path / "llama").mkdir()
    monkeypatch.chdir(tmp_path)
    names = ("llama", "./llama/", f"{tmp_path}/llama/", f"{tmp_path}/llama", "org/model")
    shapes = [offloading_engine(Config(model=Model(name=name)), "cpu", Noted(("",))) for name in names]
    assert [shape.model for shape in shapes] == [str(tmp_path / "llama")] * 4 + ["org/model"]


def test_the_namespace_tells_all_that_changes_the_bytes() -> None:
    """Two engines read each other's chunks only if nothing differs that a page depends on."""
    plain = Config()
    others = [
        replace(plain, model=Model(name="other")),
        replace(plain, model=Model(dtype="float16")),
        replace(plain, kv_cache_layout="BLHNC"),
        replace(plain, groups=(Group(layer_names=("a", "b")),)),
        replace(plain, worker_kv_bytes_per_block=8192),
        replace(plain, parallel=Parallel(world_size=2)),
        replace(plain, parallel=Parallel(data_parallel_index=1)),  # not the bytes, but whose place in local tiers
    ]
    shapes = [offloading_engine(config, "cpu", Noted(("",))) for config in (plain, *others)]
    shapes.append(offloading_engine(plain, "cuda", Noted(("",))))
    shapes += [offloading_engine(plain, "cpu", Noted((state,))) for state in ("a state", "another state")]
    shapes += [offloading_engine(plain, "cpu", Noted(("",), revision)) for revision in ("v1 1f0c", "v2 77aa")]
    shapes += [
        offloading_engine(plain, "cpu", Noted(("",), words=words)) for words in ("weights=a/fp8", "weights=a/none")
    ]
    assert len(set(shapes)) == len(shapes)
    assert offloading_engine(plain, "cpu", Noted(("",))) == shapes[0]


def test_ranks_with_equal_pages_store_one_copy() -> None:
    """With latent attention in all layers, each worker holds the whole of it."""
    config = replace(Config(), parallel=Parallel(world_size=4))
    assert offloading_engine(config, "cpu", Noted(("",))).groups[0].copies == 1
    assert offloading_engine(replace(config, replicated_layout=True), "cpu", Noted(("",))).groups[0].copies == 4


def test_a_group_that_keeps_a_state_is_no_attention() -> None:
    """Only the last of its chunks counts for a hit; and no codec may round it. VLLM 0.33 calls it a window of one."""
    config = Config(groups=(Group(), Group(group_id=1, sliding_window_size_in_chunks=1)))
    groups = offloading_engine(
        config,
        "cpu",
        Noted(
            (
                "",
                "mamba",
            )
        ),
    ).groups
    assert [(group.kind, group.window_tokens) for group in groups] == [
        (GroupKind.FULL_ATTENTION, None),
        (GroupKind.SSM, None),
    ]


def test_a_note_is_found_by_the_id_of_its_engine() -> None:
    """A worker says what states it keeps, in whatever process it is; when it has gone, nothing is left of it."""
    states = ["", "mamba2 [[3, 160]]"]
    with pytest.raises(ConfigError, match=r"described 0 of 2 KV cache groups.*TierKVConnector"):
        read_note("some engine", 2)
    worker = subprocess.Popen([sys.executable, "-c", NOTING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        worker.stdin.write(json.dumps(["some engine", states]) + "\n")
        worker.stdin.flush()
        assert worker.stdout.readline() == "noted\n"
        assert read_note("some engine", 2) == (tuple(states), "", "")
        with pytest.raises(ConfigError, match="described 0 of 2"):
            read_note("other engine", 2)
        worker.kill()
    with pytest.raises(ConfigError, match="described 0 of 2"):
        read_note("some engine", 2)


def test_engines_that_share_an_id_are_an_error_where_it_matters() -> None:
    """The user gave two engines one id. It is no error as long as their notes are equal."""
    notes = [WorkerNote("shared", ["", "mamba"]) for _ in range(2)]
    assert read_note("shared", 2).states == ("", "mamba")
    notes.append(WorkerNote("shared", ["", "conv"]))
    with pytest.raises(ConfigError, match=r"engine_id = 'shared' is that of several engines"):
        read_note("shared", 2)
    for note in notes:
        note.close()
        note.close()
    with pytest.raises(ConfigError, match="described 0 of 2"):
        read_note("shared", 2)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (Config(parallel=Parallel(pp_size=2)), "pp_size = 2"),
        (Config(parallel=Parallel(dcp_size=2)), "dcp_size = 2"),
        (Config(parallel=Parallel(pcp_size=2)), "pcp_size = 2"),
        (Config(canonical_layout=True), "canonical_layout"),
        (Config(worker_kv_bytes_per_block=0), "no size of a KV block"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(config: Config, says: str) -> None:
    """Rather no engine than wrong bytes."""
    with pytest.raises(ConfigError, match=says):
        check_engine(config)


# -- workers -----------------------------------------------------------------------------------------------------------

PAGES, FACTOR, TOKENS, TOLD = (256, 512), 2, 16, 1024
"""A block has 768 bytes in two tensors; vLLM's scheduler reports 1,024, as where groups differ in layers."""


class Bed:
    """A stack and its worker, with the calls that vLLM makes."""

    def __init__(self, stack: StagedStack) -> None:
        rng = np.random.default_rng(3)
        self.stack = stack
        self.cache = [rng.integers(1, 255, (16, page), dtype=np.uint8) for page in PAGES]
        self.worker = SpecWorker([self.cache], 0)
        self.jobs = 0

    def run(self, transfer: Any, ids: list[int], index: int = 0, *, is_store: bool) -> Any:
        """One job to its end."""
        self.jobs += 1
        blocks = DeviceBlocks(ids, [len(ids)], [index])
        self.worker.submit(self.jobs, transfer, blocks, self.stack.worker_setup(0), is_store=is_store)
        self.worker.wait({self.jobs})
        (ended,) = self.worker.get_finished()
        return ended

    def store(self, keys: list[Key], ids: list[int], index: int = 0) -> Any:
        """Store chunks as vLLM does."""
        granted = self.stack.prepare_store("w", [(key, TOKENS * FACTOR * (i + 1)) for i, key in enumerate(keys)])
        assert granted is not None
        ended = self.run(granted.transfer, ids, index, is_store=True)
        self.stack.complete_store(keys)
        return ended

    def ask(self, keys: list[Key]) -> list[LookupResult]:
        """Ask about chunks."""
        return [self.stack.lookup("r", key, TOKENS * FACTOR * (i + 1)) for i, key in enumerate(keys)]


@pytest.fixture
def bed() -> Iterator[Bed]:
    """Two blocks per chunk."""
    engine = EngineSpec("m", "float32", (GroupSpec(TOKENS, (TOLD,)),), TOKENS)
    stack = open_staged_stack({"host": {"capacity": "256KiB"}, "chunk": {"blocks": FACTOR}}, engine)
    bed = Bed(stack)
    yield bed
    bed.worker.shutdown()
    stack.close()


def keys(count: int) -> list[Key]:
    """Chunks of a prompt."""
    return [make_key(f"{i}".encode().rjust(16), 0) for i in range(count)]


def test_pages_come_back_and_what_no_page_fills_is_zero(bed: Bed) -> None:
    """A slot that held other bytes before has none of them behind the pages: nothing leaks to a tier."""
    arena = bed.stack._core.wiring.arena
    for slot in range(arena.num_slots):
        arena.payload(slot)[:] = 0xEE
    ended = bed.store(keys(2), [1, 2, 3, 4])
    assert (ended.success, ended.bytes_moved) == (True, 2 * FACTOR * TOLD)
    assert bed.ask(keys(2)) == [HIT, HIT]
    transfer = bed.stack.prepare_load("r", keys(2))
    assert bed.run(transfer, [9, 10, 11, 12], is_store=False).success
    for tensor in bed.cache:
        assert (tensor[9:13] == tensor[1:5]).all()
    payload = arena.payload(transfer.slots[0].slot)[: FACTOR * TOLD]
    assert not payload[FACTOR * sum(PAGES) :].any()
    assert payload[: FACTOR * sum(PAGES)].all()


def test_a_chunk_whose_front_is_missing_is_not_stored(bed: Bed) -> None:
    """The first index shows blocks outside a window. Another prompt may need all blocks of the chunk, and vLLM asks for
    whole chunks only. The chunks behind it are stored."""
    bed.store(keys(3), [2, 3, 4, 5, 6], index=1)
    assert bed.ask(keys(3)) == [MISS, HIT, HIT]
    transfer = bed.stack.prepare_load("r", keys(3)[1:])
    assert bed.run(transfer, [9, 10, 11, 12], index=2, is_store=False).success
    assert (bed.cache[0][9:13] == bed.cache[0][3:7]).all()


def test_a_load_may_begin_inside_a_chunk(bed: Bed) -> None:
    """Blocks that the device still has, or that are outside a window, are left as they are."""
    bed.store(keys(2), [1, 2, 3, 4])
    assert bed.ask(keys(2)) == [HIT, HIT]
    transfer = bed.stack.prepare_load("r", keys(2))
    before = bed.cache[0][9].copy()
    assert bed.run(transfer, [10, 11, 12], index=1, is_store=False).success
    assert (bed.cache[0][10:13] == bed.cache[0][2:5]).all()
    assert (bed.cache[0][9] == before).all()


def test_the_last_chunk_of_a_load_may_be_wanted_in_part(bed: Bed) -> None:
    """A hit may end inside a chunk."""
    bed.store(keys(2), [1, 2, 3, 4])
    bed.ask(keys(2))
    transfer = bed.stack.prepare_load("r", keys(2))
    assert bed.run(transfer, [9, 10, 11], is_store=False).success
    assert (bed.cache[1][9:12] == bed.cache[1][1:4]).all()


def test_a_gap_in_the_middle_is_not_guessed_at(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    """VLLM leaves out a block behind the first one, so it is unknown whose the others are: no chunk of that group is
    stored, the engine goes on, and the next job is as good as any."""
    with caplog.at_level(logging.WARNING):
        assert bed.store(keys(2), [1, 2, 4]).success
    assert "omitted blocks in their middle" in caplog.text
    assert bed.ask(keys(2)) == [MISS, MISS]
    bed.stack.end_step()
    bed.store(keys(2), [1, 2, 3, 4])
    assert bed.ask(keys(2)) == [HIT, HIT]


def test_a_load_that_does_not_fit_its_chunks_is_an_error(bed: Bed) -> None:
    """A load must be complete, and vLLM cannot handle a failure: no answer is better than a wrong one."""
    bed.store(keys(2), [1, 2, 3, 4])
    bed.ask(keys(2))
    transfer = bed.stack.prepare_load("r", keys(2))
    with pytest.raises(EngineProtocolError, match="do not fit its chunks"):
        bed.run(transfer, [9, 10], is_store=False)


def test_a_store_that_cannot_be_copied_is_a_success_to_the_engine_and_a_miss_to_everybody(bed: Bed) -> None:
    """VLLM's assertion would end the engine. A load that cannot be copied is the only failure that it gets."""
    assert bed.store(keys(1), [1, 999]).success
    assert bed.ask(keys(1)) == [MISS]
    bed.stack.end_step()
    bed.store(keys(1), [1, 2])
    assert bed.ask(keys(1)) == [HIT]
    transfer = bed.stack.prepare_load("r", keys(1))
    assert not bed.run(transfer, [1, 999], is_store=False).success


def test_tensors_with_more_bytes_than_told_are_refused() -> None:
    """Scheduler and worker must mean the same bytes."""
    geometry = Geometry.of(EngineSpec("m", "f", (GroupSpec(16, (512,)),), 16), blocks=2)
    with pytest.raises(EngineProtocolError, match="768 bytes per block, vLLM's scheduler has 512"):
        with_pages(geometry, [[np.zeros((4, 256), np.uint8), np.zeros((4, 512), np.uint8)]])
    with pytest.raises(EngineProtocolError, match="of 2 groups, its scheduler has 1"):
        with_pages(geometry, [[], []])
