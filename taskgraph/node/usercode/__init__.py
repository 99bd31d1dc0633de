"""Calls user code; no other package does. Chooses its turn and thread, and keeps its last words when it dies."""
