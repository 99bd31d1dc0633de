"""The process: one asyncio event loop that hosts replicas, and the wiring of everything below it.

    node         the node itself: registration, lease, pausing, reconciling with the view, serving calls
    replica      one task on this node: the user's object, its boundaries, its set-up
    primary      a task's primary for one term: epoch after epoch
    attempt      one attempt of one epoch: compose, pull, compute, seal, sync points
    mailbox      flags and requests of one attempt
    backups      offering boundaries, admitting and evicting members
    leader       task 0's primary: commit, restart, fail
    router       calls to whoever is a task's primary at the moment
    actor        where user code is called, and nowhere else
    threads      the worker threads plain `def` hooks run in

Decisions are taken in `taskgraph.protocol`; this package does what they say. It must not speak etcd or open sockets.
"""
