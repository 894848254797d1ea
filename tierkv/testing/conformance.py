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
``raw`` gives the kit a way to the stored bytes past the backend (:class:`~tierkv.testing.raw.RawAccess`). What else an
author may state (lengths, capacities) is in :class:`~tierkv.testing.kit.KitBase`.

A test of the kit that is overridden, taken out or skipped by anybody but the kit fails the suite.
"""

from __future__ import annotations

from tierkv.testing.suite_async import AsyncTests
from tierkv.testing.suite_batches import BatchTests
from tierkv.testing.suite_buffers import BufferTests
from tierkv.testing.suite_contract import ContractTests
from tierkv.testing.suite_damage import DamageTests
from tierkv.testing.suite_durability import DurabilityTests, PlaceTests
from tierkv.testing.suite_keys import KeyTests
from tierkv.testing.suite_lifecycle import LifecycleTests
from tierkv.testing.suite_load import CapacityTests, ConcurrencyTests
from tierkv.testing.suite_processes import ProcessTests
from tierkv.testing.suite_reopen import ReopenTests
from tierkv.testing.suite_room import RoomTests
from tierkv.testing.suite_rules import RuleTests
from tierkv.testing.suite_stack_data import StackDataTests
from tierkv.testing.suite_stack_faults import StackFaultTests
from tierkv.testing.suite_stack_flow import StackFlowTests
from tierkv.testing.suite_stack_room import StackRoomTests
from tierkv.testing.suite_stack_wedged import StackWedgedTests


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
