"""Elastic jobs: a user's loop on workers that come and go, with the bits of a run without failures.

What user code calls, in its thread:

    job            `@tg.elastic`: a function of a run, as a job
    run            what user code gets: the run
    steps, rows    the steps, and which rows each step and part has
    data           the rows of a dataset or a DataLoader
    parts          the parts of a step, and the rounds in which they are summed
    layouts, sums  trees of arrays as flat sums; `adding`: their sums along the tree
    gradients      PyTorch's gradients, from the parts to the parameters
    modules        buffers and modes of PyTorch's modules in the part loop
    state          what later steps rest on: captured, and loaded in place
    seeding        the seeds of random, numpy and PyTorch
    libraries      the array libraries that are imported
    progress       where user code is; pieces that one worker computes for all; `watching`: what a test sees of it
    groups         collectives for loops of another shape
    shards         a loop over pieces that go to free workers
    piece_queue    the pieces that this worker has
    usercall       one call of the function: between its thread and the loop

One worker, on the event loop:

    node           its parts, its user code and its end
    view_changes   the views in etcd: it begins, proposes the next one, goes on alone
    joining        how a newcomer enters the view; `leaving`: how a draining worker leaves
    dealing        the rounds that deal pieces, beside user code; `tally`: what follows from each
    engine         carries out what the core (`taskgraph.protocol.elastic`) decides; answers user code
    contributions  the sums of the position at work, and the total made of them; `slices`: large ones
    totals         those that are kept, also for newcomers
    inbox, outbox  messages of other workers; messages to them, in order
    serving        answers to other workers and newcomers
    silence        asks workers that reach etcd whether they reach this one
    differing      workers whose state or user code differs
    checkpoints    the state, in files
    reports        numbers of steps, once these are stable
    values         the values of the workers, compared at the end
    together       sums by PyTorch's communicators (`process_groups`)
    tracing        spans for `taskgraph trace`

It stands on coordination, transport and the node's own parts (`node.core`, `node.membership`). It does not know how
nodes are started.
"""
