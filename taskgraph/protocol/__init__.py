"""Decisions. No I/O, no clock, no asyncio, no randomness: events in, actions out.

What a job's safety rests on is in this package, one concept a module:

    keys, records, view   the job as etcd tells it: key layout, values, and a fold of watch events in revision order
    kv, transactions      every transaction the protocol writes, as data: what is compared, what is put
    messages              what replicas say to each other
    boundaries            which snapshots a member holds, which one is the committed one, when it frees them
    insync                whom a primary needs acknowledgements from; admission and eviction of members
    takeover              who may succeed a primary, and when
    lease_end             whether another node's lease has ended, before etcd deletes its key
    sums                  the two sums by which a commit sees that every edge of an epoch agrees
    commit                the leader: reports in; seal, commit, restart or fail out
    cycles                what a standing epoch waits for, and whether it waits for itself
    assignment, placement nodes and tasks in; wished replicas out

It imports nothing of ours but `taskgraph.errors`, and must not know how messages travel, how keys are stored, or
what a user's task computes.
"""
