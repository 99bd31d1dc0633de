"""Calls between the nodes of one job.

`api` is the interface for the rest of the framework. It has two implementations: `stream` connects processes, by unix
sockets on one host and by TCP between hosts; `memory` connects nodes within one process, with seeded order, crashes and
cut links, for tests and simulations. The other modules are their parts.

Rules:

1. Only this package opens sockets between nodes.
2. Received bytes are never unpickled, and trusted only after the hello.
3. A session breaks as a whole: all its calls fail at once.
4. A call fails in three ways: `Refused`, `PeerGone`, `PeerLost`.

The package does not know what a message means, which node is primary, or what etcd says. It imports messages from
`protocol` and the memory layout of values from `graph`, and nothing of `coordination` or `node`.
"""
