"""The conformance kit: what every backend must do, as a test class to inherit from.

::

    from tierkv.testing import BackendConformance

    class TestFoo(BackendConformance):
        plugin = tierkv_foo.PLUGIN

        def make_options(self, place):
            return FooOptions(path=str(place))

        def raw(self, place, context):
            return FooFiles(place / context.namespace.fingerprint().hex())

The kit opens the backend itself, through the plugin, as the framework does: alone, and below a real small stack. Which
tests apply follows from the declared capabilities, never from a name. Blocking and async backends run the same tests.
``raw`` gives the kit a way to the stored bytes past the backend (:class:`~tierkv.testing.raw.RawAccess`).
What else an author may state (lengths, capacities) is in :class:`~tierkv.testing.conformance.kit.KitBase`.

A test of the kit that is overridden, taken out or skipped by anybody but the kit fails the suite.
"""

from __future__ import annotations

from tierkv.testing.conformance.backend.batches import BatchTests
from tierkv.testing.conformance.backend.buffers import BufferTests
from tierkv.testing.conformance.backend.contract import ContractTests
from tierkv.testing.conformance.backend.damage import DamageTests
from tierkv.testing.conformance.backend.durability import DurabilityTests, PlaceTests
from tierkv.testing.conformance.backend.event_loop import AsyncTests
from tierkv.testing.conformance.backend.keys import KeyTests
from tierkv.testing.conformance.backend.lifecycle import LifecycleTests
from tierkv.testing.conformance.backend.load import CapacityTests, ConcurrencyTests
from tierkv.testing.conformance.backend.processes import ProcessTests
from tierkv.testing.conformance.backend.reopen import ReopenTests
from tierkv.testing.conformance.backend.room import RoomTests
from tierkv.testing.conformance.rules import RuleTests
from tierkv.testing.conformance.stack.data import StackDataTests
from tierkv.testing.conformance.stack.faults import StackFaultTests
from tierkv.testing.conformance.stack.flow import StackFlowTests
from tierkv.testing.conformance.stack.room import StackRoomTests
from tierkv.testing.conformance.stack.wedged import StackWedgedTests


class BackendConformance(
    ContractTests,
    BatchTests,
    KeyTests,
    BufferTests,
    LifecycleTests,
    AsyncTests,
    DurabilityTests,
    ReopenTests,
    DamageTests,
    ProcessTests,
    PlaceTests,
    ConcurrencyTests,
    CapacityTests,
    RoomTests,
    StackDataTests,
    StackFaultTests,
    StackWedgedTests,
    StackRoomTests,
    StackFlowTests,
    RuleTests,
):
    """Inherit, set ``plugin``, define ``make_options`` and ``raw``."""
