"""The commands of `taskgraph`, one module per group; `common` finds the job they speak of.

Commands print for people, and raise `TaskGraphError` with what to do; `taskgraph.cli` turns that into an exit code.
"""
