"""A task's primary for one term: takes over, offers boundaries to backups, reports, writes checkpoints.

Task 0's primary leads: it commits epochs, restarts the job or fails it.
"""
