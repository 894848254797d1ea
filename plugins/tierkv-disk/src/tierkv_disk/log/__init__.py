"""The history of the table on disk: one append-only file of fixed-size records, and one writer.

``index_log`` encodes, reads, creates and appends. A put names the runs of a frame, a delete names a key. Each record
carries a checksum seeded with the namespace. ``group_commit`` lets concurrent callers share one forced write. The first
caller appends the records of all waiting callers, forces them once, and applies them in log order.

Invariants. Records are appended after their frames are durable. The table changes in the order of the log. After a
failed append or sync the log takes no further record: ``rewriting`` replaces it by a new one, made from the table.
"""
