"""The decisions of an elastic job: workers come and go, and all hold the same totals, to the last bit.

Workers go through the same steps. A step sums one contribution of each *part* of its rows, and the sum over all parts
is the step's *total*. A further sum within a step is a further *round*, with a total of its own. A worker's *position*
is the number of totals that it holds. The protocol is virtual synchrony: views in etcd, messages between the workers.

    tree          the fixed binary tree along which all workers add the parts
    views         the numbered lists of workers
    succession    which view follows: without lost workers, or with a single one
    transactions  those that change the view, and end the job
    flush         what the workers of a new view hold, and what follows: pure functions of the workers' reports
    exchange      the contributions of a view to the position at work: when its total is complete
    round         the position at work on one worker: which parts it computes, which sums it holds
    stability     which totals all workers of the view are known to hold
    worker        one worker: what follows from each event
    actions       what it wants its caller to do

Three rules carry the safety; each module says which of them it keeps.

1. A total is complete by messages of one view, from every worker of that view, and each part has one source in a view.
2. A worker that reads a new view stops first, then reports once what it holds. The flush ends when it has the reports
   of all workers of the view.
3. A total counts outside of the workers (it is reported, saved, returned) once all workers of the view hold it.

The caller's duties are those of `taskgraph.protocol`. Values are the caller's, too: the core knows spans of parts.
"""
