"""Jobs: transfers that workers perform, the blocks that they use, and their completion.

Flow: :mod:`.jobs` counts a job until every worker has reported it, and fences its blocks. :mod:`.block_tables` follows
the engine's block tables; a block that is about to be written yields the jobs that must be flushed before.
:mod:`.completions` handles worker reports: it frees slots, resumes or forgets requests, and builds the engine's report.

Invariants: job ids are never reused. A job ends when every worker has reported it. I3: a fenced block has a job in
flight. A table never holds a block that another request was given since.
"""
