"""Simulates elastic jobs: the real node on a simulated etcd and network, under virtual time.

threads    real threads for user code, in lock-step with the loop
workload   the job, whose totals show what they are made of
checks     the invariants
world      etcd, network and nodes
faults     what fails
seed       one seed, from drawing to judging
"""

from taskgraph.testing.simulate.elastic.seed import run_elastic_seed

__all__ = ["run_elastic_seed"]
