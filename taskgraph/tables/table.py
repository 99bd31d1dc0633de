"""`Table`: what a job names in `tables`. Its servers are a service of the job."""

from __future__ import annotations

from dataclasses import dataclass

from taskgraph.errors import TableError
from taskgraph.services import Service
from taskgraph.tables.options import TableOptions
from taskgraph.tables.server import LateTableServer, TableServer

__all__ = ["Table", "title_of"]

_SERVERS = 4
"""The most servers of a table that does not say how many."""


@dataclass(frozen=True)
class Table(TableOptions):
    __doc__ = TableOptions.__doc__

    def service(self, name: str, tasks: int) -> Service:
        """Returns the servers of the table, as a job of `tasks` tasks calls it.

        Raises:
            TableError: a pull may lack more pieces than the table's staleness says.
        """
        if 0 < self.staleness < tasks - 1:
            raise TableError(
                f"table {name!r}: a pull may lack the piece that each other task works on, so with {tasks} tasks its "
                f"staleness is {tasks - 1} at least, or 0, not {self.staleness}"
            )
        kind, count = LateTableServer if self.staleness else TableServer, self.servers or min(tasks, _SERVERS)
        return Service(title_of(name), count, lambda server: kind(self, name, server, count))


def title_of(name: str) -> str:
    """Returns the title of the service that a table is."""
    return f"table {name}"
