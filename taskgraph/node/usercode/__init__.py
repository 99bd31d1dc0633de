"""Calls user code; no other package does. Chooses the turn and thread of a call, and records which code runs, in a file
that outlives the process."""
