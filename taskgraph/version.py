"""Versions."""

VERSION = "0.1.0"

PROTOCOL = 13
"""What nodes say to each other and to etcd; nodes of different protocols do not work on one job."""

LOCAL_FINGERPRINT = "local"
"""The fingerprint of a job in one process, where no other process needs the same source."""
