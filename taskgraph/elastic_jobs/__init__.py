"""Elastic jobs: a user's loop on workers that come and go, with the bits of a run without failures.

    job        `@tg.elastic`: a function of a run, as a job
    run        what user code gets: the run
    steps      its steps
    parts      their parts, and the rounds in which they are summed
    gradients  PyTorch's gradients, from the parts to the parameters
    modules    buffers and modes of PyTorch's modules in the part loop
    state      what later steps rest on: captured, and loaded in place
    rows       which rows each step and part has
    data       the rows of a dataset or a DataLoader
    sums       trees of arrays as flat sums that can be added and sent
    seeding    the seeds of random, numpy and PyTorch
    watching   what a test sees of user code
    engine     carries out what the core (`taskgraph.protocol.elastic`) decides: sums, messages, answers to user code
    outbox     messages to one worker, in order
    silence    asks workers that reach etcd whether they reach this one
    values     the values of the workers, compared at the end
    node       a node of an elastic job: registers, follows the view, proposes views

It stands on coordination, transport and the node's own parts (`node.core`, `node.membership`). It does not know how
nodes are started.
"""
