"""The node's process: one asyncio event loop that hosts replicas.

`process` is a node as a process, and `node` puts its parts together. `roles` holds what runs here, `reconciler` makes
that follow the view, and `replica` is one task. `core` has what all parts need, `services` what the tasks here share.
Packages:

    `membership`  a node among nodes: its lease, the nodes that it suspects, how it drains, leaves or dies
    `primary`     a task's primary for one term: takeovers, boundaries, backups, checkpoints; the leader
    `epochs`      the epochs that a primary works on, their attempts, and their pulls, puts and requests
    `usercode`    the only place where user code is called

`primary` knows the other three, `epochs` and `membership` know `usercode`, `usercode` knows none of them.

Decisions are taken in `taskgraph.protocol`. This package must not speak etcd or open sockets.
"""
