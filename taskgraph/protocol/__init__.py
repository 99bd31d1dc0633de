"""Decisions. No I/O, no clock, no asyncio, no randomness: events in, actions out.

What a job's safety rests on is in this package, one concept a module. Who reads it for the first time begins with
docs/protocol.md, then `keys`, `records` and `view`, the job as etcd tells it; `transactions`, all that nodes write, and
what fences it; `boundaries` and `insync`, who holds which state; `takeover`; and `commit`, which rests on `sums`.

It imports nothing of ours but `taskgraph.errors`, and must not know how messages travel, how keys are stored, or
what a user's task computes.
"""
