"""Secure connections: mutual TLS, certificates, gRPC channels, and the address that a node listens on.

Knows nothing of jobs, nodes or etcd.
"""
