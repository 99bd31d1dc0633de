"""The node's process: one asyncio event loop that hosts replicas, and the wiring of everything below it.

`process` is a node as a process, and `node` puts its parts together. `roles` holds what runs here, `reconciler` makes
that follow the view, and `replica` is one task. `core` has what all parts need, `services` what the tasks here share.
Packages:

    `membership`  a node among nodes: its lease, its suspicions, leaving in good order, dying
    `primary`     a task's primary for one term: takeovers, boundaries, backups, checkpoints; the leader
    `epochs`      what a primary works on: epochs, their attempts, and what those pull, put and ask
    `usercode`    the only place where user code is called

`primary` knows the other three, `epochs` and `membership` know `usercode`, `usercode` knows none of them.

Decisions are taken in `taskgraph.protocol`. This package must not speak etcd or open sockets.
"""
