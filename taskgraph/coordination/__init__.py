"""The one place where nodes agree: keys, transactions, watches and leases.

`api.Coordinator` is what everybody else sees. `etcd` is the real one, `memory` the same semantics inside one
process, `embedded` an etcd server that lives and dies with us.

Rules: every call is bounded; nothing written is sent twice unless it certainly was not executed; what a watch
tells arrives once, in revision order, across reconnections; a lease's validity is counted from when its renewal
was *sent*, never from when the answer came.

Must not know: what a job, a task or an epoch is (but `viewkeeper`, which keeps what etcd tells of a job for everybody
else). Only `etcd` knows gRPC.
"""
