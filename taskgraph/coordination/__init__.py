"""Coordinates nodes through shared keys, transactions, watches and leases.

Other packages use `api.Coordinator`. `etcd` implements it on a real etcd, `memory` implements it inside one process,
and `embedded` runs an etcd server for the lifetime of its launcher.

Rules: every call is bounded; a write is sent again only if it certainly was not executed; a watch delivers every event
once, in revision order, across reconnections; a lease is valid from the *sending* of its renewal, not from the answer.

Must not know: jobs, tasks and epochs, except `viewkeeper`, which keeps a job's view. Only `etcd` knows gRPC.
"""
