"""Runs a primary's epochs: one after another or several in flight, each in one attempt or more.

An attempt composes its graph, pulls items for its processors, runs them, serves the items they put, and grows quiet.
Then its epoch is finished, and reported to the leader.
"""
