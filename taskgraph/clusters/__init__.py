"""Launchers: they start the nodes of a job on this host, on Slurm or on Kubernetes, and change their number.

No launcher keeps nodes alive: the scheduler of the cluster does that. See docs/clusters.md.
"""
