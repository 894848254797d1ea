"""Plans: what stacks of tiers would save and cost on the requests of a trace.

Four nouns. *Assumptions* state what a trace does not: speeds, prices, the rate of computation. A *played stack*
(:mod:`tierkv.replay`) has the hits and the traffic of a stack. An *estimate* derives times from both. A
*stack plan* is the whole answer for one stack; a *plan* has those of all stacks, and what they leave out.

Flow: :func:`~tierkv.planning.plan.make_plan` plays each stack, by stack distances where they are exact, otherwise
through the real scheduler and manager. ``timing`` decides which hits are worth loading and puts requests into a queue.
``growth`` plays each stack again with more room.

Invariants:

- No clock and no chance: equal input gives equal plans.
- Nothing is opened: neither tiers nor engines.
"""
