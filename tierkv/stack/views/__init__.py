"""Views of a stack: the groups ``stack.tiers``, ``stack.events``, ``stack.metrics`` and ``stack.introspection``.

Each view holds the collaborators of one stack and no state of its own. A stack makes its views once, when it opens. An
engine step calls only ``StackEvents.forward``, where events must be forwarded in each step. Both kinds of stacks have
the same views.
"""
