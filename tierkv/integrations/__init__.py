"""Adapters to engines. The only code that names an engine; each is imported only when it is asked for."""
