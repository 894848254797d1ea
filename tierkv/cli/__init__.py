"""The ``tierkv`` program: one module per command, imported when it is called."""
