"""`Table`: what a job names in `tables`. Its servers are a service of the job."""

from __future__ import annotations

from dataclasses import dataclass

from taskgraph.services import Service
from taskgraph.tables.options import TableOptions
from taskgraph.tables.server import ImmediateTableServer, TableServer

__all__ = ["Table", "title_of"]

_SERVERS = 4
"""The most servers of a table that does not say how many."""


@dataclass(frozen=True)
class Table(TableOptions):
    __doc__ = TableOptions.__doc__

    def service(self, name: str, tasks: int) -> Service:
        """Returns the service of the table's servers, in a job of `tasks` tasks that calls the table `name`."""
        kind, count = ImmediateTableServer if self.staleness else TableServer, self.servers or min(tasks, _SERVERS)
        return Service(title_of(name), count, lambda server: kind(self, name, server, count))


def title_of(name: str) -> str:
    """Returns the title of the service that a table is."""
    return f"table {name}"
