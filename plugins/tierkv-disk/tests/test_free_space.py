"""Free space compared with a model: a set of pages."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierkv_disk import CAPABILITIES
from tierkv_disk.extents import PageAddress, Run, address_at
from tierkv_disk.space.free_space import FreeSpace, Pins


def pages_of(runs: tuple[Run, ...]) -> set[int]:
    """Numbers of all pages in the runs."""
    return {run.address + number for run in runs for number in range(run.pages)}


class FreeSpaceMachine(RuleBasedStateMachine):
    """In any order of takes and frees, no page has two owners, none is lost, and free runs are as long as possible."""

    def __init__(self) -> None:
        super().__init__()
        self.space = FreeSpace()
        self.segments = 0
        self.free: set[int] = set()
        self.owned: list[tuple[Run, ...]] = []

    def longest(self) -> int:
        """Length of the longest free run of the model."""
        best = length = 0
        previous = -2
        for page in sorted(self.free):
            length = length + 1 if page == previous + 1 else 1
            best, previous = max(best, length), page
        return best

    @rule(pages=st.integers(1, 12))
    def add_segment(self, pages: int) -> None:
        run = Run(address_at(self.segments, 0), pages)
        self.space.add_run(run)
        self.free |= pages_of((run,))
        self.segments += 1

    @rule(pages=st.integers(1, 6))
    def take(self, pages: int) -> None:
        run = self.space.take_run(pages)
        assert (run is not None) == (self.longest() >= pages), "a long enough run was missed or invented"
        if run is not None:
            assert run.pages == pages
            self.own((run,))

    @rule(lengths=st.lists(st.integers(1, 5), max_size=6))
    def take_row(self, lengths: list[int]) -> None:
        longest = self.longest()
        row = self.space.take_row(lengths)
        assert [run.pages for run in row] == lengths[: len(row)]
        self.own(tuple(row))
        assert len(row) == len(lengths) or self.longest() < lengths[len(row)], "a long enough run was missed"
        adjacent = all(run.address + run.pages == after.address for run, after in pairwise(row))
        assert adjacent or sum(lengths) > longest, "the row is torn although one run would do"

    @rule(pages=st.integers(1, 9))
    def gather(self, pages: int) -> None:
        runs = self.space.gather_runs(pages)
        assert (runs is not None) == (len(self.free) >= pages)
        if runs is not None:
            assert sum(run.pages for run in runs) == pages
            assert (len(runs) == 1) == (self.longest() >= pages), "the frame is split although one run would do"
            self.own(runs)

    def own(self, runs: tuple[Run, ...]) -> None:
        """Record taken pages: they must have been free, and each taken once."""
        pages = pages_of(runs)
        assert len(pages) == sum(run.pages for run in runs)
        assert pages <= self.free
        self.free -= pages
        self.owned.append(runs)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        runs = data.draw(st.sampled_from(self.owned))
        self.owned.remove(runs)
        for run in runs:
            self.space.add_run(run)
        self.free |= pages_of(runs)

    @invariant()
    def counts_agree(self) -> None:
        assert self.space.pages == len(self.free)


TestFreeSpace = FreeSpaceMachine.TestCase


def test_best_fit() -> None:
    """The shortest sufficient run is taken: long runs are kept for long frames."""
    space = FreeSpace()
    for segment, pages in enumerate((9, 4, 6)):
        space.add_run(Run(address_at(segment, 0), pages))
    assert space.take_run(4) == Run(address_at(1, 0), 4)
    assert space.take_run(4) == Run(address_at(2, 0), 4)
    assert space.take_run(9) == Run(address_at(0, 0), 9)
    assert space.take_run(3) is None


def test_frames_of_one_length_never_fragment() -> None:
    """Without a codec, after any history, each frame is in one run."""
    space, rng = FreeSpace(), random.Random(1)
    for segment in range(4):
        space.add_run(Run(address_at(segment, 0), 130))
    held = [run for _ in range(40) if (run := space.take_run(13))]
    assert len(held) == 40
    for _ in range(2000):
        space.add_run(held.pop(rng.randrange(len(held))))
        held.append(space.take_run(13) or pytest.fail("the free pages are no run any more"))


@pytest.mark.parametrize(("low", "high", "parts_mean_max"), [(0.68, 0.71, 2.0), (0.4, 1.0, 4.0)])
def test_frames_of_many_lengths_fragment_little(low: float, high: float, parts_mean_max: float) -> None:
    """A full tier behind a codec, with random evictions and room for eight frames: all pages are used, in few runs."""
    space, rng = FreeSpace(), random.Random(2)
    space.add_run(Run(address_at(0, 0), 513 * 200))
    held: list[tuple[Run, ...]] = []
    parts = []
    for _ in range(4000):
        pages = int(513 * rng.uniform(low, high))
        while space.pages < 8 * 513:
            for run in held.pop(rng.randrange(len(held))):
                space.add_run(run)
        runs = space.gather_runs(pages)
        assert runs is not None
        held.append(runs)
        parts.append(len(runs))
    assert sum(parts[-1000:]) / 1000 < parts_mean_max


@pytest.mark.parametrize("spare", [0.0, CAPABILITIES.spare_share])
def test_the_spare_share_keeps_frames_adjacent(spare: float) -> None:
    """A full tier that drops old prompts for new ones: in room for a batch alone, each prompt would fill the gaps that
    others left, frame by frame, and every read would take a call per frame."""
    pages, frame_pages = 1 << 14, 17
    space, rng = FreeSpace(), random.Random(3)
    space.add_run(Run(address_at(0, 0), pages))
    prompts: list[list[Run]] = []
    rows = frames = 0
    for turn in range(1200):
        lengths = [frame_pages] * rng.randint(8, 32)
        while space.pages < sum(lengths) + spare * pages:
            victim = rng.choice(prompts[:8])  # about the oldest ones, tail first
            for run in victim[-16:]:
                space.add_run(run)
            del victim[-16:]
            if not victim:
                prompts.remove(victim)
        prompts.append(space.take_row(lengths))
        if turn >= 600:
            runs = prompts[-1]
            breaks = sum(run.address + run.pages != after.address for run, after in pairwise(runs))
            rows, frames = rows + breaks + 1, frames + len(runs)
    assert frames / rows > 8 if spare else frames / rows < 4


def test_pins() -> None:
    """Pages freed during a read become free with the last reader, as a whole."""
    pins = Pins()
    runs = (Run(PageAddress(5), 2), Run(PageAddress(90), 1))
    assert pins.free(runs) == runs
    pins.pin(PageAddress(5))
    pins.pin(PageAddress(5))
    assert pins.free(runs) == ()
    assert pins.unpin(PageAddress(5)) == ()
    assert pins.unpin(PageAddress(5)) == runs
    assert len(pins) == 0
