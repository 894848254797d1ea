"""Base of all conformance tests: the author's settings, and the fixtures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, NoReturn, cast

import pytest

from tierkv.abc import BackendContext, BackendPlugin, Capabilities
from tierkv.testing.conformance.session import Session, is_async
from tierkv.testing.engines.hand_engine import Prompt
from tierkv.testing.engines.small_stack import SmallStack
from tierkv.testing.raw import RawAccess
from tierkv.testing.server_control import ServerControl
from tierkv.types.namespace import Namespace

KIB = 1024
MIB = 1024 * KIB


FAILED = pytest.StashKey[bool]()
"""Key of an item: whether its test has failed."""

BY_THE_KIT = "left_out_by_the_kit"
"""Attribute of the exception with which the kit skips one of its tests. Any other skip of one is a failure."""


def declaration_mistakes(declared: Capabilities) -> list[str]:
    """Contradictions in a capability record, each with what to change."""
    found = []
    if declared.authoritative_index and declared.shared:
        found.append(
            "authoritative_index and shared exclude each other: where other processes write, no index of this one is "
            "complete; declare authoritative_index for storage of one process, shared for a server or a bucket"
        )
    if declared.authoritative_index and not declared.scan:
        found.append("authoritative_index needs scan, which fills the index when the tier opens")
    if declared.keeps_ranks and not declared.scan:
        found.append("keeps_ranks needs scan, which returns the ranks")
    if declared.alignment < 1 or declared.alignment.bit_count() != 1:
        found.append(f"alignment = {declared.alignment} is no power of two; 1 means no requirement")
    if declared.preferred_batch < 1 or declared.preferred_concurrency < 1:
        found.append("preferred_batch and preferred_concurrency must be 1 or more")
    return found


class KitBase:
    """Settings of a backend's author; see :class:`~tierkv.testing.conformance.BackendConformance`."""

    plugin: ClassVar[BackendPlugin]
    """The plugin under test."""
    frame_bytes_max: ClassVar[int] = 64 * KIB
    """Length of the longest frame that tests write; a multiple of the declared alignment."""
    capacity_bytes: ClassVar[int | None] = 64 * MIB
    """Capacity that most tests give the backend."""
    full_capacity_bytes: ClassVar[int] = 4 * MIB
    """Capacity in tests that fill a ``bounded`` backend."""
    local_place: ClassVar[bool] = True
    """Whether the backend keeps its data in files at ``place`` (False: ``place`` is only a name, say of a bucket)."""
    many_frames: ClassVar[int] = 1100
    """Number of small frames in the test of many frames; more than one page of any known listing."""
    model_examples: ClassVar[int] = 20
    """Number of random histories in the comparison with a dict."""
    model_steps: ClassVar[int] = 25
    """Steps of each history."""
    raw_access: ClassVar[str] = ""
    """Reason for a missing :meth:`raw`; shown in the table of capabilities."""
    raw_live: ClassVar[bool] = False
    """Whether :meth:`raw` may also be used while the backend is open. A ``shared`` one must allow that."""
    place_bytes_per_capacity: ClassVar[float] = 2.0
    """Bytes on disk that a ``bounded`` backend with files may take, per byte of capacity."""
    not_installed: ClassVar[str] = ""
    """Reason why no distribution has the plugin; otherwise its entry point is tested."""
    crash_rounds: ClassVar[int] = 4
    """Number of times that the writer is killed."""
    crash_seed: ClassVar[int] = 20260611
    """Seed of the killed writers' operations."""

    def make_options(self, place: Path) -> object:
        """Make the plugin's options for data at ``place``; picklable. Equal places mean the same data."""
        raise NotImplementedError(f"{type(self).__name__} must define make_options(self, place)")

    def raw(self, place: Path, context: BackendContext) -> RawAccess:
        """Access to the bytes stored at ``place`` in the namespace of ``context``, past the backend.

        Used while the backend is closed; while it is open only where ``raw_live`` is set. A suite defines this, or says
        in ``raw_access`` why it cannot.
        """
        raise NotImplementedError

    def server_control(self) -> ServerControl:
        """Control of the server behind a remote backend. The kit kills it, freezes it, and lets it return.

        Every call returns the same server. A suite whose server cannot be stopped leaves this out.
        """
        raise NotImplementedError

    # All names below belong to the kit.

    is_conformance_kit: ClassVar[bool] = True

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities that the plugin declares."""
        return self.plugin.capabilities

    def need(self, *flags: str) -> None:
        """Skip unless the backend declares all of these capabilities, and can be written."""
        missing = [flag for flag in flags if not getattr(self.capabilities, flag)]
        if missing:
            self.not_applicable(f"does not declare {', '.join(missing)}")
        if self.capabilities.read_only:
            self.not_applicable("declares read_only")

    def need_local(self) -> None:
        """Skip unless data is stored in files at ``place``."""
        self.need()
        if not self.local_place:
            self.not_applicable("its data are not in files (local_place = False)")

    def need_raw(self, *, live: bool = False) -> None:
        """Skip if the author gives a reason for a missing :meth:`raw`."""
        self.need()
        if self.raw_access:
            self.not_applicable(f"no raw access: {self.raw_access}")
        if live and not self.raw_live:
            self.not_applicable("raw access to a closed place only (raw_live = False)")

    def need_server(self) -> ServerControl:
        """Return the server; skip if the suite has none that can be stopped."""
        self.need()
        if type(self).server_control is KitBase.server_control:
            self.not_applicable("the suite has no server to stop")
        return self.server_control()

    def require_sound_declaration(self) -> None:
        """Fail with plain words if the capabilities contradict each other: every test that opens the backend would."""
        mistakes = declaration_mistakes(self.capabilities)
        assert not mistakes, f"the capabilities of {self.plugin.name!r} are wrong: {'; '.join(mistakes)}"

    def need_async(self, session: Session) -> None:
        """Skip for backends whose verbs block."""
        if not is_async(session.backend):
            self.not_applicable("its verbs block")

    @staticmethod
    def not_applicable(reason: str) -> NoReturn:
        """Skip this test. For the kit's own tests only."""
        try:
            pytest.skip(reason)
        except BaseException as skipped:
            vars(skipped)[BY_THE_KIT] = True
            raise

    def context(
        self, model: str = "conformance", capacity_bytes: int | None = None, **namespace_fields: object
    ) -> BackendContext:
        """Context of an open, as the framework makes it. Fields of the namespace may differ, ``model`` for example."""
        namespace = Namespace(
            model=model,
            revision="r1",
            dtype="bfloat16",
            layout="page",
            groups=((16, (4096,), "full_attention", None),),
            blocks_per_chunk=4,
            hash_block_tokens=16,
        )
        namespace = replace(namespace, **cast("dict[str, Any]", namespace_fields))
        capacity = self.capacity_bytes if capacity_bytes is None else capacity_bytes
        return BackendContext("conformance", namespace, self.frame_bytes_max, capacity)

    def open(self, place: Path, *, model: str = "conformance", capacity_bytes: int | None = None) -> Session:
        """Open the backend at ``place``."""
        return self.open_with(place, self.context(model, capacity_bytes))

    def open_with(self, place: Path, context: BackendContext) -> Session:
        """Open the backend at ``place`` with a given context."""
        self.require_sound_declaration()
        return Session(self.plugin, context, self.make_options(place))

    @property
    def sizes(self) -> list[int]:
        """Frame lengths to test, up to the longest: multiples of a declared alignment, otherwise odd lengths too."""
        step = self.capabilities.alignment
        steps = [count * step for count in (1, 2, 3, 7) if count * step <= self.frame_bytes_max]
        odd = [1, 63, 4095, 4097, self.frame_bytes_max - 1] if step == 1 else []
        return sorted({size for size in [*steps, *odd, 4096, 12288, self.frame_bytes_max] if size % step == 0})

    @property
    def small(self) -> int:
        """Smallest of those lengths at which frames differ."""
        return min(size for size in self.sizes if size >= 63)

    @pytest.fixture
    def place(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
        """Path without data.

        Its data is removed after a test that passed: backends that allocate their space in advance would fill the disk.
        """
        yield tmp_path / "place"
        if not request.node.stash.get(FAILED, False):
            shutil.rmtree(tmp_path, ignore_errors=True)

    @pytest.fixture
    def session(self, place: Path) -> Iterator[Session]:
        """Backend, opened empty; skips if it cannot be written."""
        self.need()
        with self.open(place) as session:
            yield session


A, B, C = Prompt(1), Prompt(2), Prompt(3)
"""Three texts of four chunks."""


class StackKit(KitBase):
    """Fixtures that open a stack over the backend."""

    def stack(self, place: Path, *, capacity_bytes: int | None = None, **options: Any) -> SmallStack:  # noqa: ANN401  # SmallStack's own keywords
        """Open a small stack over the backend at ``place``; :class:`SmallStack` describes the options."""
        self.need()
        self.require_sound_declaration()
        capacity = capacity_bytes or self.capacity_bytes or 64 * MIB
        return SmallStack(
            self.plugin,
            self.make_options,
            place,
            capacity_bytes=None if self.capabilities.shared else capacity,
            **options,
        )

    @pytest.fixture
    def opened(self, place: Path) -> Iterator[SmallStack]:
        """Small stack over an empty backend."""
        with self.stack(place) as stack:
            yield stack
