"""The ``tierkv`` program: one module per command.

- :mod:`~tierkv.cli.main`: entry point. Its table has the name and summary of each command.
- ``check``, ``demo``, ``explain``, ``plugins``: one module or package each.
- :mod:`~tierkv.cli.planning`: the commands over traces of requests: ``replay``, ``trace``, ``plan``.
- :mod:`~tierkv.cli.pages`: reports of commands as HTML pages.
- :mod:`~tierkv.cli.output`: JSON for programs and tables for terminals.
- :mod:`~tierkv.cli.reference`: generator of docs/reference/cli.md.

Flow: ``main`` parses the command line and imports the command's module when it runs. A command reads its input, calls
public functions of other packages, and prints one JSON object or tables. An unknown name is searched among the commands
of plugins.

Invariants:

- ``tierkv --help`` imports no command and no plugin.
- Exit code 0: success; 1: the checked thing is not well; 2: wrong input, with one message and its fix.
- Only this package imports click and rich.
"""
