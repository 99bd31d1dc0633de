"""The one place where nodes agree: keys, transactions, watches and leases.

Other packages see `api.Coordinator`. `etcd` is the real one, `memory` has the same semantics inside one process, and
`embedded` is an etcd server that lives and dies with its launcher.

Rules: every call is bounded; a write is sent again only if it certainly was not executed; a watch delivers every event
once, in revision order, across reconnections; a lease counts from the *sending* of its renewal, never from the answer.

Must not know: jobs, tasks and epochs, except `viewkeeper`, which keeps a job's view. Only `etcd` knows gRPC.
"""
