"""Calls between the nodes of one job.

    api         the interface, and nothing else: what the rest of the framework sees
    stream      between processes: unix sockets on one host, TCP between hosts
    memory      within one process, with seeded order, crashes and cut links for tests and simulations

and what they are made of:

    wire        messages as protobuf headers and back, from tables made of the dataclasses
    frames      the frame: its kinds, its head and its bounds
    reader      frames out of a stream: bounded before anything is allocated, small messages taken whole
    incoming    a large message on its way in: received where it stays, digested as it comes
    outbox      what is still to be written, fair to small messages
    hello       both sides prove the job's token, and who they are
    session     one connection from hello to goodbye
    sides       the side of a session that calls, and the one that serves
    lending     large values between processes of one host; devicelending: those on a device
    endpoints   addresses and sockets
    accepting   accepting over TLS
    refusals    what is said of strangers
    calls       serving, answering, and owning the tasks that do it

Rules: only this package opens sockets between nodes. What arrives is never unpickled, and believed only after the
hello. A session breaks as a whole; then every call in it fails at once. A call fails in three ways and no others:
`Refused`, `PeerGone`, `PeerLost`.

It must not know what a message means, who is primary, or what etcd says: it imports the messages and nothing else
of `protocol`, how values lie in memory and nothing else of `graph`, and nothing of `coordination` or `node`.
"""
