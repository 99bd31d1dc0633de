"""Tables: parameters by row, as in a parameter server, with pushes that count once whatever dies.

A table is a mapping from int64 ids to rows of numbers. A row without a push is made when it is
needed, from the table's seed and its id alone.

Rules:
1. `rows`, `optimizers`, `merging` and `store` are pure: numpy alone, no clock, no I/O, no asyncio. The same calls give
   the same bits on every node.
2. Rows are changed by an optimizer, from the sum of all gradients pushed to a row. The sum is made in a fixed order.
3. Arrays that a store has given out never change; a change makes new ones. So a snapshot costs no copy.
"""
