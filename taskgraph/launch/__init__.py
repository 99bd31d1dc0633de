"""Starting jobs: submitting them, starting nodes, following, collecting the result.

`run` is the whole of it, as `tg.run`, `tg.arun` and `tg.result` have it; `supervise` what a launcher does from the
first node to the result, with nodes of this host (`local`); `inprocess` has them in this process (`nodes=0`, tests).

Everything started here ends here. It decides nothing about tasks or epochs.
"""
