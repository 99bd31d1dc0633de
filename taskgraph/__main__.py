"""`python -m taskgraph`."""

from taskgraph.cli import entry

if __name__ == "__main__":
    entry()
