"""Starting jobs: submitting them, starting nodes, following, collecting the result.

    submit      one transaction that begins a job
    local       node processes on this host
    inprocess   nodes in this process (`nodes=0`, tests)
    run         the whole of it: `tg.run`, `tg.arun`, `tg.result`
    runtime     the directory by which jobs of this host are found
    guard       a tiny process that ends what its parent started, even if that is killed

Everything started here ends here. It decides nothing about tasks or epochs.
"""
