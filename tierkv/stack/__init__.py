"""Composition root: stacks, how they are opened, and their step loop.

Six nouns. A ``Stack`` holds a scheduler of tierkv; a ``StagedStack`` serves an engine that schedules itself. Both hold
a ``StackCore``: step loop, flush and release. ``StackWiring`` is the value that the wiring code returns: manager,
dispatch, workers, memory. A ``StepJournal`` records the steps, or keeps nothing. ``stack.tiers``, ``stack.events`` and
``stack.metrics`` group the calls that are not part of a step.

Opening: ``opening`` resolves the description and checks it against the engine. ``wiring`` opens tiers with the
``tier_factory`` and starts dispatch; :mod:`tierkv.scheduler.wiring` wires scheduler and manager without I/O;
``wiring.connect`` lists what the tiers hold and joins everything. If a part fails, all opened parts are closed.

A step: the engine's first call takes in the completions of dispatch. Its other calls reach the scheduler, which
instructs the manager. ``build_connector_meta`` (``end_step`` of a staged stack) ends the step: the manager's operations
go to dispatch, events to observers, the transfers to the workers.

Invariants. No call of a step waits for a tier, or raises because of one. Everything runs on the engine's scheduler
thread, except what its text names; tiers are opened and listed on the thread of the caller (``tier_lifecycle``) and
linked by a step. This package decides nothing about chunks: there is no policy in it.
"""
