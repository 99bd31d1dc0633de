"""A task's primary for one term: becoming it, offering boundaries to backups, reporting, writing checkpoints.

Task 0's primary leads: it commits epochs, restarts the job or fails it.
"""
