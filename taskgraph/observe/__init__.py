"""What people see of a job: events, status, progress.

One point, `EventLog.emit`, feeds the log, the events kept in etcd, and whoever follows. This package decides nothing
about the job and must not change it.
"""
