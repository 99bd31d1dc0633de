"""The version of the package and of the protocol."""

VERSION = "0.1.0"

PROTOCOL = 15
"""The version of the messages between nodes and of the records in etcd. A job's nodes all have the same one."""

LOCAL_FINGERPRINT = "local"
"""The fingerprint of a job in one process, where no other process needs the same source."""
