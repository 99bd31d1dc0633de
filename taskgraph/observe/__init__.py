"""What people see of a job: events, status, progress, traces.

One function, `EventLog.emit`, feeds the log, the events kept in etcd, and followers. This package decides nothing about
the job and must not change it.
"""
