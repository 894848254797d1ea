"""Commands over traces of requests: ``replay``, ``trace`` and ``plan``.

``replay`` plays a trace against policies, or through whole stacks. ``trace`` makes a trace of the record of a stack.
``plan`` compares stacks by what they save and cost. None of them opens a tier or an engine.
"""
