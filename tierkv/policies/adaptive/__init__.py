"""Policy ``adaptive``: learn from requests which chunks are reused soon, keep those, and refuse the others.

Nouns:

- A *mark* is a 31-bit digest of a chunk's key. Marks find chunks in the tier (:mod:`~.residents`) and chunks that the
  policy remembers although they are not in the tier (:mod:`~.memory`).
- A *class* (:mod:`~.classes`) groups chunks that behave alike: by how many requests had them in their path, by the
  number of new chunks of the last such request, and by its hints. A *level* is its priority.
- A *run* (:mod:`~.runs`) is a sequence of neighbouring chunks of one class that one request had in its path.
- The *value* of a chunk (:mod:`~.value_model`) is the expected number of reuses per second of keeping it, by class and
  age. It is learned from chunks that were reused and chunks that were not.
- The *eviction order* (:mod:`~.order`) has a queue of runs per class and level, and a ring of chunks per run.

Flow: a request observation reaches :mod:`~.observations`, which counts every chunk of the path, assigns it to a run,
and updates the value model. ``add`` and ``touch`` move chunks in the tier to the run that they were last seen in.
``evict`` takes the deepest chunk of the run with the lowest value. ``refuse`` compares new chunks with the chunks
that would be evicted for them.

Invariants:

- A chunk is evicted after all chunks of the tier that continue its prefix. Until then it is *parked*.
- Of each queue only the two ends are compared, so a choice costs the number of queues, not of runs.
- The work per verb is bounded; paths that are longer than the bound are processed in later verbs.
- Without observations the policy is least recently used.
"""
