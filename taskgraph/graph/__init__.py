"""One epoch's graph of one task, and the values that travel along it.

`compose` checks what a task declares. `values` turns what it puts into bytes and back; most other modules are parts of
that.

Rules: equal values give equal bytes in every process; nobody can change what was encoded; nothing is ever unpickled;
what arrives is checked before anything is made of it.

Nothing here knows how bytes travel, nor when something runs.
"""
