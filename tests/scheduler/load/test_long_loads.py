"""Loads of more chunks than one call may hold or send: held in several steps, and sent in several jobs."""

from __future__ import annotations

import pytest
from calls import CountedKey, lookups_of
from core_blocks import BedBlock, blocks
from core_parts import Core, disk, make_core
from core_truth import BedRequest
from stream_parts import ALL, arrive, computed, finish, stream_bed, until

from tierkv.errors import EngineProtocolError
from tierkv.manager.step_budget import KEYS_PER_LOOK
from tierkv.types.engine import LoadReport, StepOutput
from tierkv.types.keys import Key, make_key
from tierkv.types.transfers import VOID_SLOT, TransferJob

STEP_KEYS = 8
JOB_MAX = KEYS_PER_LOOK * STEP_KEYS
"""Largest number of chunks of a job at that budget."""


def offered(chunks: int) -> tuple[Core, BedRequest, list[Key]]:
    """Core whose host tier has all chunks of a prompt, which were offered."""
    core = make_core(slots=2 * chunks, step_keys=STEP_KEYS)
    request = core.arrive(4 * chunks + 1)
    keys = core.truth.keys(request)
    for first in range(0, chunks, 64):
        core.put(keys[first : first + 64])
    for _ in range(chunks):
        core.begin()
        if core.ask(request) is not None:
            break
    assert core.ask(request) == 4 * chunks
    return core, request, keys


def jobs_of_step(core: Core) -> tuple[TransferJob, ...]:
    """Load jobs that a step hands to the workers."""
    core.begin()
    return core.scheduler.build_connector_meta(StepOutput()).loads


def held(core: Core) -> set[Key]:
    """Chunks that are held for the request."""
    return set(core.manager.passages.granted("a"))


@pytest.mark.parametrize("chunks", [JOB_MAX + 1, 10 * JOB_MAX])
def test_no_call_holds_more_chunks_than_its_bound(chunks: int) -> None:
    """To hold 100,000 chunks took 28 ms of the engine's thread, in one call. Later steps go on by themselves."""
    core, *_ = offered(chunks)
    core.scheduler.drop_request("a")
    while not core.manager.passages.is_idle:
        core.begin()
    keys = tuple(Key(CountedKey(key)) for key in core.ready())
    passages, looked = core.manager.passages, [0]
    while (passage := passages.get("b")) is None or not passage.ready:
        looked += [lookups_of(core.begin), lookups_of(passages.reserve, "b", keys)]
        core.manager.validate()
    assert chunks <= sum(looked) <= 2 * chunks
    assert max(looked) <= 2 * JOB_MAX
    assert list(passages.granted("b")) == list(keys)


def test_gaps_and_chunks_that_were_held_before_keep_their_places() -> None:
    """Another wish of the same length of what is held: a front with gaps, and a tail from before."""
    core = make_core(slots=400, step_keys=1, tiers=[disk(write="read_only")])
    keys = tuple(make_key(b"chunk %d" % i, 0) for i in range(100))
    core.keep_below(keys[2:5])
    core.put([*keys[:2], *keys[5:]])
    passages = core.manager.passages
    core.begin()
    while not passages.reserve("a", keys[97:]).ready:
        core.begin()
    while not passages.reserve("a", keys).ready:
        core.manager.validate()
        core.finish_all()
        core.begin()
    core.manager.validate()
    assert list(passages.granted("a")) == list(keys)


def test_a_long_load_is_sent_in_jobs_and_stays_held() -> None:
    """Promise 4: what was offered is loaded. Others may fill the host tier meanwhile."""
    core, request, keys = offered(200)
    core.scheduler.update_state_after_alloc(request, [blocks(range(1, 202))], 800)
    sent: list[TransferJob] = []
    report = LoadReport()
    while not sent or not sent[-1].ends_load:
        jobs = jobs_of_step(core)
        sent += jobs
        core.put([Key(b"other %d %d    " % (len(sent), i)) for i in range(150)])
        core.manager.validate()
        assert held(core) == set(keys[sum(len(job.keys) for job in sent) :])
        report = core.report(*[job.job_id for job in jobs])
    assert [len(job.keys) for job in sent] == [JOB_MAX // 2] * 5 + [200 - 5 * JOB_MAX // 2]
    assert [key for job in sent for key in job.keys] == keys
    assert [block for job in sent for block in job.block_ids] == list(range(1, 201))
    assert (report.finished, report.invalid_block_ids) == ({"a"}, frozenset())
    assert core.counters.tokens_loaded == {"host": 800}


class CountedBlock(BedBlock):
    """Block that counts how often its id is read."""

    reads = 0

    def __getattribute__(self, name: str) -> object:
        """Count reads of the id."""
        CountedBlock.reads += name == "block_id"
        return super().__getattribute__(name)


def test_the_blocks_of_a_long_load_are_read_in_parts() -> None:
    """The call that starts the load of 100,000 chunks took 36 ms."""
    core, request, _ = offered(1000)
    table = [CountedBlock(i) for i in range(1, 1002)]
    reads = []
    CountedBlock.reads = 0
    core.scheduler.update_state_after_alloc(request, [table], 4000)
    while core.scheduler.has_pending_work:
        jobs = jobs_of_step(core)
        core.report(*[job.job_id for job in jobs])
        reads.append(CountedBlock.reads)
        CountedBlock.reads = 0
    assert len(reads) > 1000 // JOB_MAX
    assert max(reads) <= 4 * JOB_MAX
    assert sum(reads) >= 1000


def test_blocks_are_flushed_before_the_job_that_fills_them() -> None:
    """Promise 1: a store of their previous owner may still read them."""
    core, request, keys = offered(200)
    store = TransferJob(99, "b", True, (keys[0],), (), (0,), (5, 150), (2,), (0,))
    core.scheduler._fences.fence_blocks(store, [150])
    core.scheduler.update_state_after_alloc(request, [blocks(range(1, 202))], 800)
    flushed = []
    while core.scheduler.has_pending_work:
        core.begin()
        meta = core.scheduler.build_connector_meta(StepOutput())
        flushed += [[150 in job.block_ids, 99 in meta.jobs_to_flush] for job in meta.loads]
        core.report(*[job.job_id for job in meta.loads])
    assert flushed == [[False, False]] * 4 + [[True, True], [False, False]]


def test_a_null_block_ends_a_long_load() -> None:
    """In the first jobs it is an error at once. Behind that, in the step before the one that would fill it.

    That step names the request and changes nothing. An engine that drops the request then, or ends it, loads no more.
    """
    core, request, _ = offered(200)
    table = blocks([*range(1, 151), 0, *range(152, 202)])
    with pytest.raises(EngineProtocolError, match="null block"):
        core.scheduler.update_state_after_alloc(request, [blocks([1, 0, *range(3, 202)])], 800)
    core.scheduler.update_state_after_alloc(request, [table], 800)
    sent: list[TransferJob] = []

    def load_on() -> None:
        while core.scheduler.has_pending_work:
            jobs = jobs_of_step(core)
            sent.extend(jobs)
            core.report(*[job.job_id for job in jobs])
            core.manager.validate()

    with pytest.raises(EngineProtocolError, match="'a': block 150 of its load is the null block") as error:
        load_on()
    assert error.value.request_id == "a"
    filled = [block for job in sent for block in job.block_ids]
    assert filled == list(range(1, len(filled) + 1))
    assert 150 - JOB_MAX <= len(filled) <= 150
    before = held(core)
    with pytest.raises(EngineProtocolError, match="block 150"):
        jobs_of_step(core)
    assert held(core) == before
    core.scheduler.drop_request("a")
    (job,) = jobs_of_step(core)
    assert job.ends_load
    assert {*job.slots} == {VOID_SLOT}
    report = core.report(job.job_id, failed={job.job_id: frozenset(job.keys)})
    assert (report.finished, report.invalid_block_ids) == ({"a"}, {*range(1, 201)} - {151})
    assert not core.scheduler.has_pending_work
    core.manager.validate()
    core.scheduler.validate()


def test_a_null_block_of_one_load_leaves_another_alone() -> None:
    """Promise 3: the step is built again without the request that was refused."""
    core, request, _ = offered(200)
    other = core.arrive([7] * 401, "b")
    keys = core.truth.keys(other)
    core.put(keys)
    core.scheduler.update_state_after_alloc(request, [blocks([*range(1, 151), 0, *range(152, 202)])], 800)
    core.begin()
    while core.ask(other) is None:
        core.begin()
    core.scheduler.update_state_after_alloc(other, [blocks(range(301, 402))], 400)
    loaded: list[Key] = []
    while core.scheduler.has_pending_work:
        core.begin()
        try:
            meta = core.scheduler.build_connector_meta(StepOutput())
        except EngineProtocolError as error:
            core.scheduler.drop_request(error.request_id or "")
            meta = core.scheduler.build_connector_meta(StepOutput())
        void = {job.job_id: frozenset(job.keys) for job in meta.loads if VOID_SLOT in job.slots}
        loaded += [key for job in meta.loads if job.request_id == "b" for key in job.keys]
        core.report(*[job.job_id for job in meta.loads], failed=void)
    assert loaded == keys
    assert core.counters.requests_dropped == 1


def test_what_the_engine_does_not_take_is_released() -> None:
    """It may load less than it was offered. A chunk that was dropped while it was held is loaded, too."""
    core, request, keys = offered(200)
    core.host.drop([slot for slot in [core.host.slots.find(keys[70])] if slot is not None])
    core.scheduler.update_state_after_alloc(request, [blocks(range(1, 102))], 400)
    assert held(core) == set(keys[:100])
    sent = []
    while core.scheduler.has_pending_work:
        jobs = jobs_of_step(core)
        sent += [key for job in jobs for key in job.keys]
        core.report(*[job.job_id for job in jobs])
        core.manager.validate()
    assert sent == keys[:100]
    while not core.manager.passages.is_idle:
        core.begin()
    assert core.host.room == core.host.num_slots


def test_a_long_hit_from_a_tier_below_reaches_the_engine() -> None:
    """Every byte is looked at; each chunk is read once."""
    bed = stream_bed(100, step_keys=1)
    request = arrive(bed, 60)
    until(bed, lambda: bool(bed.engine.loading))
    jobs: list[TransferJob] = []
    while bed.engine.sequences:
        bed.step(ALL)
        jobs += [job for job in bed.worker.running.values() if not job.is_store]
        bed.run_io()
        bed.run_transfers()
    until(bed, lambda: not len(bed.core.scheduler._lookups._loads))
    finish(bed)
    assert max(len(job.keys) for job in jobs) <= KEYS_PER_LOOK
    assert bed.tiers.reads == dict.fromkeys(bed.core.truth.keys(request), 1)
    assert computed(bed) == 1
