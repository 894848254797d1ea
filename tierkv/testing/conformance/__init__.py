"""Conformance kit: the contract of backends, as a test class to inherit from.

::

    from tierkv.testing import BackendConformance

    class TestFoo(BackendConformance):
        plugin = tierkv_foo.PLUGIN

        def make_options(self, place):
            return FooOptions(path=str(place))

        def raw(self, place, context):
            return FooFiles(place / context.namespace.fingerprint().hex())

Flow of a test: the kit opens the backend through its plugin, as the framework does. Tests of ``backend/`` call its
verbs through a :class:`~tierkv.testing.conformance.session.Session`, the same for blocking and async backends. Tests of
``stack/`` open it below a real small stack and drive requests through it. Those of ``at_rest`` use it without a stack,
as the ``tierkv`` program does. ``raw`` reads and changes stored bytes past
the backend (:class:`~tierkv.testing.raw.RawAccess`); ``server_control`` stops and starts the server of a remote one
(:class:`~tierkv.testing.server_control.ServerControl`). Lengths, capacities and other choices of the author are in
:class:`~tierkv.testing.conformance.kit.KitBase`.

Invariants: a test applies or not by declared capabilities, never by a name. A kit test that a suite overrides, removes
or skips fails the suite; only the kit itself leaves tests out, with a reason in the report.
"""

from __future__ import annotations

from tierkv.testing.conformance.at_rest import AtRestTests
from tierkv.testing.conformance.backend.batches import BatchTests
from tierkv.testing.conformance.backend.buffers import BufferTests
from tierkv.testing.conformance.backend.contract import ContractTests
from tierkv.testing.conformance.backend.damage import DamageTests
from tierkv.testing.conformance.backend.declaration import DeclarationTests
from tierkv.testing.conformance.backend.durability import DurabilityTests, PlaceTests
from tierkv.testing.conformance.backend.event_loop import AsyncTests
from tierkv.testing.conformance.backend.keys import KeyTests
from tierkv.testing.conformance.backend.lifecycle import LifecycleTests
from tierkv.testing.conformance.backend.load import CapacityTests, ConcurrencyTests
from tierkv.testing.conformance.backend.outages import OutageTests
from tierkv.testing.conformance.backend.processes import ProcessTests
from tierkv.testing.conformance.backend.reopen import ReopenTests
from tierkv.testing.conformance.backend.room import RoomTests
from tierkv.testing.conformance.rules import RuleTests
from tierkv.testing.conformance.stack.data import StackDataTests
from tierkv.testing.conformance.stack.faults import StackFaultTests
from tierkv.testing.conformance.stack.flow import StackFlowTests
from tierkv.testing.conformance.stack.outages import StackOutageTests
from tierkv.testing.conformance.stack.room import StackRoomTests
from tierkv.testing.conformance.stack.wedged import StackWedgedTests


class BackendConformance(
    RuleTests,
    StackFlowTests,
    StackRoomTests,
    StackOutageTests,
    StackWedgedTests,
    StackFaultTests,
    StackDataTests,
    AtRestTests,
    RoomTests,
    CapacityTests,
    ConcurrencyTests,
    PlaceTests,
    ProcessTests,
    OutageTests,
    DamageTests,
    ReopenTests,
    DurabilityTests,
    AsyncTests,
    LifecycleTests,
    BufferTests,
    KeyTests,
    BatchTests,
    ContractTests,
    DeclarationTests,
):
    """Inherit, set ``plugin``, define ``make_options`` and ``raw``.

    The tests of the last base run first: the declaration, the contract, and a whole stack at the end.
    """
