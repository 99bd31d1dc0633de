"""Calls between the nodes of one job.

`api` is the interface, and nothing else: what the rest of the framework sees. It is there twice: `stream` between
processes, by unix sockets on one host and by TCP between hosts; `memory` within one process, with seeded order, crashes
and cut links, for tests and simulations. What they are made of is in the other modules.

Rules: only this package opens sockets between nodes. What arrives is never unpickled, and believed only after the
hello. A session breaks as a whole; then every call in it fails at once. A call fails in three ways and no others:
`Refused`, `PeerGone`, `PeerLost`.

It must not know what a message means, who is primary, or what etcd says: it imports the messages and nothing else
of `protocol`, how values lie in memory and nothing else of `graph`, and nothing of `coordination` or `node`.
"""
