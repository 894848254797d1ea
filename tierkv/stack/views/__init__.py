"""Views of a stack: the groups ``stack.tiers``, ``stack.events``, ``stack.metrics`` and ``stack.introspection``.

Each view holds the collaborators of one stack and no state of its own. A stack makes its views once, when it opens; no
call of an engine step passes through them. Both kinds of stacks have the same views.
"""
