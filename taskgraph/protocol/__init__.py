"""The decisions of the protocol as pure functions and state machines, without I/O, clock, asyncio or randomness.

The safety of a job rests on this package, one concept a module. Read docs/protocol.md first, then:

    keys, records, view    the state of a job in etcd, and a node's picture of it
    transactions           all writes of nodes, with their fences
    boundaries, insync     the snapshots of a replica; the backups that must store a boundary
    takeover               which backup becomes primary, and when
    sums, commit           when an epoch is complete

The caller's duties: pass all events in order, one at a time; read the clock and pass times; carry the actions out, and
report their outcomes. The package imports only `taskgraph.errors` of ours. It does not know how messages are sent, how
keys are stored, or what a task computes.
"""
