"""The process: one asyncio event loop that hosts replicas, and the wiring of everything below it.

`process` is a node as a process, `node` puts its parts together, `roles` is what runs here, which `reconciler` brings
in line with what the view says, `replica` is one task. What all parts have is in `core`, what the tasks here share in
`services`. In packages of their own are

    `membership`  a node among nodes: its lease, whom it suspects, leaving in good order, dying
    `primary`     a task's primary for one term: taking over, its boundaries, its backups, its checkpoints; the leader
    `epochs`      what a primary works on: epochs, their attempts, what those pull, put, and ask of each other
    `usercode`    where user code is called, and nowhere else

Of these, `primary` knows the other three, `epochs` and `membership` know `usercode`, and `usercode` none of them.

Decisions are taken in `taskgraph.protocol`; this package does what they say. It must not speak etcd or open sockets.
"""
