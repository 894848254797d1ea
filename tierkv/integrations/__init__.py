"""Adapters to real engines. Nothing outside this package knows an engine, and it is imported only when asked for."""
