"""The process: one asyncio event loop that hosts replicas, and the wiring of everything below it.

    process      a node as a process: connecting, signals, exit codes
    forkserver   the process that nodes are forked from; `config`: what a node is told to be
    node         the node: its parts, what they ask of each other, its life from registering to leaving
    roles        what runs here, brought in line with what the view says
    replica      one task on this node: the user's object, its set-up, its boundaries; `reports`: its numbers
    serving      calls from other nodes: the gate, and who answers
    router       calls to whoever is a task's primary at the moment
    writes       transactions until their outcome is known
    control      the gRPC service for people and tools; `telling`, `tracing`: what it is answered with
    inject       faults at named moments of real processes

    membership/  a node among nodes: its lease, whom it suspects, leaving in good order, dying
    primary/     a task's primary for one term: taking over, its boundaries, its backups, its checkpoints; the leader
    epochs/      what a primary works on: epochs, their attempts, what those pull, put, and ask of each other
    usercode/    where user code is called, and nowhere else

Of these, `primary` knows the other three, `epochs` and `membership` know `usercode`, and `usercode` none of them.

Decisions are taken in `taskgraph.protocol`; this package does what they say. It must not speak etcd or open sockets.
"""
