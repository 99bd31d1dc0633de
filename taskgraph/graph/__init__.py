"""Describes one epoch's graph of one task, and encodes the values that travel along it.

`compose` checks the graph that a task declares. `values` encodes and decodes values; most other modules are parts of
that.

Rules: equal values give equal bytes in every process; encoded values never change; nothing is ever unpickled;
bytes that arrive are checked before a value is made of them.

Nothing here knows how bytes travel, nor when something runs.
"""
