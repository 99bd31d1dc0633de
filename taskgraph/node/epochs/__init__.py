"""Runs a primary's epochs: one after another or several in flight, each in one attempt or more.

An attempt composes its graph, pulls items for its processors, runs them, and serves the items they put. When nothing
runs any longer, its epoch is finished, and reported to the leader.
"""
