"""What a primary works on: one epoch after another or several in flight, each in one attempt or more.

An attempt composes its graph, pulls what its processors take, runs them, serves what they put, and grows quiet; then
its epoch is done, and reported.
"""
