"""The operating system and asyncio, as the rest of the package uses them: processes, files, streams, signals, timeouts.

Knows nothing of jobs, nodes or etcd.
"""
