"""The operating system and asyncio, as the rest of the package uses them: processes, files, streams, signals.

This package knows nothing of jobs, nodes or etcd.
"""
