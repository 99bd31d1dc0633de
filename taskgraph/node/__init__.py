"""The process: one asyncio event loop that hosts replicas, and the wiring of everything below it.

    process      a node as a process: connecting, signals, exit codes
    node         the node itself: reconciling what runs here with what the view says
    registration its lease and key: registering, pausing, resuming, leaving
    suspicion    which nodes are suspected dead, which are gone
    overdue      whose lease has ended, before their key is deleted
    takeovers    becoming primary
    serving      calls from other nodes: the gate, and who answers
    control      the gRPC service for people and tools
    writes       transactions until their outcome is known
    noticing     neighbors that fail, user code that runs for very long
    telling      status and results
    replica      one task on this node: the user's object, its boundaries, its set-up
    primary      a task's primary for one term: epoch after epoch
    reports      the numbers tasks report, epoch by epoch
    reporter     tells the leader what a primary reports
    strict       strict mode: every epoch replayed from its snapshot
    attempt      one attempt of one epoch: compose, pull, compute, seal, sync points
    attempts     a primary's attempts that are not committed, and the pulls that wait for one
    mailbox      flags and requests of one attempt
    backups      offering boundaries, admitting and evicting members
    gathered     small boundaries that are offered together
    leader       task 0's primary: commit, restart, fail
    router       calls to whoever is a task's primary at the moment
    actor        where user code is called, and nowhere else
    threads      the worker threads plain `def` hooks run in

Decisions are taken in `taskgraph.protocol`; this package does what they say. It must not speak etcd or open sockets.
"""
