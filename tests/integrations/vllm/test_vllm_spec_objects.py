"""The objects of the spec seam in vLLM's own terms, without an engine: what it calls, hands over and pickles."""

from __future__ import annotations

import importlib
import inspect
import pickle
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.aux_output import AuxOutputConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_cache_interface import CrossAttentionSpec, FullAttentionSpec, KVCacheSpec, MambaSpec, RSWASpec
from vllm.v1.kv_offload import base
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    Locality,
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    ReqContext,
    ScheduleEndContext,
    TierFilter,
    TierMatcher,
    make_offload_key,
)
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from tierkv.errors import ConfigError, EngineProtocolError
from tierkv.integrations.vllm import TierKVSpec
from tierkv.integrations.vllm.spec import spec
from tierkv.integrations.vllm.spec.containment import ContainedManager
from tierkv.integrations.vllm.spec.failed_loads import report_failed_loads
from tierkv.integrations.vllm.spec.manager import TierKVTransfer
from tierkv.integrations.vllm.spec.spec import TierKVWorker
from tierkv.types.engine import GroupKind

BLOCKS, PAGE, TOKENS = 16, 256, 32
NO_STEP = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())


def config_of(
    stack: dict[str, Any], *, rank: int = 0, engine_id: str = "nobody", tokens_per_hash: int = TOKENS, **extra: Any
) -> OffloadingConfig:
    """Configuration that vLLM makes of a small model with one group of two layers."""
    names = {"spec_name": "TierKVSpec", "spec_module_path": "tierkv.integrations.vllm", "tierkv": stack}
    names["tierkv_reset_scope"] = "host"
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(tokens_per_block=TOKENS, layer_names=("a", "b"), group_id=0),),
        worker_kv_bytes_per_block=2 * PAGE,
        enable_kv_cache_events=True,
        extra_config={**names, **extra},
        engine_id=engine_id,
        model=OffloadingModelConfig(name="model", dtype="float32"),
        cache=OffloadingCacheConfig(tokens_per_hash=tokens_per_hash, blocks_per_chunk=1),
        parallel=OffloadingParallelConfig(
            rank=rank, world_size=1, tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, data_parallel_index=0,
            data_parallel_size=1, data_parallel_rank_local=None, is_parallelism_agnostic=True,
        ),
        kv_cache_layout="LBHNC",
    )  # fmt: skip


@dataclass
class Layer:
    """As the spec seam sees a layer of the model."""

    spec: KVCacheSpec

    def get_kv_cache_spec(self, vllm_config: object) -> KVCacheSpec:
        """States that the layer keeps."""
        return self.spec


ATTENTION = FullAttentionSpec(TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32)
STATE = MambaSpec(TOKENS, shapes=((3, 8), (2, 4)), dtypes=(torch.float32,) * 2, mamba_cache_mode="align")


@pytest.fixture
def parallel() -> SimpleNamespace:
    """Machines of the engine that vLLM sets up."""
    return SimpleNamespace(nnodes=1, nnodes_within_dp=1)


@pytest.fixture(autouse=True)
def layers(monkeypatch: pytest.MonkeyPatch, parallel: SimpleNamespace) -> dict[str, Layer]:
    """The layers of the model that vLLM sets up."""
    layers = {"a": Layer(ATTENTION), "b": Layer(ATTENTION)}
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        scheduler_config=SimpleNamespace(enable_chunked_prefill=True),
        speculative_config=None,
        kv_transfer_config=SimpleNamespace(kv_connector="OffloadingConnector", kv_role="kv_both"),
        model_config=SimpleNamespace(model="model", revision=None, dtype="float32", quantization=None, hf_overrides={}),
        parallel_config=parallel,
        shutdown_timeout=30,
    )
    for module in ("states", "spec.spec"):
        monkeypatch.setattr(f"tierkv.integrations.vllm.{module}.get_current_vllm_config", lambda: config)
    return layers


@pytest.fixture
def stack(tmp_path: Path) -> dict[str, Any]:
    """Host memory and a disk."""
    tiers = [{"backend": "disk", "path": str(tmp_path / "disk"), "capacity": "8MiB", "min_free_bytes": 0}]
    return {"host": {"capacity": "256KiB"}, "tiers": tiers}


class Sides:
    """Scheduler's and worker's side of one engine, each with a spec of its own."""

    def __init__(self, stack: dict[str, Any], **config_options: Any) -> None:
        self.tensors = [torch.randint(-128, 127, (BLOCKS, PAGE), dtype=torch.int8) for _ in range(2)]
        caches = CanonicalKVCaches(
            [CanonicalKVCacheTensor(tensor, PAGE) for tensor in self.tensors],
            [[CanonicalKVCacheRef(0, PAGE), CanonicalKVCacheRef(1, PAGE)]],
        )
        config = config_of(stack, engine_id=str(uuid.uuid4()), **config_options)
        self.worker: TierKVWorker = OffloadingSpecFactory.create_spec(config).get_worker(caches)
        self.manager: ContainedManager = OffloadingSpecFactory.create_spec(config).get_manager()
        self.jobs = 0
        self.named: dict[str, SimpleNamespace] = {}

    def context(
        self, name: str, keys: list[Any], *, is_named: bool = True, media: Sequence[Any] = (), **options: Any
    ) -> ReqContext:
        """A request that has arrived; vLLM's connector names it first."""
        if is_named:
            facts = {"request_id": name, "resumable": False, "lora_request": None, "mm_features": media}
            self.named[name] = SimpleNamespace(**facts, num_preemptions=0, num_computed_tokens=0)
            self.manager.inner.named.receive(self.named[name])
        context = ReqContext(name, **options)
        for number, key in enumerate(keys):
            context.set_offload_key_position(key, (number + 1) * TOKENS)
        self.manager.on_new_request(context)
        return context

    def run(self, spec: Any, blocks: list[int], *, is_store: bool) -> None:
        """One job, after pickling."""
        self.jobs += 1
        ours = pickle.loads(pickle.dumps(spec))
        theirs = GPULoadStoreSpec(blocks, group_sizes=[len(blocks)], block_indices=[0])
        if is_store:
            assert self.worker.submit_store(self.jobs, theirs, ours)
        else:
            assert self.worker.submit_load(self.jobs, ours, theirs)
        self.worker.wait({self.jobs})
        (result,) = self.worker.get_finished()
        assert (result.job_id, result.success, result.transfer_size) == (self.jobs, True, 2 * PAGE * len(blocks))

    def store(self, keys: list[Any], blocks: list[int]) -> None:
        """Store chunks."""
        context = self.context("writer", keys)
        output = self.manager.prepare_store(keys, context)
        assert output is not None
        assert output.keys_to_store == keys
        self.run(output.store_spec, blocks, is_store=True)
        self.manager.complete_store(set(keys), context)
        self.manager.on_request_finished(context)

    def ask(self, context: ReqContext, keys: list[Any]) -> list[LookupResult]:
        """One step's questions."""
        answers = [self.manager.lookup(key, context) for key in keys]
        self.manager.on_schedule_end(NO_STEP)
        return answers

    def close(self) -> None:
        """As vLLM does it."""
        self.worker.shutdown()
        self.manager.shutdown()


@pytest.fixture
def sides(stack: dict[str, Any]) -> Iterator[Sides]:
    """An engine's two sides."""
    sides = Sides(stack)
    yield sides
    sides.close()


def keys(count: int) -> list[Any]:
    """Chunks of a prompt."""
    return [make_offload_key(f"{number}".encode().rjust(32), 0) for number in range(count)]


def test_a_chunk_goes_through_vllms_own_calls(sides: Sides) -> None:
    """Stored, found, loaded: by the names, types and orders of vLLM's scheduler and worker."""
    sides.store(keys(3), [1, 2, 3])
    context = sides.context("reader", keys(3))
    assert sides.ask(context, keys(3)) == [LookupResult.HIT] * 3
    spec = sides.manager.prepare_load(keys(3), context)
    sides.run(spec, [9, 8, 7], is_store=False)
    sides.manager.complete_load(set(keys(3)), context)
    for tensor in sides.tensors:
        assert (tensor[[9, 8, 7]] == tensor[[1, 2, 3]]).all()
    assert {sides.manager.get_load_source(key, context) for key in keys(3)} == {CacheHitSource.HOST}
    assert not sides.manager.has_pending_work()


def test_vllm_hears_where_hits_came_from(sides: Sides) -> None:
    """A chunk that was read from a disk of this machine is DISK to vLLM's own metrics."""
    sides.store(keys(2), [1, 2])
    assert sides.manager.stack.flush()
    sides.manager.reset_cache()
    context = sides.context("reader", keys(2))
    answers = sides.ask(context, keys(2))
    assert answers == [LookupResult.HIT_PENDING] * 2
    while answers != [LookupResult.HIT] * 2:
        answers = sides.ask(context, keys(2))
        # Behind a chunk that is waited for, vLLM needs no answer: see the next test.
        assert answers[0] is not LookupResult.MISS
    spec = sides.manager.prepare_load(keys(2), context)
    assert {sides.manager.get_load_source(key, context) for key in keys(2)} == {CacheHitSource.DISK}
    sides.run(spec, [5, 6], is_store=False)
    sides.manager.complete_load(set(keys(2)), context)


def test_vllm_waits_for_a_prefix_as_a_whole() -> None:
    """The stack opens with ``waits_whole``: PENDING, then MISS must defer the request, and end the questions."""
    asked: list[Any] = []

    def answer(key: Any, _context: object) -> LookupResult:
        asked.append(key)
        return LookupResult.HIT_PENDING if len(asked) == 1 else LookupResult.MISS

    tracker = SimpleNamespace(record_lookup=lambda *_: None)  # 0.33 tells it of waiting chunks, too
    scheduler = SimpleNamespace(manager=SimpleNamespace(lookup=answer), _events_tracker=tracker)
    found = OffloadingConnectorScheduler._maximal_prefix_lookup(scheduler, keys(5), None, None, None, 0)
    assert found is None
    assert asked == keys(2)


@pytest.mark.parametrize(
    ("matcher", "answer"),
    [
        (TierMatcher(medium=Medium.CPU), LookupResult.HIT),
        (TierMatcher(medium=Medium.STORAGE), LookupResult.MISS),
        (TierMatcher(locality=Locality.LOCAL), LookupResult.HIT),
        (TierMatcher(locality=Locality.REMOTE), LookupResult.MISS),
    ],
)
def test_vllms_filter_of_tiers_is_kept(tmp_path: Path, matcher: TierMatcher, answer: LookupResult) -> None:
    """``kv_load_tiers`` of a request: the chunk is in host memory only, and is there only for who may load from it."""
    disk = {"backend": "disk", "path": str(tmp_path), "capacity": "8MiB", "min_free_bytes": 0, "write": "read_only"}
    sides = Sides({"host": {"capacity": "256KiB"}, "tiers": [disk]})
    try:
        sides.store(keys(1), [1])
        context = sides.context("reader", keys(1), load_tier_filter=TierFilter((matcher,)))
        assert sides.ask(context, keys(1)) == [answer]
    finally:
        sides.close()


def test_no_room_is_told_as_vllm_wants_it(sides: Sides) -> None:
    """None: try again later. An empty list: nothing to copy."""
    sides.store(keys(1), [1])
    context = sides.context("writer", keys(80))
    again = sides.manager.prepare_store(keys(1), context)
    assert again is not None
    assert again.keys_to_store == []
    while sides.manager.prepare_store([make_offload_key(bytes(31) + bytes([sides.jobs]), 0)], context) is not None:
        sides.jobs += 1
        assert sides.jobs < 100


def test_every_method_of_vllms_interfaces_is_answered() -> None:
    """Every method that this vLLM calls is overridden, or has a default that is right for tierkv."""
    defaults = {"lock", "on_reset_flushed", "config_info"}  # of 0.33; the first needs nothing, the others are there
    module = importlib.import_module("tierkv.integrations.vllm.spec.spec")
    for theirs, ours in ((OffloadingManager, ContainedManager), (OffloadingWorker, module.TierKVWorker)):
        for name, method in vars(theirs).items():
            if name.startswith("_") or name in defaults:
                continue
            mine = getattr(ours, name)
            assert mine is not method, f"{ours.__name__}.{name} is not served"
            assert list(inspect.signature(mine).parameters)[: len(inspect.signature(method).parameters)] == list(
                inspect.signature(method).parameters
            )
    assert not inspect.isabstract(ContainedManager)


def test_what_033_adds_is_served_by_the_same_objects(sides: Sides) -> None:
    """An expedited load, a lock, the end of a reset's flush, and facts for its info metric."""
    sides.store(keys(1), [1])
    context = sides.context("reader", keys(1))
    sides.ask(context, keys(1))
    spec = sides.manager.prepare_load(keys(1), context)
    target = GPULoadStoreSpec([4], group_sizes=[1], block_indices=[0])
    assert sides.worker.submit_load(7, spec, target, expedited=True)
    sides.manager.reset_cache()
    assert sides.manager.has_pending_work()
    sides.manager.on_reset_flushed()
    assert not sides.manager.has_pending_work()
    sides.worker.wait({7})
    (labels,) = sides.manager.config_info()
    assert set(labels) == set(TierKVSpec.config_info_keys({}))
    assert labels["tierkv_tiers"] == "host,disk"
    if hasattr(base, "ConfigInfo"):  # 0.33 itself
        with sides.manager.lock:
            assert sides.manager.stack.tiers.names == ("disk",)


def test_what_workers_keep_makes_the_engine(stack: dict[str, Any], layers: dict[str, Layer]) -> None:
    """Another number format of a state is another namespace, though vLLM tells the scheduler nothing of it."""
    seen = []
    for dtype in (None, torch.float32, torch.bfloat16):
        kept = ATTENTION if dtype is None else replace(STATE, dtypes=(torch.float32, dtype))
        layers.update(a=Layer(kept), b=Layer(kept))
        sides = Sides(stack)
        seen.append((sides.manager.stack.geometry.groups[0].kind, sides.manager.stack.worker_setup(0).namespace))
        sides.close()
    assert [kind for kind, _ in seen] == [GroupKind.FULL_ATTENTION, GroupKind.SSM, GroupKind.SSM]
    assert len({namespace for _, namespace in seen}) == len(seen)


def test_codecs_that_round_are_refused_for_states(stack: dict[str, Any], layers: dict[str, Layer]) -> None:
    """Values of another format than the attention's, taken for such, would come back as anything."""
    layers.update(a=Layer(STATE), b=Layer(STATE))
    stack["tiers"][0].update(codec="int8", lossy=True)
    with pytest.raises(ConfigError, match="states of SSM layers"):
        Sides(stack)


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (replace(STATE, mamba_cache_mode="none"), "mamba_cache_mode = 'none': layer a keeps a state"),
        (replace(STATE, num_speculative_blocks=2), "speculative_config: layer a keeps a state"),
    ],
)
def test_states_that_cannot_be_served_are_refused(
    stack: dict[str, Any], layers: dict[str, Layer], state: MambaSpec, says: str
) -> None:
    """By the worker, who alone can see them; vLLM does not start then."""
    layers["a"] = Layer(state)
    with pytest.raises(ConfigError, match=says):
        Sides(stack)


@pytest.mark.parametrize(
    ("attention", "says"),
    [
        (RSWASpec(TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32, rswa_window=8), "RSWASpec"),
        (CrossAttentionSpec(TOKENS, num_kv_heads=1, head_size=1, dtype=torch.float32), "'cross_attention'"),
        (replace(ATTENTION, non_causal=True), "tokens behind them"),
    ],
)
def test_a_layer_of_a_kind_that_cannot_be_served_is_refused(
    stack: dict[str, Any], layers: dict[str, Layer], attention: KVCacheSpec, says: str
) -> None:
    """Also one that vLLM's scheduler would take for full attention, because it is derived from it."""
    layers["b"] = Layer(attention)
    with pytest.raises(ConfigError, match=f"layer b.*{says}.*removing kv_transfer_config"):
        Sides(stack)


def test_a_draft_that_no_test_shows_to_be_right_is_refused(
    stack: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the check that the connector has, in the worker: the scheduler has no configuration of speculation."""
    speculative = SimpleNamespace(
        method="dflash", uses_draft_kv_cache=lambda: True, parallel_drafting=False,
        draft_model_config=SimpleNamespace(model="draft", revision=None),
    )  # fmt: skip
    monkeypatch.setattr(spec.get_current_vllm_config(), "speculative_config", speculative)
    with pytest.raises(ConfigError, match=r"speculative_config.method = 'dflash': .* 'eagle3', 'mtp' or 'ngram'"):
        Sides(stack)
    speculative.method = "eagle3"
    Sides(stack).close()


@pytest.mark.parametrize(
    ("part", "name", "value"),
    [
        ("model", "revision", "v2"),
        ("model", "quantization", "fp8"),
        ("model", "hf_overrides", {"rope_theta": 1}),
        ("model", "hf_config_path", "weights"),
        ("model", "model", "weights"),
        ("load", "load_format", "dummy"),
        ("cache", "kv_cache_dtype_skip_layers", ["0"]),
        ("attention", "backend", SimpleNamespace(name="TRITON_ATTN")),
        ("attention", "backend_per_kind", {"sliding_window": SimpleNamespace(name="TRITON_ATTN")}),
    ],
)
def test_other_weights_under_the_same_name_are_another_namespace(
    stack: dict[str, Any], part: str, name: str, value: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Only workers can see this: the scheduler's side gets the name of the model alone."""
    monkeypatch.chdir(tmp_path)
    Path("weights").mkdir()
    Path("weights/model.safetensors").write_bytes(b"weights")

    def namespace() -> object:
        sides = Sides(stack)
        found = sides.manager.inner.stack.worker_setup(0).namespace
        sides.close()
        return found

    before = namespace()
    assert namespace() == before
    config = spec.get_current_vllm_config()
    changed = SimpleNamespace(**{**vars(getattr(config, f"{part}_config", SimpleNamespace())), name: value})
    monkeypatch.setattr(config, f"{part}_config", changed, raising=False)
    assert namespace() != before


def test_experts_of_each_token_in_an_answer_are_refused(stack: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM keeps them of tokens that it has computed: its worker would raise behind a loaded prefix."""
    outputs = AuxOutputConfig(enable_return_routed_experts=True)
    monkeypatch.setattr(spec.get_current_vllm_config(), "aux_output_config", outputs, raising=False)
    with pytest.raises(ConfigError, match=r"enable_return_routed_experts = True: .* removing kv_transfer_config"):
        Sides(stack)


def test_pruned_videos_with_positions_of_their_own_are_refused(
    stack: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM corrects positions where its encoder runs: behind a loaded video the tokens were other ones."""
    media = SimpleNamespace(video_pruning_rate=0.5)
    config = spec.get_current_vllm_config()
    model = SimpleNamespace(**{**vars(config.model_config), "uses_mrope": True, "multimodal_config": media})
    monkeypatch.setattr(config, "model_config", model)
    with pytest.raises(ConfigError, match=r"video_pruning_rate = 0.5: .* removing kv_transfer_config"):
        Sides(stack)


def test_an_engine_on_several_machines_is_refused(stack: dict[str, Any], parallel: SimpleNamespace) -> None:
    """Its workers elsewhere could not reach the host tier, and the first load would end the engine."""
    parallel.nnodes = parallel.nnodes_within_dp = 2
    with pytest.raises(ConfigError, match=r"nnodes = 2: .* share a tier instead"):
        Sides(stack)


def test_states_inside_blocks_are_refused(stack: dict[str, Any], layers: dict[str, Layer]) -> None:
    """VLLM then asks for chunks that end there; not shown to be right, so not served. Attention alone keeps none."""
    layers.update(a=Layer(STATE), b=Layer(STATE))
    with pytest.raises(ConfigError, match="prefix_match_unit = 8 with blocks of 32 tokens"):
        Sides(stack, tokens_per_hash=8)


def test_no_note_is_no_engine(stack: dict[str, Any]) -> None:
    """Without the worker's note, it is unknown whether a page may be rounded, and which engines can use it."""
    with pytest.raises(ConfigError, match="use TierKVConnector"):
        OffloadingSpecFactory.create_spec(config_of(stack)).get_manager()


def test_the_stacks_chunk_counts_and_contradictions_are_named(stack: dict[str, Any]) -> None:
    """VLLM's scheduler reads the attribute of the spec."""
    spec = OffloadingSpecFactory.create_spec(
        config_of({**stack, "chunk": {"blocks": 4}, "store": {"prompt_only": True}})
    )
    assert isinstance(spec, OffloadingSpec)
    assert spec.blocks_per_chunk == spec.config.cache.blocks_per_chunk == 4
    assert spec.offload_prompt_only is True
    with pytest.raises(ConfigError, match="blocks_per_chunk = 1 is 1 blocks per chunk"):
        OffloadingSpecFactory.create_spec(config_of({**stack, "chunk": {"blocks": 4}}, blocks_per_chunk=1))
    with pytest.raises(ConfigError, match="cpu_bytes_to_use"):
        OffloadingSpecFactory.create_spec(config_of(stack, cpu_bytes_to_use=1))


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(make_offload_key(b"", 0), id="empty hash"),
        pytest.param(make_offload_key(b"hash".rjust(32), 5), id="unknown group"),
    ],
)
def test_a_chunk_that_is_refused_drops_its_request(sides: Sides, bad: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The request goes on without tierkv, which is logged once per kind, and others are served."""
    sides.store(keys(2), [1, 2])
    asking = sides.context("asking", [*keys(2), bad])
    assert sides.ask(asking, [bad, *keys(2)]) == [LookupResult.MISS] * 3
    storing = sides.context("storing", [bad])
    for offered in ([*keys(1), bad], keys(3)):
        output = sides.manager.prepare_store(offered, storing)
        assert output is not None
        assert not output.keys_to_store
    assert sides.manager.stack.metrics.counters.requests_dropped == 2
    assert len([one for one in caplog.records if one.levelname == "ERROR"]) == 1
    for context in (asking, storing):
        sides.manager.on_request_finished(context)
    reader = sides.context("asking", keys(2))
    assert sides.ask(reader, keys(2)) == [LookupResult.HIT] * 2
    assert not sides.manager.has_pending_work()


def test_a_request_that_no_connector_has_named_is_served_without_tierkv(
    sides: Sides, caplog: pytest.LogCaptureFixture
) -> None:
    """Its adapter is unknown, and whether its input is streamed: with another adapter's chunks, its tokens would be
    wrong. vLLM does not name a request that it ends before its beginning, and that is no reason for a line."""
    sides.store(keys(2), [1, 2])
    counters = sides.manager.stack.metrics.counters
    sides.manager.on_request_finished(sides.context("ended", keys(2), is_named=False))
    assert (counters.requests_dropped, caplog.records) == (0, [])
    asking = sides.context("asking", keys(2), is_named=False)
    assert sides.ask(asking, keys(2)) == [LookupResult.MISS] * 2
    storing = sides.context("storing", keys(3), is_named=False)
    output = sides.manager.prepare_store(keys(3), storing)
    assert output is not None
    assert not output.keys_to_store
    assert counters.requests_dropped == 2
    (line,) = [one.message for one in caplog.records if one.levelname == "ERROR"]
    assert "named by no connector" in line
    reader = sides.context("reader", keys(2))
    assert sides.ask(reader, keys(2)) == [LookupResult.HIT] * 2


def test_a_video_whose_sound_is_among_its_frames_is_served_without_tierkv(sides: Sides) -> None:
    """The keys of its chunks are those of the same frames with another sound."""
    place = SimpleNamespace(mm_position=SimpleNamespace(offset=1, length=2 * TOKENS))
    sides.store(keys(2), [1, 2])
    assert sides.ask(sides.context("frames", keys(2), media=[place]), keys(2)) == [LookupResult.HIT] * 2
    both = sides.context("frames and sound", keys(3), media=[place, place])
    assert sides.ask(both, keys(2)) == [LookupResult.MISS] * 2
    output = sides.manager.prepare_store(keys(3), both)
    assert output is not None
    assert not output.keys_to_store


def test_a_preempted_request_waits_until_vllm_has_told_the_preemption(sides: Sides) -> None:
    """A reset preempts it, and vLLM looks it up again in the same step, in which it must load nothing."""
    sides.store(keys(2), [1, 2])
    context = sides.context("running", keys(2))
    for preempted in (["running"], (), ["running"]):  # should vLLM not tell it, the request waits no longer
        sides.named["running"].num_preemptions += 1
        assert [sides.manager.lookup(key, context) for key in keys(2)] == [LookupResult.RETRY] * 2
        sides.manager.on_schedule_end(ScheduleEndContext((), preempted))
        assert sides.ask(context, keys(2)) == [LookupResult.HIT] * 2
    sides.named["running"].num_preemptions += 1
    sides.manager.on_schedule_end(ScheduleEndContext((), ["running", "unknown"]))  # as without a reset
    assert sides.ask(context, keys(2)) == [LookupResult.HIT] * 2


def fail_in(name: str) -> Any:
    """A method that raises."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(name)

    return fail


@pytest.mark.parametrize("name", ["submit", "get_finished", "wait"])
def test_an_error_of_a_worker_about_stores_is_contained(
    stack: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store succeeds for vLLM, its chunks are misses or whole, and the next ones are stored."""
    monkeypatch.setenv("TIERKV_VALIDATE", "0")
    sides = Sides(stack)
    context = sides.context("writer", keys(2))
    output = sides.manager.prepare_store(keys(2), context)
    assert output is not None

    blocks = GPULoadStoreSpec([1, 2], group_sizes=[2], block_indices=[0])
    with monkeypatch.context() as patch:
        patch.setattr(f"tierkv.integrations.vllm.spec.worker.SpecWorker.{name}", fail_in(name))
        assert sides.worker.submit_store(1, blocks, output.store_spec)
        sides.worker.wait({1})
        results = sides.worker.get_finished()
    results += sides.worker.get_finished()
    assert [(result.job_id, result.success) for result in results] == [(1, True)]
    sides.manager.complete_store(set(keys(2)), context)
    found = sides.ask(sides.context("reader", keys(2)), keys(2))
    assert found == [LookupResult.HIT if name == "wait" else LookupResult.MISS] * 2 or name == "get_finished"
    sides.jobs = 1
    later = [make_offload_key(b"later".rjust(32), 0)]
    sides.store(later, [3])
    assert sides.ask(sides.context("again", later), later) == [LookupResult.HIT]
    sides.close()


def loading(sides: Sides) -> tuple[ReqContext, TierKVTransfer]:
    """A request whose chunks are stored, and its load."""
    sides.store(keys(2), [1, 2])
    reader = sides.context("reader", keys(2))
    assert sides.ask(reader, keys(2)) == [LookupResult.HIT] * 2
    return reader, sides.manager.prepare_load(keys(2), reader)


@pytest.mark.parametrize("name", ["submit", "get_finished"])
def test_a_load_that_fails_is_named_and_its_request_dropped(
    stack: dict[str, Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a connector that asks for failures, the result says it. A second hit on the chunks would fail again, so
    the request has misses from then on; others are served."""
    monkeypatch.setenv("TIERKV_VALIDATE", "0")
    sides = Sides(stack)
    reader, transfer = loading(sides)
    blocks = GPULoadStoreSpec([3, 4], group_sizes=[2], block_indices=[0])
    with monkeypatch.context() as patch:
        patch.setattr(f"tierkv.integrations.vllm.spec.worker.SpecWorker.{name}", fail_in(name))
        assert sides.worker.submit_load(2, transfer, blocks)
        (result,) = sides.worker.get_finished()
    assert (result.job_id, result.success) == (2, False)
    assert sides.worker.take_failed() == {"reader"}
    assert sides.worker.take_failed() == set()
    sides.manager.complete_load(set(keys(2)), reader)
    assert sides.ask(reader, keys(2)) == [LookupResult.MISS] * 2
    counters = sides.manager.stack.metrics.counters
    assert (counters.requests_dropped, counters.errors_contained) == (1, 1)
    assert sides.ask(sides.context("other", keys(2)), keys(2)) == [LookupResult.HIT] * 2
    sides.close()


def test_a_load_whose_copy_cannot_be_awaited_does_not_end(
    stack: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy that still runs writes to the blocks: vLLM must not give them to another request. It ends when it can."""
    monkeypatch.setenv("TIERKV_VALIDATE", "0")
    sides = Sides(stack)
    _, transfer = loading(sides)
    blocks = GPULoadStoreSpec([3, 4], group_sizes=[2], block_indices=[0])
    assert sides.worker.submit_load(2, transfer, blocks)
    with monkeypatch.context() as patch:
        for name in ("get_finished", "drain", "wait"):
            patch.setattr(f"tierkv.integrations.vllm.spec.worker.SpecWorker.{name}", fail_in(name))
        sides.worker.wait({2})
        assert sides.worker.get_finished() == []
        assert sides.worker.take_failed() == set()
    (result,) = sides.worker.get_finished()
    assert (result.job_id, result.success) == (2, False)
    sides.close()


@pytest.mark.parametrize("error", [EngineProtocolError("no hit"), RuntimeError("broken")], ids=["refused", "broken"])
def test_a_load_that_cannot_be_prepared_is_a_lost_one(
    stack: dict[str, Any], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """VLLM hands it to the workers like any other, and they report it as failed without a copy."""
    monkeypatch.setenv("TIERKV_VALIDATE", "0")
    sides = Sides(stack)
    reader, _ = loading(sides)

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(sides.manager.stack, "prepare_load", fail)
    lost = pickle.loads(pickle.dumps(sides.manager.prepare_load(keys(2), reader)))
    assert sides.worker.submit_load(2, lost, GPULoadStoreSpec([3, 4], group_sizes=[2], block_indices=[0]))
    (result,) = sides.worker.get_finished()
    assert (result.success, result.transfer_size, sides.worker.take_failed()) == (False, None, {"reader"})
    sides.manager.complete_load(set(keys(2)), reader)
    other = sides.ask(sides.context("other", keys(2)), keys(2))
    assert other == [LookupResult.HIT if isinstance(error, EngineProtocolError) else LookupResult.MISS] * 2
    sides.close()


class AskedConnector(KVConnectorBase_V1):  # type: ignore[misc]  # vLLM has no types here
    """A connector that creates a worker, as vLLM's does."""

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = fail_in("unused")
    get_num_new_matched_tokens = update_state_after_alloc = build_connector_meta = fail_in("unused")

    def __init__(self) -> None:
        self.finished: set[str] = set()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Loads that ended."""
        return set(), set(self.finished)

    def create(self, take_failed: Any) -> bool:
        """Create the worker."""
        return report_failed_loads(take_failed)


def test_the_connector_that_creates_a_worker_reports_its_failed_loads(caplog: pytest.LogCaptureFixture) -> None:
    """VLLM asks each connector for them, and its own offloading connector names none. A burst is one line."""
    failed = [{"a"}, set[str](), {"b"}]
    connector, other = AskedConnector(), AskedConnector()
    assert not report_failed_loads(set[str])
    assert connector.create(lambda: failed.pop(0))
    connector.finished = other.finished = {"a", "b"}
    results = [connector.get_transfer_results(set()) for _ in range(2)]
    assert [(one.finished_recving, one.failed_recving) for one in results] == [({"a", "b"}, {"a"}), ({"a", "b"}, set())]
    assert other.get_transfer_results(set()).failed_recving == set()
    assert connector.get_transfer_results(set()).failed_recving == {"b"}
    assert caplog.text.count("loads_failed") == 1
