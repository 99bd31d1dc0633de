"""Work queues of task graphs, and maps in an epoch: pieces go to free tasks, and each counts once.

    the map's processor, on each task of the user     the dealer: task 0, or the service of a named queue
      done, wants more   ────── ask ──────────────►   a `QueueLedger` of the pieces
      computes           ◄───── pieces ────────────
      ...
      it is over         ◄───── which results are whose
      results            ────── a channel ────────►   all tasks: the sync point
      which are counted  ────── a request ────────►   the service of a named queue: its ledger, at its sync point

The dealer of an epoch is no state: nothing rests on it but who computes what. All asks may be repeated, and say what
their sender has, so a dealer that takes over, or an attempt that begins again, learns what is finished already. What
counts is what the results' channel brings, and that is committed with the epoch.

    queue      `WorkQueue`, what the user writes
    plan       the pieces of one epoch
    dealer     deals the pieces of one epoch (pure)
    worker     what one task has of them: pieces to compute, results (pure)
    pieces     calls user code for one piece; results kept over attempts
    late       what a piece may do once its epoch has gone on without it
    computing  the compute of a map
    composing  the processors that a map declares
    service    the task that has the ledger of a named queue

This package must know nothing of nodes, sockets and clocks.
"""
