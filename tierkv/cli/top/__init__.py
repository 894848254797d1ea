"""``tierkv top``: a live view of a running stack, from another terminal.

- :mod:`~.sources`: a port that serves metrics, or the record of a stack. Both give *samples*: the metrics at one time.
- :mod:`~.window`: the last samples of one stack, and the growth of counters between them.
- :mod:`~.figures`: what a reader wants to know, computed from a window. ``--json`` prints it.
- :mod:`~.changes`: what has happened between two samples, in words.
- :mod:`~.screen`: figures and changes as tables for a terminal.
- :mod:`~.command`: the command and its loop.

Only the command waits, reads the clock or draws. A source that stops answering is shown, and asked again.
"""
