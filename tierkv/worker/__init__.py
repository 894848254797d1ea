"""Worker: copies chunks between an engine's KV tensors and the slots of the host tier. One worker per rank.

Nouns:

* :class:`~tierkv.worker.worker.Worker`: runs the jobs of one rank in the order that each step requires.
* *Job*: chunks to store or to load together; see :class:`tierkv.types.transfers.TransferJob`.
* *Copies*: starts transfers, on the host's cores (``host_copies``) or on a GPU's copy engines (wing ``cuda``).
* *Pages*: KV tensors as bytes, gathered into a part of a slot and scattered from it (``pages``, ``cuda.pages``).
* :class:`~tierkv.worker.rank_slice.RankSlice`: the parts of the slots that belong to one rank.
* On the scheduler's side: :class:`~tierkv.worker.rank_reports.RankReports` merges the reports of several workers;
  :class:`~tierkv.worker.staged_seals.StagedSeals` seals the stores of an engine that schedules itself;
  :class:`~tierkv.worker.completion_flags.CompletionFlags` is a shared table of completed jobs.

Flow of a store: gather pages into the part of the slot, compute its checksum, seal the slot or report the checksum.
Flow of a load: check header and part, then scatter the part to the pages. ``get_finished`` returns the ended jobs.

Threads: each worker belongs to one thread of its process; copies run on copy threads. Scheduler-side classes belong to
the scheduler's thread.

Invariants: a worker decides nothing. It waits only for jobs that must end before the forward pass, and at shutdown. A
failed transfer is a report, never an exception. A slot is sealed when all its parts are in place, or never. A rank
counts once per job.
"""
