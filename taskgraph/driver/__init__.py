"""Drivers: how a job names the user's code, how another process loads it, and the fingerprint that compares it."""
