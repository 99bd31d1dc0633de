"""Sums and exchanges of values among tasks, in one call of compose(): allreduce, broadcast, gather and so on.

A collective is made of ordinary processors and channels, so that all promises of an epoch hold for it:

    value(epoch, ins) ──► internal processors of all tasks ──► the result, a channel of its tag ──► then(epoch, ins)

`interface` has the methods of `tg.Epoch`. `declaring` declares processors and channels, as `plan` says: which members
send what to whom follows from the members alone. `values` and `steps` have what the processors do, and `adding` adds.

Values are added along one fixed tree over the members (`protocol.elastic.tree`), whichever way they travel.

This package must know nothing of nodes, sockets and clocks.
"""
