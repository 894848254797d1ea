"""``TierKVConnector``: tierkv's own scheduler inside vLLM, as a KV connector of interface version 1.

- :mod:`~.connector`: the class that vLLM creates, once per role. It translates calls and holds one of the two sides.
- :mod:`~.scheduler`: the side in the scheduler's process, with the stack.
- :mod:`~.worker`: the side in each worker's process, which copies pages.
- :mod:`~.containment`: keeps errors of both sides from vLLM.
- :mod:`~.meta`: messages between the sides, in the classes that vLLM expects.
- :mod:`~.shape`, :mod:`~.requests`, :mod:`~.steps`: translation of vLLM's configuration, requests and scheduler output.

Flow of a request: vLLM asks for the number of tokens that can be loaded, allocates blocks, and starts the step. The
step's message carries the transfers. The workers report ended transfers, and the scheduler's side updates the stack.

Invariants:

- Instructions are built exactly once per step, after scheduling.
- A load that vLLM waits for is reported as ended or as failed, even when the stack refuses it.
- The first messages carry the setup that every worker needs, until all workers have reported that they use it.
"""
