"""One epoch's graph of one task, and the values that travel along it.

`compose` checks what a task declares; `values` turns what it puts into bytes and back. Neither knows how bytes
travel, nor when something runs.
"""
